"""Filters of logs: the execution API's meaning, and an index that finds what a scan finds."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.chains.evm import log_filter
from proxy.chains.evm.log_filter import LogFilter, LogFilterIndex, parse, read_cursor

A, B, C = ("0x" + digit * 40 for digit in "abc")
T1, T2, T3 = ("0x" + digit * 64 for digit in "123")


@dataclass(frozen=True)
class Log:
    address: str = A
    topics: list[str] = field(default_factory=list)


# The execution API's own examples of topics, and what geth does where they are silent.
MEANINGS: list[tuple[Any, list[str], bool]] = [
    ([], [], True),
    ([], [T1], True),
    ([T1], [T1], True),
    ([T1], [T1, T2], True),
    ([T1], [T2], False),
    ([T1], [], False),
    ([None, T2], [T1, T2], True),
    ([None, T2], [T2], False),
    ([None, T2], [T2, T1], False),
    ([T1, T2], [T1, T2, T3], True),
    ([[T1, T2], [T1, T2]], [T2, T1], True),
    ([[T1, T2], [T1, T2]], [T3, T1], False),
    ([None], [], False),
    ([None], [T1], True),
    ([T1, None], [T1], False),
    ([[], T2], [T1, T2], True),
    ([[T1, None]], [T3], True),
    ([None, None, None, T1], [T1, T1, T1, T1], True),
]


@pytest.mark.parametrize(("topics", "of_log", "matches"), MEANINGS)
def test_topics_mean_what_the_execution_api_says(topics: Any, of_log: list[str], matches: bool) -> None:
    found, log = parse({"topics": topics}), Log(A, of_log)
    assert found.matches(log) is matches
    index = LogFilterIndex()
    index.add(found)
    assert index.match([log]) == ({found: [0]} if matches else {})


@pytest.mark.parametrize(
    ("address", "matches"), [(None, True), ([], True), (A, True), (B, False), ([B, A], True), ([B, C], False)]
)
def test_address_is_one_or_any_of_several_or_any_at_all(address: Any, matches: bool) -> None:
    assert parse({"address": address}).matches(Log(A)) is matches


def test_filters_that_mean_the_same_are_equal() -> None:
    upper = "0x" + "AB" * 20
    assert (
        parse({"address": upper}) == parse({"address": [upper.lower()]}) == parse({"address": [upper, upper.lower()]})
    )
    assert parse({"topics": [[T2, T1]]}) == parse({"topics": [[T1, T2, T1]]})
    assert parse({}) == parse({"address": [], "topics": []}) == parse(None) == LogFilter()
    assert parse({"fromBlock": "0x1", "toBlock": "latest"}) == LogFilter()
    assert parse({"topics": [None]}) != parse({})


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ([], "object"),
        ({"address": "0x12"}, '"address"'),
        ({"address": [A, None]}, '"address"'),
        ({"address": {"a": 1}}, '"address"'),
        ({"address": [A] * 1001}, "1001"),
        ({"topics": T1}, '"topics"'),
        ({"topics": [T1] * 5}, "5 places"),
        ({"topics": [T1, A]}, '"topics[1]"'),
        ({"topics": [[T1, 5]]}, '"topics[0]"'),
        ({"topics": [[[T1]]]}, '"topics[0]"'),
        ({"adress": A}, '"adress"'),
        ({"toBlock": "0x10"}, '"toBlock"'),
        ({"blockHash": T1}, '"blockHash"'),
    ],
)
def test_bad_filter_is_refused_by_the_name_of_its_member(value: Any, named: str) -> None:
    with pytest.raises(ValueError, match=r"member|filter") as refused:
        parse(value)
    assert named in str(refused.value)


def test_cursor_is_a_number_or_now() -> None:
    assert [read_cursor(each) for each in ("0x0", "0xFf", "earliest", "latest", "pending", None)] == [
        0, 255, 0, None, None, None,
    ]  # fmt: skip
    cursors: tuple[Any, ...] = (5, "5", "0x", "finalized", [], {}, True, "0x" + "1" * 17)
    for bad in cursors:
        with pytest.raises(ValueError, match="fromBlock"):
            read_cursor(bad)


def test_params_are_read_back_as_the_same_filter() -> None:
    for value in ({}, {"address": A}, {"address": [B, A], "topics": [None, [T2, T1]]}, {"topics": [None]}):
        found = parse(value)
        assert parse({name: _lists(given) for name, given in found.params().items()}) == found


def _lists(value: Any) -> Any:
    return [_lists(each) for each in value] if isinstance(value, list | tuple) else value


def _hex(start: int, count: int, size: int) -> list[str]:
    return [f"0x{(start * 10_000 + number) * 0x9E3779B97F4A7C15 % (1 << 64):0{2 * size}x}" for number in range(count)]


@pytest.mark.parametrize(
    ("addresses", "places"),
    [(1000, [1000] * 4), (1000, []), (0, [1000]), (30, [30]), (1, [1, 0, 1]), (10, [10, 10]), (0, [0, 0, 0, 1000])],
    ids=str,
)
def test_estimate_of_memory_is_near_the_memory_that_is_used(addresses: int, places: list[int]) -> None:
    members = [
        {
            "address": _hex(serial, addresses, 20),
            "topics": [_hex(10 * serial + place, count, 32) for place, count in enumerate(places)],
        }
        for serial in range(20)
    ]
    index = LogFilterIndex()
    tracemalloc.start()
    try:
        filters = [parse(each) for each in members]
        for each in filters:
            index.add(each)
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    estimate = sum(each.memory for each in filters)
    assert used <= estimate <= 3 * used + 20 * log_filter.FILTER_BYTES


# Few values, so that they meet.
addresses = st.sampled_from((A, B, C))
topics = st.sampled_from((T1, T2, T3))
places = st.one_of(st.none(), topics, st.lists(topics, max_size=3))
filters = st.builds(
    lambda address, found: parse({"address": address, "topics": found}),
    st.one_of(st.none(), addresses, st.lists(addresses, max_size=3)),
    st.lists(places, max_size=4),
)
logs = st.builds(Log, addresses, st.lists(topics, max_size=4))


@settings(deadline=None)
@given(st.lists(filters, max_size=12), st.lists(filters, max_size=6), st.lists(logs, max_size=12))
def test_index_finds_what_a_scan_finds(kept: list[LogFilter], gone: list[LogFilter], seen: list[Log]) -> None:
    index = LogFilterIndex()
    for each in (*gone, *kept):
        index.add(each)
    for each in set(gone) - set(kept):
        index.remove(each)
    scan = {each: [n for n, log in enumerate(seen) if each.matches(log)] for each in kept}
    assert index.match(seen) == {each: found for each, found in scan.items() if found}


@settings(deadline=None)
@given(st.lists(filters, max_size=12), st.lists(logs, max_size=12))
def test_index_finds_the_same_when_lists_are_too_long_for_it(kept: list[LogFilter], seen: list[Log]) -> None:
    limit, log_filter.MOST_PATHS = log_filter.MOST_PATHS, 2
    try:
        index = LogFilterIndex()
        for each in kept:
            index.add(each)
        scan = {each: [n for n, log in enumerate(seen) if each.matches(log)] for each in kept}
        assert index.match(seen) == {each: found for each, found in scan.items() if found}
        for each in kept:
            index.remove(each)
        assert index._root.is_empty
    finally:
        log_filter.MOST_PATHS = limit


@settings(deadline=None)
@given(st.lists(filters, max_size=20))
def test_index_keeps_nothing_of_filters_that_are_gone(given_filters: list[LogFilter]) -> None:
    index = LogFilterIndex()
    for each in given_filters:
        index.add(each)
    assert len(index) == len(set(given_filters))
    for each in given_filters:
        index.remove(each)
        index.remove(each)
    assert len(index) == 0
    assert index._root.is_empty
