"""Nesting, held against a parser that counts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.nesting import is_deeper

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
