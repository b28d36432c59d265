"""Batches read a few items at a time, held against a parser that reads them whole."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.batch_reader import BatchReader
from proxy.core.jsonrpc import INVALID_REQUEST, PARSE_ERROR, MalformedCall, RawCall

MOST = 1000
TEXTS = st.text(alphabet='a"\\[]{},: é\n', max_size=8)
VALUES = st.recursive(
    TEXTS | st.integers() | st.none() | st.booleans(),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(TEXTS, below, max_size=3),
    max_leaves=8,
)
PARAMS = st.lists(VALUES, max_size=3)
SPACES = st.sampled_from([None, 1, "\t"])


def call(number: int, params: list[Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "method": "eth_call", "params": params}


def in_steps(body: bytes, count: int, most: int = MOST) -> list[RawCall | MalformedCall]:
    reader = BatchReader(body, most)
    items: list[RawCall | MalformedCall] = []
    while not reader.is_done:
        step = reader.read(count)
        assert len(step) <= count
        items += step
    assert reader.count == len(items)
    return items


def code_of(body: bytes) -> int:
    with pytest.raises(MalformedCall) as caught:
        in_steps(body, 3)
    return caught.value.code


@given(st.lists(PARAMS, min_size=1, max_size=8), st.integers(1, 4), SPACES, st.booleans())
def test_calls_are_those_that_a_parser_finds(all_params: list[Any], count: int, indent: Any, is_ascii: bool) -> None:
    body = json.dumps(list(map(call, itertools.count(), all_params)), indent=indent, ensure_ascii=is_ascii).encode()
    items = in_steps(body, count)
    assert [json.loads(item[1]) for item in items if isinstance(item, tuple)] == all_params
    assert [item[2] for item in items if isinstance(item, tuple)] == [b"%d" % n for n in range(len(all_params))]


@given(st.lists(VALUES, min_size=1, max_size=5))
def test_items_that_are_no_calls_get_an_error_each(values: list[Any]) -> None:
    items = in_steps(json.dumps(values).encode(), 2)
    assert [item.code for item in items if isinstance(item, MalformedCall)] == [INVALID_REQUEST] * len(values)


@given(st.lists(PARAMS, min_size=1, max_size=4), st.data())
def test_batch_that_is_cut_off_is_a_parse_error(all_params: list[Any], data: st.DataObject) -> None:
    body = json.dumps(list(map(call, itertools.count(), all_params))).encode()
    assert code_of(body[: data.draw(st.integers(0, len(body) - 1))]) == PARSE_ERROR


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"[]", INVALID_REQUEST),
        (b" [ \n] ", INVALID_REQUEST),
        (b"[1,]", PARSE_ERROR),
        (b"[,1]", PARSE_ERROR),
        (b"[1 2]", PARSE_ERROR),
        (b"[1]]", PARSE_ERROR),
        (b"[1]x", PARSE_ERROR),
        (b"[{]}]", PARSE_ERROR),
        (b"[}", PARSE_ERROR),
        (b"[NaN]", PARSE_ERROR),
        (b'["\xff"]', PARSE_ERROR),
        (b'["' + b"a" * 40_000, PARSE_ERROR),
        (b"[" * 200_000, PARSE_ERROR),
        (b"{}", PARSE_ERROR),
        (b"[%b]" % b",".join([b"1"] * (MOST + 1)), INVALID_REQUEST),
    ],
)
def test_body_that_is_no_batch_is_refused_whole(body: bytes, code: int) -> None:
    assert code_of(body) == code


@pytest.mark.parametrize("size", [10, 16_383, 16_384, 28_000])
def test_long_strings_with_brackets_are_skipped(size: int) -> None:
    params = ['],[{\\"' * (size // 6), 1]
    (item,) = in_steps(json.dumps([call(7, params)]).encode(), 5)
    assert isinstance(item, tuple)
    assert json.loads(item[1]) == params


@pytest.mark.parametrize("size", [4000, 4096, 5000, 100_000])
def test_long_strings_without_brackets_are_skipped(size: int) -> None:
    params = ["ab" * size, {"data": "0x" + "00" * size}]
    (item,) = in_steps(json.dumps([call(7, params)]).encode(), 5)
    assert isinstance(item, tuple)
    assert json.loads(item[1]) == params


@given(st.integers(4000, 4200), st.integers(1, 3))
def test_windows_end_anywhere_in_an_item(size: int, count: int) -> None:
    params = [[1] * (size // 3), "a" * (size % 7), list(range(size))]
    items = in_steps(json.dumps([call(n, params) for n in range(3)]).encode(), count)
    assert [json.loads(item[1]) for item in items if isinstance(item, tuple)] == [params] * 3


def test_one_step_does_not_look_far_into_an_intricate_item() -> None:
    reader = BatchReader(json.dumps([call(1, [[[]] * 4_000])]).encode(), MOST)
    steps = 0
    while not reader.is_done:
        reader.read(10)
        steps += 1
    assert steps > 100
