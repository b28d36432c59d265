"""Nesting, held against a parser that counts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import jsonrpc
from proxy.core.nesting import has_too_many_values, is_deeper

NESTED = st.recursive(
    st.text(alphabet='a"\\[]{}é', max_size=6) | st.integers(),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(alphabet='"[{', max_size=3), below, max_size=3),
    max_leaves=12,
)


def depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(NESTED)
def test_depth_is_that_of_the_brackets_outside_strings(value: Any) -> None:
    data = json.dumps(value, ensure_ascii=False).encode()
    deep = depth(value)
    assert not is_deeper(data, deep)
    assert deep == 0 or is_deeper(data, deep - 1)


@pytest.mark.parametrize(
    ("data", "is_over"),
    [
        (b"[" * 9, True),
        (b"[]" * 9, False),
        (b'"' + b"[" * 9, False),
        (b'"\\"' + b"[" * 9, False),
        (b"]" * 9 + b"[" * 9, False),
    ],
)
def test_bytes_that_are_no_json_are_counted_too(data: bytes, is_over: bool) -> None:
    assert is_deeper(data, 4) == is_over


MANY = {
    "arrays": b"[%b[]]" % (b"[]," * 300_000),
    "objects": b"[%b{}]" % (b"{}," * 300_000),
    "numbers": b"[%b0]" % (b"0," * 450_000),
    "strings": b'[%b""]' % (b'"",' * 300_000),
    "small objects": b"[%b0]" % (b'{"a":1},' * 110_000),
    "escapes": b'["%b"]' % (rb"\u20ac" * 170_000),
}


@pytest.mark.parametrize("kind", MANY)
def test_text_of_too_many_values_is_found_before_it_is_parsed(kind: str) -> None:
    assert has_too_many_values(MANY[kind])
    with pytest.raises(jsonrpc.MalformedCall, match="too many values"):
        jsonrpc.parse(b'{"jsonrpc":"2.0","id":1,"method":"eth_call","params":%b}' % MANY[kind])


@pytest.mark.parametrize(
    "params",
    [
        b"[%b0]" % (b"0," * 24_000),
        b"[%b{}]" % (b"{}," * 12_000),
        b"[{%b}]" % b",".join(b'"0x%064x":"0x%064x"' % (number, number) for number in range(7_000)),
        b'["%b"]' % (b"ab" * 500_000),
        b"",
    ],
)
def test_largest_params_of_calls_do_not_have_too_many_values(params: bytes) -> None:
    assert not has_too_many_values(params)
