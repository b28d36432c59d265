"""The bounded mapping: its size, and the order in which it evicts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.lru_cache import LruCache


def test_least_recently_used_entry_is_evicted() -> None:
    cache: LruCache[str, int] = LruCache(2)
    cache["a"], cache["b"] = 1, 2
    assert cache["a"] == 1
    cache["c"] = 3
    assert dict(cache) == {"a": 1, "c": 3}
    assert cache.get("b") is None


def test_asking_whether_a_key_is_there_does_not_use_it() -> None:
    cache: LruCache[str, int] = LruCache(2)
    cache["a"], cache["b"] = 1, 2
    assert "a" in cache
    cache["c"] = 3
    assert "a" not in cache


def test_new_value_replaces_the_old_one_and_its_weight() -> None:
    cache: LruCache[str, bytes] = LruCache(10, lambda key, value: len(key) + len(value))
    cache["a"] = b"12345678"
    cache["a"] = b"1"
    assert (len(cache), cache.weight) == (1, 2)
    assert cache.pop("a") == b"1"
    assert repr(cache) == "<LruCache 0 entries, 0 of 10>"


def test_entry_heavier_than_the_limit_is_not_stored_and_evicts_only_its_old_value() -> None:
    cache: LruCache[str, int] = LruCache(10, lambda _, value: value)
    cache["a"], cache["b"] = 4, 5
    cache["a"] = 11
    assert dict(cache) == {"b": 5}


@pytest.mark.parametrize("limit", [0, 1])
def test_smallest_limits(limit: int) -> None:
    cache: LruCache[str, int] = LruCache(limit)
    cache["a"] = 1
    cache["b"] = 2
    assert dict(cache) == ({"b": 2} if limit else {})


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9) | st.none())), st.integers(0, 30))
def test_weight_is_that_of_the_entries_and_within_the_limit(steps: list[tuple[int, int | None]], limit: int) -> None:
    """A step sets a key to a value, which is its weight, or removes the key."""
    cache: LruCache[int, int] = LruCache(limit, lambda _, value: value)
    for key, value in steps:
        if value is None:
            cache.pop(key, None)
        else:
            cache[key] = value
            assert value > limit or cache[key] == value
        assert cache.weight == sum(cache.values()) <= limit
