"""Token buckets by name, in memory that the processes of a host share: of upstreams with a rate limit, and of client
addresses with failed authentications.

The rank of a name (name_table) is its bucket's edge (core/limits): those that have used the least make room for new ones.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from proxy.core import limits
from proxy.store.shared_memory import robust_mutexes
from proxy.store.shared_memory.name_table import RANK, NameTable
from proxy.store.shared_memory.robust_mutexes import Mutex, holding

ENTRY_BYTES = 16
_lock = robust_mutexes.lock
_unlock = robust_mutexes.unlock
_adopt = robust_mutexes.adopt


class SharedBucketTable:
    """A part of the shared memory, and the mutexes that guard it."""

    def __init__(self, memory: memoryview, mutexes: list[Mutex]) -> None:
        self._names = NameTable(memory, ENTRY_BYTES)
        self._edges = self._names.ranks
        self._mutexes = mutexes

    def __repr__(self) -> str:
        return f"<SharedBucketTable {self._names!r}>"

    def take(self, name: str, now: float, cost_s: float, *, holds_s: float) -> float:
        """Take from a bucket that holds `holds_s`. Returns 0 if there was enough, otherwise the seconds to wait."""
        tag = self._names.tag_of(name)
        with self._guard(tag):
            at = self._names.claim(tag) + RANK
            edge = max(self._edges[at], now - holds_s) + cost_s
            if edge > now + limits.TOLERANCE_S:
                return edge - now
            self._edges[at] = edge
            return 0.0

    def tag_of(self, name: str) -> int:
        """For `find`, `edge` and `charge`, which are called for each call to an upstream."""
        return self._names.tag_of(name)

    def find(self, tag: int, last: int) -> int:
        """The index of a bucket, or -1. `last`: where it was before."""
        return self._names.find(tag, last)

    def edge_at(self, index: int) -> float:
        """Reading a number is atomic and needs no lock."""
        return 0.0 if index < 0 else self._edges[index + RANK]

    def charge(self, tag: int, now: float, cost_s: float, last: int = -1) -> int:
        """Charge one call, also to an empty bucket: the debt delays the calls after it. Returns the index of the bucket."""
        mutex = self._mutexes[tag % self._names.sets % len(self._mutexes)]
        if held := _lock(mutex):
            _adopt(mutex, held)
        try:
            index = self._names.claim(tag, last)
            at = index + RANK
            self._edges[at] = limits.edge_after_call(self._edges[at], now, cost_s)
            return index
        finally:
            _unlock(mutex)

    def owe(self, name: str, now: float, cost_s: float, *, holds_s: float) -> None:
        """Charge events on other hosts. The debt is at most the size of the bucket."""
        tag = self._names.tag_of(name)
        with self._guard(tag):
            at = self._names.claim(tag) + RANK
            self._edges[at] = min(max(self._edges[at], now - holds_s) + cost_s, now + holds_s)

    def bucket_index(self, name: str) -> int:
        """Claim a bucket and return its index, by which other memory can hold a record for each bucket."""
        tag = self._names.tag_of(name)
        with self._guard(tag):
            return self._names.claim(tag) * 8 // ENTRY_BYTES

    def edge(self, tag: int) -> float:
        return self.edge_at(self._names.find(tag))

    def _guard(self, tag: int) -> AbstractContextManager[None]:
        return holding(self._mutexes[tag % self._names.sets % len(self._mutexes)])


class SharedRate:
    """The `CallRate` of one upstream, shared by all processes of the host that call it. Each of `hosts` gets an equal part."""

    def __init__(
        self, table: SharedBucketTable, name: str, per_second: float, hosts: Callable[[], int] = lambda: 1
    ) -> None:
        self._table = table
        self._tag = table.tag_of(name)
        self._per_second = per_second
        self._hosts = hosts
        self._least_s = 0.0
        # Where its bucket was found.
        self._index = -1

    def __repr__(self) -> str:
        return f"<SharedRate {1.0 / self._cost_s():g}/s>"

    def _cost_s(self) -> float:
        return max(self._hosts() / self._per_second, self._least_s)

    def admits(self, now: float) -> bool:
        self._index = self._table.find(self._tag, self._index)
        edge = limits.edge_after_call(self._table.edge_at(self._index), now, self._cost_s())
        return edge <= now + limits.TOLERANCE_S

    def take(self, now: float) -> None:
        self._index = self._table.charge(self._tag, now, self._cost_s(), self._index)

    def slow_to(self, cost_s: float) -> None:
        self._least_s = cost_s
