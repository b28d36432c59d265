"""Token buckets by name, in memory that the processes of a host share: of upstreams with a rate limit, and of client
addresses with failed authentications.

A name is stored as a 64-bit tag, beside the bucket's edge (core/limits). The table is set-associative: a tag has a few possible
places, and the one whose bucket is fullest makes room for a new name. So a flood of names takes no memory and no time, and
displaces those first that have used the least.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from hashlib import blake2b

from proxy.core import limits
from proxy.store.shared_memory.robust_mutexes import Mutex, holding

WAYS = 8
ENTRY_BYTES = 16


def bytes_of(sets: int) -> int:
    return sets * WAYS * ENTRY_BYTES


class EdgeTable:
    """A part of the shared memory, and the mutexes that guard it."""

    def __init__(self, memory: memoryview, mutexes: list[Mutex]) -> None:
        self._tags = memory.cast("q")
        self._edges = memory.cast("d")
        self._mutexes = mutexes
        self._sets = len(memory) // (WAYS * ENTRY_BYTES)

    def __repr__(self) -> str:
        return f"<EdgeTable {self._sets * WAYS} places>"

    def take(self, name: str, now: float, cost_s: float, *, holds_s: float) -> float:
        """Take from a bucket that holds `holds_s`. Returns 0 if there was enough, otherwise the seconds to wait."""
        tag = _tag(name)
        with self._guard(tag):
            place = self._claim(tag)
            edge = max(self._edges[place], now - holds_s) + cost_s
            if edge > now + limits.TOLERANCE_S:
                return edge - now
            self._edges[place] = edge
            return 0.0

    def charge(self, name: str, now: float, cost_s: float) -> None:
        """Charge one call, also to an empty bucket: the debt delays the calls after it."""
        tag = _tag(name)
        with self._guard(tag):
            place = self._claim(tag)
            self._edges[place] = limits.edge_after_call(self._edges[place], now, cost_s)

    def owe(self, name: str, now: float, cost_s: float, *, holds_s: float) -> None:
        """Charge events on other hosts. The debt is at most the size of the bucket."""
        tag = _tag(name)
        with self._guard(tag):
            place = self._claim(tag)
            self._edges[place] = min(max(self._edges[place], now - holds_s) + cost_s, now + holds_s)

    def place_of(self, name: str) -> int:
        """Claim a place and return its index, for memory beside this table."""
        tag = _tag(name)
        with self._guard(tag):
            return self._claim(tag) // 2

    def edge(self, name: str) -> float:
        """Reading a number is atomic and needs no lock."""
        tag = _tag(name)
        for place in self._places(tag):
            if self._tags[place - 1] == tag:
                return self._edges[place]
        return 0.0

    def _guard(self, tag: int) -> AbstractContextManager[None]:
        return holding(self._mutexes[tag % self._sets % len(self._mutexes)])

    def _places(self, tag: int) -> range:
        """The indexes of the edges that the tag may have. Each follows its tag."""
        first = tag % self._sets * WAYS * 2 + 1
        return range(first, first + WAYS * 2, 2)

    def _claim(self, tag: int) -> int:
        places = self._places(tag)
        for place in places:
            if self._tags[place - 1] == tag:
                return place
        place = min(places, key=lambda place: (self._tags[place - 1] != 0, self._edges[place]))
        self._edges[place] = 0.0
        self._tags[place - 1] = tag
        return place


class SharedRate:
    """The `CallRate` of one upstream, shared by all processes of the host that call it. Each of `hosts` gets an equal part."""

    def __init__(self, table: EdgeTable, name: str, per_second: float, hosts: Callable[[], int] = lambda: 1) -> None:
        self._table = table
        self._name = name
        self._per_second = per_second
        self._hosts = hosts

    def __repr__(self) -> str:
        return f"<SharedRate {1.0 / self._cost_s():g}/s>"

    def _cost_s(self) -> float:
        return self._hosts() / self._per_second

    def admits(self, now: float) -> bool:
        edge = limits.edge_after_call(self._table.edge(self._name), now, self._cost_s())
        return edge <= now + limits.TOLERANCE_S

    def take(self, now: float) -> None:
        self._table.charge(self._name, now, self._cost_s())


def _tag(name: str) -> int:
    """Positive and never 0, which marks an empty place."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") >> 1 | 1
