"""Filters of logs: read, compared, and found by an index instead of a scan.

*Meaning*, as the execution API defines it. `address`: one, several (any of them), or none (any at all). `topics`: up to
four places; in each `null` (anything), one topic, or several (any of them). A log must have every place that is given, so
`[null]` matches logs with at least one topic; a log may have more topics than the filter has places. An empty list means
the same as `null`.

*Canonical.* Sorted, each once: filters that mean the same are equal.

*Packed.* The values of a place are the bytes of all of them, one after the other: a filter of thousands of values is a few byte
strings, which are compared and hashed as fast as short ones and take a fourth of the memory of as many texts. Values are found
by bisection.

*Index.* A tree with five levels, the address and the four topics. At each level a filter goes down one branch for each value it
names, or down the branch for anything. A log walks down at most two branches per level, its own value's and the one for
anything, and every filter whose place it passes matches. A filter that names so many values in several places that its paths
would fill the memory is indexed with some of its lists treated as anything, and each log that reaches it is checked against the
whole filter.

*Memory.* `LogFilter.memory` estimates the bytes of a filter and its paths. Accounts may choose filters of any size up to the
limits below, so callers count them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

MOST_TOPICS = 4
# Values in one place of a filter. Nodes have the same limit.
MOST_VALUES = 1000
# Paths of one filter in the index.
MOST_PATHS = 1024

# The length of a value in bytes.
ADDRESS_SIZE = 20
TOPIC_SIZE = 32
# The memory of a filter without its values, and of one path of it in the index: a node, its branch, its value and its end.
FILTER_BYTES = 1024
PATH_BYTES = 240
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


class LogFilter(msgspec.Struct, frozen=True, weakref=True):
    """The packed values of each place. A place without values matches anything."""

    addresses: bytes = b""
    topics: tuple[bytes, ...] = ()

    def matches(self, log: FilterLog) -> bool:
        return self.matches_packed(_packed(log))

    def matches_packed(self, log: PackedLog) -> bool:
        if len(self.topics) >= len(log) or (self.addresses and not _has(self.addresses, log[0])):
            return False
        return all(not wanted or _has(wanted, log[index]) for index, wanted in enumerate(self.topics, 1))

    def params(self) -> dict[str, Any]:
        """As `eth_getLogs` takes it, without the range."""
        members: dict[str, Any] = {}
        if self.addresses:
            members["address"] = _shown(self.addresses, ADDRESS_SIZE)
        if self.topics:
            members["topics"] = [_shown(values, TOPIC_SIZE) or None for values in self.topics]
        return members

    @property
    def memory(self) -> int:
        """Its approximate size in memory, with its paths in an index, in bytes."""
        kept = [count or 1 for count in _indexed(self)]
        values = len(self.addresses) + sum(map(len, self.topics))
        return FILTER_BYTES + values + PATH_BYTES * math.prod(kept)


# The address of a log and its topics, as bytes.
PackedLog = Sequence[bytes]


def pack(values: Iterable[bytes]) -> bytes:
    """Values of one length, in the form that filters have."""
    return b"".join(sorted(set(values)))


def _packed(log: FilterLog) -> PackedLog:
    return [_bytes_of(log.address), *map(_bytes_of, log.topics)]


def _bytes_of(text: str) -> bytes:
    """Empty for a text that is not hex, which no filter can name."""
    try:
        return bytes.fromhex(text[2:])
    except ValueError:
        return b""


def _has(values: bytes, wanted: bytes) -> bool:
    size = len(wanted)
    if len(values) == size:
        return values == wanted
    low, high = 0, len(values) // size if size else 0
    while low < high:
        middle = (low + high) // 2
        candidate = values[middle * size : middle * size + size]
        if candidate == wanted:
            return True
        if candidate < wanted:
            low = middle + 1
        else:
            high = middle
    return False


def each_value(values: bytes, size: int) -> Iterator[bytes]:
    """The values that were packed."""
    return (values[start : start + size] for start in range(0, len(values), size))


def _shown(values: bytes, size: int) -> list[str]:
    return ["0x" + value.hex() for value in each_value(values, size)]


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
    return LogFilter(_values(value.get("address"), ADDRESS_SIZE, "address"), _topics(value.get("topics")))


def _topics(value: object) -> tuple[bytes, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ValueError('member "topics" must be an array')
    if len(value) > MOST_TOPICS:
        raise ValueError(f'member "topics" has {len(value)} places: a log has at most {MOST_TOPICS} topics')
    return tuple(_values(each, TOPIC_SIZE, f"topics[{index}]") for index, each in enumerate(value))


def _values(value: object, size: int, name: str) -> bytes:
    if value is None:
        return b""
    given = value if isinstance(value, list) else [value]
    if len(given) > MOST_VALUES:
        raise ValueError(f'member "{name}" has {len(given)} values: at most {MOST_VALUES} are allowed')
    if name != "address" and None in given:
        return b""
    raw = _read_values(given, size)
    if raw is None:
        raise ValueError(f'member "{name}" must be {size} bytes in hex, an array of such, or null')
    return pack(each_value(raw, size))


def _read_values(given: Sequence[Any], size: int) -> bytes | None:
    """The bytes of all values; None if one is not valid. In a few steps for all of them: there may be thousands."""
    if not all(isinstance(each, str) and len(each) == 2 + 2 * size for each in given):
        return None
    text = "".join(given)
    if not text[0 :: 2 + 2 * size].strip("0") and not text[1 :: 2 + 2 * size].strip("x"):
        # `fromhex` skips spaces, so the result may be too short.
        raw = _bytes_of("0x" + "".join([each[2:] for each in given]))
        return raw if len(raw) == size * len(given) else None
    return None


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


# The filters that end at a node, and whether they have to be checked.
_Ends = dict[LogFilter, bool]


@dataclass(slots=True, eq=False)
class _Node:
    # Most nodes have no branches and one end: they have no table of branches, and share the table of that end with other nodes.
    branches: dict[bytes, _Node] | None = None
    anything: _Node | None = None
    ends: _Ends | None = None

    @property
    def is_empty(self) -> bool:
        return self.branches is None and self.anything is None and self.ends is None

    def add_end(self, given: LogFilter, alone: _Ends) -> None:
        """`alone`: a table of this filter only, which is not changed."""
        if self.ends is None:
            self.ends = alone
        elif len(self.ends) == 1:
            self.ends = self.ends | alone
        else:
            self.ends[given] = alone[given]

    def remove_end(self, given: LogFilter) -> None:
        assert self.ends is not None
        if len(self.ends) == 1:
            self.ends = None
        else:
            del self.ends[given]

    def child(self, value: bytes | None) -> _Node | None:
        if value is None:
            return self.anything
        return None if self.branches is None else self.branches.get(value)

    def grow(self, value: bytes | None) -> _Node:
        child = self.child(value)
        if child is None:
            child = _Node()
            if value is None:
                self.anything = child
            elif self.branches is None:
                self.branches = {value: child}
            else:
                self.branches[value] = child
        return child

    def cut(self, value: bytes | None) -> None:
        if value is None:
            self.anything = None
            return
        assert self.branches is not None
        del self.branches[value]
        if not self.branches:
            self.branches = None


class LogFilterIndex:
    """Filters, found by the logs that match them."""

    def __init__(self) -> None:
        self._root = _Node()
        self._filters: set[LogFilter] = set()
        # How many filters have to be checked against each log that reaches them.
        self.checked = 0

    def __repr__(self) -> str:
        return f"<LogFilterIndex {len(self._filters)} filters>"

    def __len__(self) -> int:
        return len(self._filters)

    def add(self, given: LogFilter) -> None:
        if given in self._filters:
            return
        self._filters.add(given)
        levels, checked = _levels(given)
        self.checked += checked
        _add(self._root, levels, given, {given: checked})

    def remove(self, given: LogFilter) -> None:
        if given not in self._filters:
            return
        self._filters.discard(given)
        levels, checked = _levels(given)
        self.checked -= checked
        _remove(self._root, levels, given)

    def match(self, logs: Sequence[FilterLog]) -> dict[LogFilter, list[int]]:
        """For each filter that matches, the places of its logs, in order."""
        matches: dict[LogFilter, list[int]] = {}
        for index, log in enumerate(map(_packed, logs)):
            for node in self._passed(log):
                for each, checked in (node.ends or {}).items():
                    if checked and not each.matches_packed(log):
                        continue
                    places = matches.get(each)
                    if places is None:
                        matches[each] = [index]
                    else:
                        places.append(index)
        return matches

    def _passed(self, log: PackedLog) -> Iterator[_Node]:
        """The nodes that a log passes and where filters end."""
        level = [self._root]
        for value in log:
            below = []
            for node in level:
                if node.branches is not None and (child := node.branches.get(value)) is not None:
                    below.append(child)
                if (child := node.anything) is not None:
                    below.append(child)
            if not below:
                return
            level = below
            for node in level:
                if node.ends:
                    yield node


# The values of one level of the index; None for anything.
_Level = Sequence[bytes | None]


def _add(node: _Node, levels: Sequence[_Level], given: LogFilter, alone: _Ends) -> None:
    """Add the paths of a filter below a node."""
    if not levels:
        node.add_end(given, alone)
        return
    for value in levels[0]:
        _add(node.grow(value), levels[1:], given, alone)


def _remove(node: _Node, levels: Sequence[_Level], given: LogFilter) -> None:
    if not levels:
        node.remove_end(given)
        return
    for value in levels[0]:
        child = node.child(value)
        assert child is not None
        _remove(child, levels[1:], given)
        if child.is_empty:
            node.cut(value)


def _levels(given: LogFilter) -> tuple[list[_Level], bool]:
    """The values at each level; and whether some lists were left out, so that a check is needed."""
    lists = [(given.addresses, ADDRESS_SIZE), *((values, TOPIC_SIZE) for values in given.topics)]
    kept = _indexed(given)
    levels: list[_Level] = [
        [*each_value(values, size)] if count else (None,) for (values, size), count in zip(lists, kept, strict=True)
    ]
    return levels, any(values and not count for (values, _), count in zip(lists, kept, strict=True))


def _indexed(given: LogFilter) -> list[int]:
    """How many values of each list are in the index: all, or none. The longest are left out until the paths are few enough."""
    counts = [len(given.addresses) // ADDRESS_SIZE, *(len(values) // TOPIC_SIZE for values in given.topics)]
    while math.prod(count or 1 for count in counts) > MOST_PATHS:
        counts[counts.index(max(counts))] = 0
    return counts
