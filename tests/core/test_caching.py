"""The store of replies: what it finds, what it forgets, and what it takes."""

from __future__ import annotations

import gc
import itertools
import random
import sys
from collections import OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import astuple

from proxy.core.caching import (
    KEPT_OVERHEAD,
    PACKED_FROM,
    PACKED_TO,
    RECENT_OVERHEAD,
    Lifetime,
    ReplyCache,
    key_of,
    owner_bucket_of,
)


def key(n: int) -> bytes:
    return key_of(b"eth_call", b"[%d]" % n)


def test_reply_is_found_under_its_key_and_no_other() -> None:
    replies = ReplyCache(1 << 20)
    replies.put(key(1), b"one", "forever")
    replies.put(key(2), b"two", "head")
    assert (replies.get(key(1)), replies.get(key(2)), replies.get(key(3))) == (b"one", b"two", None)
    assert (replies.hits, replies.misses, len(replies)) == (2, 1, 2)


def test_keys_differ_by_method_and_by_params() -> None:
    keys = {key_of(method, params) for method in (b"a", b"ab") for params in (b"[]", b"[1]", b"", b"{}")}
    assert len(keys) == 8
    assert {len(k) for k in keys} == {16}


def test_key_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        ReplyCache(1 << 20).put(b"short", b"x", "forever")


def test_moved_head_drops_recent_replies_and_leaves_kept_ones() -> None:
    replies = ReplyCache(1 << 20)
    replies.put(key(1), b"kept", "forever")
    replies.put(key(2), b"recent", "head")
    replies.get(key(1))
    replies.head_moved()
    assert (replies.get(key(1)), replies.get(key(2))) == (b"kept", None)
    assert len(replies) == 1


def test_moves_of_the_head_are_counted_and_nothing_else() -> None:
    replies = ReplyCache(1 << 12)
    for n in range(100):
        replies.put(key(n), bytes(100), "head")
    assert (replies.moves, replies.evictions > 0) == (0, True)
    replies.head_moved()
    replies.head_moved()
    assert replies.moves == 2


def test_reply_marked_never_is_not_cached() -> None:
    replies = ReplyCache(1 << 20)
    replies.put(key(1), b"x", "never")
    assert len(replies) == replies.bytes_used == 0


def test_kept_reply_is_not_replaced_and_a_recent_one_is() -> None:
    replies = ReplyCache(1 << 20)
    replies.put(key(1), b"true", "forever")
    replies.put(key(1), b"false", "forever")
    replies.put(key(1), b"false", "head")
    replies.put(key(2), b"old", "head")
    replies.put(key(2), b"newer", "head")
    assert (replies.get(key(1)), replies.get(key(2)), len(replies)) == (b"true", b"newer", 2)


def test_recent_reply_that_became_final_is_kept_once() -> None:
    replies = ReplyCache(1 << 20)
    replies.put(key(1), b"x", "head")
    replies.put(key(1), b"x", "forever")
    assert (len(replies), replies.bytes_used) == (1, 1 + KEPT_OVERHEAD)
    replies.head_moved()
    assert replies.get(key(1)) == b"x"


def test_view_of_a_larger_buffer_is_copied() -> None:
    replies = ReplyCache(1 << 20)
    replies.put(key(1), memoryview(b"xx-result-xx")[3:9], "forever")
    assert type(replies.get(key(1))) is bytes


@pytest.mark.parametrize("size", [PACKED_FROM - 1, PACKED_FROM, PACKED_TO, PACKED_TO + 1])
@pytest.mark.parametrize("pattern", [b'{"removed":false},', random.Random(3).randbytes(PACKED_TO + 1)], ids=len)
def test_results_of_every_size_are_read_as_they_were_put(pattern: bytes, size: int) -> None:
    replies = ReplyCache(1 << 24)
    result = (pattern * size)[:size] if len(pattern) < size else pattern[:size]
    replies.put(key(1), result, "forever")
    for _ in range(2):
        assert replies.get(key(1)) == replies.get(key(1)) == result
        replies.head_moved()


def test_large_results_that_are_kept_take_a_part_of_their_size() -> None:
    replies = ReplyCache(1 << 22)
    results = [b'{"address":"0x%040x","removed":false},' % number * 500 for number in range(500)]
    for number, result in enumerate(results):
        replies.put(key(number), result, "forever")
    assert replies.evictions == 0
    assert replies.bytes_used < sum(map(len, results)) / 4
    assert all(replies.get(key(number)) == result for number, result in enumerate(results))
    assert replies.bytes_used <= replies.limit


def test_memory_stays_within_the_limit_whatever_is_put() -> None:
    rng = random.Random(7)
    replies = ReplyCache(1 << 20)
    for n in range(20_000):
        replies.put(key(n), bytes(rng.randrange(2000)), rng.choice(("head", "forever")))
        assert replies.bytes_used <= replies.limit
        if n % 500 == 0:
            replies.head_moved()
    assert replies.evictions


def test_reply_too_large_for_the_limit_is_not_kept() -> None:
    replies = ReplyCache(1 << 20)
    lifetimes: tuple[Lifetime, ...] = ("head", "forever")
    for lifetime in lifetimes:
        replies.put(key(1), bytes((1 << 16) + 1), lifetime)
    assert len(replies) == 0
    replies.put(key(1), bytes(1 << 16), "forever")
    assert len(replies) == 1


@pytest.mark.parametrize("limit", [0, 1, 100, 5000])
def test_tiny_limits_hold_and_end(limit: int) -> None:
    replies = ReplyCache(limit)
    for n in range(100):
        replies.put(key(n), b"", "forever")
        replies.put(key(n), b"", "head")
        assert replies.bytes_used <= limit


def test_replies_asked_for_outlive_those_that_are_not() -> None:
    replies = ReplyCache(1 << 20)
    busy = [key(-n - 1) for n in range(100)]
    for k in busy:
        replies.put(k, bytes(300), "forever")
    for n in range(20_000):
        replies.put(key(n), bytes(300), "forever")
        if n % 50 == 0:
            replies.head_moved()
            for k in busy:
                replies.get(k)
    assert sum(replies.get(k) is not None for k in busy) == 100


def test_hits_are_near_those_of_a_true_lru() -> None:
    rng = random.Random(3)
    asked = [min(int(rng.paretovariate(0.7)), 200_000) for _ in range(60_000)]
    replies, lru, hits = ReplyCache(1 << 20), OrderedDict[int, None](), 0
    for n, which in enumerate(asked):
        if n % 200 == 0:
            replies.head_moved()
        if replies.get(key(which)) is None:
            replies.put(key(which), bytes(300), "forever")
        if which in lru:
            hits += 1
            lru.move_to_end(which)
        else:
            lru[which] = None
            if len(lru) > (1 << 20) // (300 + KEPT_OVERHEAD):
                lru.popitem(last=False)
    assert replies.hits > 0.93 * hits


def test_sets_fill_evenly_under_eviction() -> None:
    replies = ReplyCache(1 << 20)
    for n in range(50_000):
        replies.put(key(n), bytes(300), "forever")
    lengths = [len(one.keys) // 16 for one in replies._sets]
    assert max(lengths) < 2.5 * sum(lengths) / len(lengths)


def test_memory_of_dropped_replies_is_given_back_bit_by_bit() -> None:
    replies = ReplyCache(1 << 20)
    for n in range(1000):
        replies.put(key(n), b"x", "head")
    replies.head_moved()
    assert replies.bytes_used == 1000 * (1 + RECENT_OVERHEAD)
    for n in range(125):
        replies.put(key(n), b"y", "forever")
    assert replies.bytes_used == 125 * (1 + KEPT_OVERHEAD)


def test_memory_stays_within_the_limit_when_nothing_is_asked_but_what_is_kept() -> None:
    replies = ReplyCache(1 << 20)
    for n in range(2000):
        replies.put(key(n), b"x" * 300, "forever")
    for n in range(50_000):
        replies.get(key(n % 2000))
        assert replies.bytes_used <= replies.limit
    assert len(replies._retired) <= 1
    assert replies.hits > 40_000


def test_accounting_is_near_what_python_says() -> None:
    replies = ReplyCache(1 << 22)
    for n in range(5000):
        replies.put(key(n), bytes(300 + n % 100), "forever")
    sizes = [sys.getsizeof(one) + sum(map(sys.getsizeof, astuple(one))) for one in replies._sets]
    assert 0.9 < replies.bytes_used / sum(sizes) < 1.15


def test_garbage_collector_does_not_see_the_kept_replies() -> None:
    replies = ReplyCache(1 << 20)
    for n in range(2000):
        replies.put(key(n), bytes(300), "forever")
        replies.get(key(n // 2))
    assert not any(gc.is_tracked(one) for one in replies._sets)


def test_clear_forgets_everything() -> None:
    replies = ReplyCache(1 << 20)
    replies.put(key(1), b"x", "forever")
    replies.put(key(2), b"x", "head")
    replies.clear()
    assert (len(replies), replies.bytes_used, replies.get(key(1)), replies.get(key(2))) == (0, 0, None, None)
    assert repr(replies) == "<ReplyCache 0 in 0 of 1,048,576 bytes; 0 hits, 2 misses, 0 evictions>"


class AgainstADict(RuleBasedStateMachine):
    """Whatever is found is what was put last and is still good; without eviction, it is found."""

    def __init__(self) -> None:
        super().__init__()
        self.replies = ReplyCache(1 << 22)
        self.kept: dict[int, bytes] = {}
        self.recent: dict[int, bytes] = {}

    @rule(n=st.integers(0, 30), result=st.binary(max_size=50), kept=st.booleans())
    def put(self, n: int, result: bytes, kept: bool) -> None:
        self.replies.put(key(n), result, "forever" if kept else "head")
        if n not in self.kept:
            self.recent.pop(n, None)
            (self.kept if kept else self.recent)[n] = result

    @rule(n=st.integers(0, 30))
    def get(self, n: int) -> None:
        assert self.replies.get(key(n)) == self.kept.get(n, self.recent.get(n))

    @rule()
    def move(self) -> None:
        self.replies.head_moved()
        self.recent.clear()

    @rule()
    def clear(self) -> None:
        self.replies.clear()
        self.kept.clear()
        self.recent.clear()

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.replies) == len(self.kept) + len(self.recent)
        assert self.replies.bytes_used >= sum(map(len, (*self.kept.values(), *self.recent.values())))


TestAgainstADict = AgainstADict.TestCase
TestAgainstADict.settings = settings(max_examples=50, stateful_step_count=60, deadline=None)


# Shares

GOOD = "acc_good"
# Accounts are counted by a part of their hash: one that is counted apart.
FLOOD = next(name for n in itertools.count() if owner_bucket_of(name := f"acc_{n}") != owner_bucket_of(GOOD))


def test_one_account_with_many_calls_evicts_its_own_replies() -> None:
    replies = ReplyCache(1 << 20)
    for number in range(500):
        replies.put(key(number), b"x" * 300, "forever", GOOD)
    for number in range(1000, 20_000):
        replies.put(key(number), b"x" * 300, "forever", FLOOD)
    kept = sum(replies.get(key(number)) is not None for number in range(500))
    assert kept > 450
    assert replies.bytes_used <= replies.limit


def test_account_alone_may_use_the_whole_cache() -> None:
    replies = ReplyCache(1 << 20)
    replies.put(key(1), b"x" * 300, "forever", GOOD)
    for number in range(1000, 20_000):
        replies.put(key(number), b"x" * 300, "forever", FLOOD)
    assert replies.get(key(19_999)) is not None
    assert len(replies) * 380 > replies.limit * 0.9


def test_recent_replies_of_an_account_outlive_a_flood_of_another() -> None:
    replies = ReplyCache(1 << 20)
    for number in range(50):
        replies.put(key(number), b"x" * 300, "head", GOOD)
    for number in range(1000, 5000):
        replies.put(key(number), b"x" * 300, "head", FLOOD)
    assert all(replies.get(key(number)) is not None for number in range(50))
