"""Buckets shared by several processes: exact counts, even when a process dies."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from proxy.core.limits import BucketRates
from proxy.store.shared_memory import rate_buckets
from proxy.store.shared_memory.rate_buckets import FIRST_BUCKETS, STRIPES, SharedBuckets, UnsharedBuckets
from tests.store.hammer import Hammer

NOW = 1000.0


@pytest.fixture
def fd() -> Iterator[int]:
    found = rate_buckets.create()
    yield found
    os.close(found)


@pytest.fixture
def hammers(fd: int) -> Iterator[list[Hammer]]:
    """Four processes on one file, like four workers."""
    found = [Hammer(fd) for _ in range(4)]
    for hammer in found:
        hammer.run("edge", slot=0)  # it is up
    yield found
    for hammer in found:
        hammer.close()


def run_all(hammers: list[Hammer], what: str, **how: object) -> list[Any]:
    for hammer in hammers:
        hammer.send(what, **how)
    return [hammer.receive() for hammer in hammers]


def granted(shared: SharedBuckets, slot: int, tries: int, request_s: float, unit_s: float = 0.0) -> int:
    return sum(not shared.take(slot, NOW, request_s, unit_s) for _ in range(tries))


def test_new_buckets_are_full(fd: int) -> None:
    shared = SharedBuckets(fd)
    assert repr(shared) == f"<SharedBuckets {FIRST_BUCKETS} bucket pairs>"
    for slot in (0, 1, FIRST_BUCKETS - 1):
        assert shared.edge(slot) == 0.0
        assert granted(shared, slot, 20, 0.1) == 10


@pytest.mark.parametrize(("rate", "tries"), [(1, 5_000), (10, 10_000), (100, 20_000), (5_000, 20_000)])
def test_processes_share_exactly_the_rate(hammers: list[Hammer], rate: int, tries: int) -> None:
    counts = run_all(hammers, "take", slot=7, tries=tries, now=NOW, request_s=1 / rate)
    assert sum(counts) == rate


def test_processes_over_time_get_capacity_plus_refill(hammers: list[Hammer]) -> None:
    rate = 1000
    replies = run_all(hammers, "take_until", slot=7, end=time.monotonic() + 1.0, request_s=1 / rate)
    counts, firsts, lasts = zip(*replies, strict=True)
    allowed = rate * (1 + max(lasts) - min(firsts))
    assert allowed * 0.98 <= sum(counts) <= allowed


def test_process_stopped_between_its_clock_and_its_take_gets_nothing_extra(hammers: list[Hammer]) -> None:
    """The others have used the rate in the meantime: their edges are in the future of the late one."""
    late, *others = hammers
    assert sum(run_all(others, "take", slot=7, tries=1000, now=NOW + 30.0, request_s=0.01)) == 100
    assert late.run("take", slot=7, tries=1000, now=NOW, request_s=0.01) == 0
    assert sum(run_all(others, "take", slot=7, tries=1000, now=NOW + 30.0, request_s=0.01)) == 0


def test_unit_bucket_is_shared_by_all_processes(hammers: list[Hammer]) -> None:
    counts = run_all(hammers, "take", slot=7, tries=1000, now=NOW, request_s=0.0001, unit_s=0.1)
    assert sum(counts) == 10


def test_take_and_give_back_lose_nothing(hammers: list[Hammer], fd: int) -> None:
    run_all(hammers, "churn", slot=7, tries=20_000, now=NOW, request_s=0.25)
    assert granted(SharedBuckets(fd), 7, 10, 0.25) == 4


def test_slots_are_independent(hammers: list[Hammer]) -> None:
    # The last two share a mutex, the first two do not.
    slots = (3, 4, 3 + STRIPES, 3 + 2 * STRIPES)
    for hammer, slot in zip(hammers, slots, strict=True):
        hammer.send("take", slot=slot, tries=20_000, now=NOW, request_s=0.01)
    assert [hammer.receive() for hammer in hammers] == [100, 100, 100, 100]


def test_process_killed_with_a_mutex_blocks_no_other(hammers: list[Hammer], fd: int) -> None:
    holder, *others = hammers
    assert holder.run("take", slot=7, tries=3, now=NOW, request_s=0.1) == 3
    assert holder.run("hold", slot=7) == "held"
    for hammer in others:
        hammer.send("take", slot=7, tries=1000, now=NOW, request_s=0.1)
    holder.kill()
    assert sum(hammer.receive() for hammer in others) == 7
    assert granted(SharedBuckets(fd), 7 + STRIPES, 20, 0.1) == 10


def test_mutex_recovers_every_time_its_holder_dies(fd: int) -> None:
    for count in range(1, 4):
        holder = Hammer(fd)
        assert holder.run("hold", slot=7) == "held"
        holder.close()
        assert granted(SharedBuckets(fd), 7, count, 0.1) == count


def test_successor_continues_with_the_same_buckets(fd: int) -> None:
    first = Hammer(fd)
    assert first.run("take", slot=7, tries=6, now=NOW, request_s=0.1) == 6
    first.close()
    second = Hammer(fd)
    assert second.run("take", slot=7, tries=20, now=NOW, request_s=0.1) == 4
    second.close()


def test_growth_is_visible_to_every_process_and_keeps_counts(hammers: list[Hammer]) -> None:
    first, second, third, _ = hammers
    last = FIRST_BUCKETS - 1
    assert first.run("take", slot=last, tries=4, now=NOW, request_s=0.1) == 4
    assert first.run("reserve", slot=FIRST_BUCKETS) == 2 * FIRST_BUCKETS
    assert first.run("take", slot=FIRST_BUCKETS, tries=7, now=NOW, request_s=0.1) == 7
    assert second.run("reserve", slot=FIRST_BUCKETS) == 2 * FIRST_BUCKETS
    assert second.run("take", slot=FIRST_BUCKETS, tries=7, now=NOW, request_s=0.1) == 3
    # A process that has not remapped yet shares the old part.
    assert third.run("take", slot=last, tries=20, now=NOW, request_s=0.1) == 6


def test_concurrent_growth_agrees_on_the_size(hammers: list[Hammer]) -> None:
    for hammer, slot in zip(hammers, (FIRST_BUCKETS, 2 * FIRST_BUCKETS, 5 * FIRST_BUCKETS, 0), strict=True):
        hammer.send("reserve", slot=slot)
    for hammer in hammers:
        hammer.receive()
    assert set(run_all(hammers, "reserve", slot=8 * FIRST_BUCKETS - 1)) == {8 * FIRST_BUCKETS}
    counts = run_all(hammers, "take", slot=8 * FIRST_BUCKETS - 1, tries=1000, now=NOW, request_s=0.1)
    assert sum(counts) == 10


@pytest.mark.parametrize(
    ("slot", "slots"),
    [(0, 1), (FIRST_BUCKETS - 1, 1), (FIRST_BUCKETS, 2), (2 * FIRST_BUCKETS, 4), (100 * FIRST_BUCKETS, 128)],
)
def test_reserving_doubles_until_the_slot_fits(fd: int, slot: int, slots: int) -> None:
    shared = SharedBuckets(fd)
    shared.reserve(slot)
    assert shared.bucket_count == slots * FIRST_BUCKETS
    assert granted(shared, slot, 20, 0.1) == 10


def test_unreserved_slot_raises_and_unlocks_its_stripe(hammers: list[Hammer]) -> None:
    careless, other, *_ = hammers
    assert careless.run("overstep", slot=FIRST_BUCKETS) == ["IndexError", "IndexError"]
    assert other.run("take", slot=0, tries=20, now=NOW, request_s=0.1) == 10


# An account and its keys


def test_keys_of_one_account_share_its_buckets_over_all_processes(hammers: list[Hammer], fd: int) -> None:
    """Two keys with lower limits of their own, each used on two processes, and a key without."""
    account = [7, 1000, 100_000]
    for hammer, own in zip(hammers, ([8, 300, 100_000], [9, 900, 100_000]) * 2, strict=True):
        hammer.send("take_both", rate=account, own=own, tries=5000, now=NOW)
    counts = [hammer.receive() for hammer in hammers]
    shared = SharedBuckets(fd)
    rest = granted(shared, 7, 2000, 1 / 1000, 1 / 100_000)
    assert sum(counts) + rest == 1000
    assert counts[0] + counts[2] <= 300
    assert counts[1] + counts[3] <= 900
    assert rest == 0


def test_tighter_limit_is_the_one_with_fewer_requests_left(fd: int) -> None:
    shared = SharedBuckets(fd)
    rate, own = BucketRates(1, 10, 100), BucketRates(2, 4, 100)
    assert shared.tighter(rate, None, NOW) is rate
    assert shared.tighter(rate, own, NOW) is own
    assert granted(shared, 1, 8, 0.1) == 8
    assert shared.tighter(rate, own, NOW) is rate


def test_refund_of_a_key_with_lower_limits_goes_to_both(fd: int) -> None:
    shared = SharedBuckets(fd)
    rate, own = BucketRates(1, 10, 100), BucketRates(2, 4, 100)
    assert shared.take_both(rate, own, NOW, requests=4, units=4) == 0.0
    shared.give_back_both(rate, own, requests=4, units=4)
    assert granted(shared, 1, 20, 0.1) == 10
    assert granted(shared, 2, 20, 0.25) == 4


# A host with one worker


def test_unshared_buckets_decide_like_shared_ones(fd: int) -> None:
    """The lock-free copy of `limits.take` always decides like the original."""
    chance = random.Random(11)
    shared_fd = rate_buckets.create()
    own, shared = UnsharedBuckets(fd), SharedBuckets(shared_fd)
    now = NOW
    for _ in range(5_000):
        now += chance.choice([0.0, 0.001, 0.05, 0.4, 3.0, -0.3, -2.0])
        slot, request_s, unit_s = chance.randrange(3), chance.choice([0.0, 0.1, 0.25]), chance.choice([0.0, 0.05, 0.6])
        before = own.edge(slot)
        wait = own.take(slot, now, request_s, unit_s)
        assert wait == shared.take(slot, now, request_s, unit_s)
        assert own.edge(slot) == shared.edge(slot)
        if wait:
            assert own.edge(slot) == before
        else:
            assert own.edge(slot) == shared.edge(slot)
        if chance.random() < 0.1:
            own.give_back(slot, request_s, unit_s)
            shared.give_back(slot, request_s, unit_s)
    os.close(shared_fd)


def test_unshared_buckets_keep_counts_for_a_successor(fd: int) -> None:
    assert granted(UnsharedBuckets(fd), 7, 6, 0.1) == 6
    assert granted(SharedBuckets(fd), 7, 20, 0.1) == 4
