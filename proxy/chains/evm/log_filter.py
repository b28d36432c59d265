"""Filters of logs: read, compared, and found by an index instead of a scan.

*Meaning*, as the execution API defines it. `address`: one, several (any of them), or none (any at all). `topics`: up to
four places; in each `null` (anything), one topic, or several (any of them). A log must have every place that is given, so
`[null]` matches logs with at least one topic; a log may have more topics than the filter has places. An empty list means
the same as `null`.

*Canonical.* Lower case, sorted, each once: filters that mean the same are equal.

*Index.* A tree with five levels, the address and the four topics. At each level a filter goes down one branch for each
value it names, or down the branch for anything. A log walks down at most two branches per level, its own value's and the
one for anything, and every filter whose place it passes matches. A filter that names so many values in several places that
its paths would fill the memory is put there with some of its lists taken for anything, and is checked when it is met.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

MOST_TOPICS = 4
# Values in one place of a filter. Nodes have the same limit.
MOST_VALUES = 1000
# Paths of one filter in the index.
MOST_PATHS = 1024

_ADDRESS = re.compile(r"0x[0-9a-fA-F]{40}")
_TOPIC = re.compile(r"0x[0-9a-fA-F]{64}")
_NUMBER = re.compile(r"0x[0-9a-fA-F]{1,16}")
# `fromBlock` is where a replay begins; the subscription reads it.
_MEMBERS = frozenset(("address", "topics", "fromBlock"))
# Some clients state the default.
_NO_END = (None, "latest", "pending")


class FilterLog(Protocol):
    """The parts of a log that filters use. Values are lower case."""

    @property
    def address(self) -> str: ...
    @property
    def topics(self) -> Sequence[str]: ...


class LogFilter(msgspec.Struct, frozen=True, gc=False):
    """An empty tuple of values matches anything."""

    addresses: tuple[str, ...] = ()
    topics: tuple[tuple[str, ...], ...] = ()

    def matches(self, log: FilterLog) -> bool:
        if self.addresses and log.address not in self.addresses:
            return False
        if len(self.topics) > len(log.topics):
            return False
        return all(not wanted or topic in wanted for wanted, topic in zip(self.topics, log.topics, strict=False))

    def params(self) -> dict[str, Any]:
        """As `eth_getLogs` takes it, without the range."""
        found: dict[str, Any] = {}
        if self.addresses:
            found["address"] = self.addresses
        if self.topics:
            found["topics"] = [values or None for values in self.topics]
        return found


# Reading


def parse(value: object) -> LogFilter:
    """The filter of a decoded JSON value. Raises ValueError, which names the invalid member."""
    if value is None:
        return LogFilter()
    if not isinstance(value, dict):
        raise ValueError("the filter must be an object")
    for name, given in value.items():
        if name == "toBlock" and given in _NO_END:
            continue
        if name in ("toBlock", "blockHash"):
            raise ValueError(f'member "{name}" has no meaning here: a subscription has no end (eth_getLogs has)')
        if name not in _MEMBERS:
            raise ValueError(
                f'member "{str(name)[:40]}" of the filter is unknown: it has address, topics and fromBlock'
            )
    return LogFilter(
        _values(value.get("address"), _ADDRESS, "address", "20 bytes in hex"), _topics(value.get("topics"))
    )


def _topics(value: object) -> tuple[tuple[str, ...], ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ValueError('member "topics" must be an array')
    if len(value) > MOST_TOPICS:
        raise ValueError(f'member "topics" has {len(value)} places: a log has at most {MOST_TOPICS} topics')
    return tuple(_values(each, _TOPIC, f"topics[{place}]", "32 bytes in hex") for place, each in enumerate(value))


def _values(value: object, form: re.Pattern[str], name: str, words: str) -> tuple[str, ...]:
    if value is None:
        return ()
    given = value if isinstance(value, list) else [value]
    if len(given) > MOST_VALUES:
        raise ValueError(f'member "{name}" has {len(given)} values: at most {MOST_VALUES} are allowed')
    if name != "address" and None in given:
        return ()
    found = set()
    for each in given:
        if not isinstance(each, str) or not form.fullmatch(each):
            raise ValueError(f'member "{name}" must be {words}, an array of such, or null')
        found.add(each.lower())
    return tuple(sorted(found))


def read_cursor(value: object) -> int | None:
    """The block of a `fromBlock`; None if it means the head."""
    if value is None or value in ("latest", "pending"):
        return None
    if value == "earliest":
        return 0
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return int(value, 16)
    raise ValueError('member "fromBlock" must be a block number in hex, such as "0x10d4f"')


# The index


@dataclass(slots=True, eq=False)
class _Node:
    branches: dict[str, _Node] = field(default_factory=dict)
    anything: _Node | None = None
    # Filters that end here, and whether they have to be checked.
    ends: dict[LogFilter, bool] | None = None

    @property
    def is_empty(self) -> bool:
        return not self.branches and self.anything is None and not self.ends

    def child(self, value: str | None) -> _Node | None:
        return self.anything if value is None else self.branches.get(value)

    def grow(self, value: str | None) -> _Node:
        found = self.child(value)
        if found is None:
            found = _Node()
            if value is None:
                self.anything = found
            else:
                self.branches[value] = found
        return found

    def cut(self, value: str | None) -> None:
        if value is None:
            self.anything = None
        else:
            del self.branches[value]


class LogFilterIndex:
    """Filters, found by the logs that match them."""

    def __init__(self) -> None:
        self._root = _Node()
        self._filters: set[LogFilter] = set()

    def __repr__(self) -> str:
        return f"<LogFilterIndex {len(self._filters)} filters>"

    def __len__(self) -> int:
        return len(self._filters)

    def add(self, given: LogFilter) -> None:
        if given in self._filters:
            return
        self._filters.add(given)
        levels, checked = _levels(given)
        for path in itertools.product(*levels):
            node = self._root
            for value in path:
                node = node.grow(value)
            if node.ends is None:
                node.ends = {}
            node.ends[given] = checked

    def remove(self, given: LogFilter) -> None:
        if given not in self._filters:
            return
        self._filters.discard(given)
        for path in itertools.product(*_levels(given)[0]):
            self._remove(given, path)

    def _remove(self, given: LogFilter, path: Sequence[str | None]) -> None:
        nodes = [self._root]
        for value in path:
            child = nodes[-1].child(value)
            assert child is not None
            nodes.append(child)
        ends = nodes[-1].ends
        assert ends is not None
        del ends[given]
        for value, node, parent in zip(reversed(path), reversed(nodes), reversed(nodes[:-1]), strict=False):
            if not node.is_empty:
                return
            parent.cut(value)

    def match(self, logs: Sequence[FilterLog]) -> dict[LogFilter, list[int]]:
        """For each filter that matches, the places of its logs, in order."""
        found: dict[LogFilter, list[int]] = {}
        for place, log in enumerate(logs):
            for node in self._passed(log):
                for each, checked in (node.ends or {}).items():
                    if checked and not each.matches(log):
                        continue
                    places = found.get(each)
                    if places is None:
                        found[each] = [place]
                    else:
                        places.append(place)
        return found

    def _passed(self, log: FilterLog) -> Iterator[_Node]:
        """The nodes that a log passes and where filters end."""
        level = [self._root]
        for value in (log.address, *log.topics):
            below = []
            for node in level:
                if (child := node.branches.get(value)) is not None:
                    below.append(child)
                if (child := node.anything) is not None:
                    below.append(child)
            if not below:
                return
            level = below
            for node in level:
                if node.ends:
                    yield node


def _levels(given: LogFilter) -> tuple[list[tuple[str | None, ...]], bool]:
    """The values at each level, None for anything; and whether some lists were left out, so that a check is needed."""
    levels: list[tuple[str | None, ...]] = [values or (None,) for values in (given.addresses, *given.topics)]
    checked = False
    while _paths(levels) > MOST_PATHS:
        longest = max(range(len(levels)), key=lambda place: len(levels[place]))
        levels[longest] = (None,)
        checked = True
    return levels, checked


def _paths(levels: Sequence[tuple[str | None, ...]]) -> int:
    count = 1
    for values in levels:
        count *= len(values)
    return count
