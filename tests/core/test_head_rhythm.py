"""Polls of a network's head come when a block is due, and not more often than at a fixed interval."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest

from proxy.core.head_rhythm import SHORTEST_POLL_S, HeadRhythm

ROUND_TRIP_S = 0.05


def follow(block_time_s: float, arrivals: Sequence[float]) -> tuple[list[float], int]:
    """Poll a chain whose blocks arrive at these times. Returns how late each was seen, and the number of polls."""
    rhythm, now, seen, polls = HeadRhythm(block_time_s), 0.0, 0, 0
    late: list[float] = []
    while now < arrivals[-1]:
        polls += 1
        head = sum(arrival <= now for arrival in arrivals)
        late += [now - arrival for arrival in arrivals[seen:head]]
        seen = max(seen, head)
        began, now = now, now + ROUND_TRIP_S
        if head:
            rhythm.polled(head, int(arrivals[head - 1]), began)
        now += rhythm.pause_s(now)
    return late, polls


def every(seconds: float, *, missed: Callable[[int], bool] = lambda nth: False, count: int = 200) -> list[float]:
    return [0.3 + nth * seconds for nth in range(1, count + 1) if not missed(nth)]


@pytest.mark.parametrize("block_time_s", [2.0, 3.0, 5.0, 12.0])
def test_blocks_that_come_regularly_are_seen_soon(block_time_s: float) -> None:
    late, _ = follow(block_time_s, every(block_time_s))
    assert max(late[20:]) <= max(SHORTEST_POLL_S, block_time_s / 16) + 2 * ROUND_TRIP_S
    assert max(late) <= HeadRhythm(block_time_s).interval_s + ROUND_TRIP_S


@pytest.mark.parametrize("block_time_s", [0.25, 1.0, 2.0, 3.0, 12.0])
@pytest.mark.parametrize("missed", [0.0, 0.05, 0.5])
def test_polls_are_not_more_than_at_a_fixed_interval(block_time_s: float, missed: float) -> None:
    rng = random.Random(1)
    arrivals = every(block_time_s, missed=lambda nth: rng.random() < missed)
    _, polls = follow(block_time_s, arrivals)
    assert polls <= arrivals[-1] / HeadRhythm(block_time_s).interval_s + 1


def test_chain_that_is_not_regular_is_polled_at_a_fixed_interval() -> None:
    rng = random.Random(2)
    arrivals = [*accumulate(rng.expovariate(1 / 12) for _ in range(300))]
    late, polls = follow(12.0, arrivals)
    assert max(late) <= 2.0 + 2 * ROUND_TRIP_S
    assert polls <= arrivals[-1] / 2.0 + 1


def test_block_time_that_is_longer_than_expected_costs_no_more_polls() -> None:
    arrivals = every(15.0)
    late, polls = follow(12.0, arrivals)
    assert max(late) <= 2.0 + 2 * ROUND_TRIP_S
    assert polls <= arrivals[-1] / 2.0 + 1


def test_gap_between_polls_stays_below_two_intervals() -> None:
    rhythm = HeadRhythm(12.0)
    for number in range(20):
        rhythm.polled(number, 12 * number, 12.0 * number)
    now, gaps = 12.0 * 19, list[float]()
    while now < 12.0 * 20 + 60:
        gaps.append(rhythm.pause_s(now))
        now += gaps[-1]
    assert max(gaps) < 4.0
    assert min(gaps) > 0.1


def test_older_heads_change_nothing() -> None:
    rhythm = HeadRhythm(2.0)
    for number in range(10):
        rhythm.polled(number, 2 * number, 2.0 * number)
    before = rhythm.pause_s(18.1)
    rhythm.polled(3, 6, 18.05)
    rhythm.polled(9, 18, 18.06)
    assert rhythm.pause_s(18.1) == before
