"""The limit on calls in flight, against a simulated upstream that is always given as many as allowed."""

from __future__ import annotations

import heapq
import random

import pytest

from proxy.core.concurrency import ConcurrencyLimit


def saturate(
    limit: ConcurrencyLimit,
    capacity: int,
    *,
    service_s: float,
    seconds: float,
    start: float = 0.0,
    longest_delay_s: float = 0.0,
) -> float:
    """Keep the upstream saturated. It works on `capacity` calls at a time, and its replies are delayed at random. Returns the
    calls it answered in a second."""
    chance = random.Random(capacity)
    now, answered = start, 0
    free_at = [start] * capacity
    flying: list[tuple[float, float]] = []
    while now < start + seconds:
        while len(flying) < limit.allowed:
            ends = max(now, heapq.heappop(free_at)) + service_s
            heapq.heappush(free_at, ends)
            heapq.heappush(flying, (ends + chance.uniform(0.0, longest_delay_s), now))
        now, sent_at = heapq.heappop(flying)
        limit.observe(now - sent_at, now)
        answered += 1
    return answered / seconds


@pytest.mark.parametrize("service_s", [0.01, 1.0])
@pytest.mark.parametrize("most", [1, 2, 16, 64])
def test_limit_stays_where_the_upstream_can_take_it(most: int, service_s: float) -> None:
    limit = ConcurrencyLimit(most)
    rate = saturate(limit, 1000, service_s=service_s, seconds=100 * service_s)
    assert rate > 0.93 * most / service_s
    assert limit.allowed >= most // 2
    assert limit.latency_s == pytest.approx(service_s)


@pytest.mark.parametrize("capacity", [12, 16, 30, 50])
def test_limit_falls_to_what_the_upstream_can_work_on(capacity: int) -> None:
    limit = ConcurrencyLimit(64)
    saturate(limit, capacity, service_s=0.1, seconds=5.0)
    assert limit.latency_s < 0.2
    rate = saturate(limit, capacity, service_s=0.1, seconds=30.0, start=5.0)
    assert rate > 0.9 * capacity / 0.1
    assert limit.latency_s < 0.2


def test_limit_grows_again_with_the_upstream() -> None:
    limit = ConcurrencyLimit(64)
    saturate(limit, 12, service_s=0.1, seconds=10.0)
    assert limit.allowed < 32
    saturate(limit, 1000, service_s=0.1, seconds=10.0, start=20.0)
    assert limit.allowed == 64


def test_slower_calls_are_not_taken_for_a_slower_upstream_for_long() -> None:
    limit = ConcurrencyLimit(64)
    saturate(limit, 1000, service_s=0.01, seconds=5.0)
    saturate(limit, 1000, service_s=0.5, seconds=60.0, start=6.0)
    assert limit.allowed == 64


def test_limit_is_never_less_than_its_share() -> None:
    limit = ConcurrencyLimit(64)
    saturate(limit, 1, service_s=0.01, seconds=20.0)
    assert 8 <= limit.allowed <= 13


@pytest.mark.parametrize("capacity", [24, 40, 64])
def test_measurements_cost_little_although_latencies_vary(capacity: int) -> None:
    limit = ConcurrencyLimit(128)
    saturate(limit, capacity, service_s=0.1, seconds=1.0, longest_delay_s=0.1)
    rates = [
        saturate(limit, capacity, service_s=0.1, seconds=5.0, start=1.0 + 5.0 * number, longest_delay_s=0.1)
        for number in range(6)
    ]
    assert min(rates) > 0.92 * capacity / 0.1
