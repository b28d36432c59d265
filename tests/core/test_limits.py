"""Token buckets against an exact model: whatever floats do, the count is right."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core import limits
from proxy.core.limits import (
    MOST_AHEAD_S,
    TOLERANCE_S,
    BucketRates,
    fits_ever,
    full_in,
    give_back,
    remaining,
    take,
    take_both,
)

# Values of a monotonic clock: a machine just started, one that has run for four months.
STARTS = st.sampled_from([1.0, 1234.5678, 1e5, 1e7])
RATES = st.sampled_from([1, 3, 7, 10, 100, 200, 999, 2000, 100_000])
# A sum of doubles near 1e7 is off by at most an ulp (2e-9) each time.
STEP_ERROR_S = 4e-9


class Model:
    """The bucket as it is defined, in rational numbers: a level, refilled continuously, never above one second's worth."""

    def __init__(self, rate: int, now: float) -> None:
        self.rate = rate
        self.level = Fraction(rate)
        self.now = Fraction(now)

    def at(self, now: float) -> Fraction:
        self.level = min(Fraction(self.rate), self.level + (Fraction(now) - self.now) * self.rate)
        self.now = Fraction(now)
        return self.level


@settings(deadline=None)
@given(STARTS, RATES, st.lists(st.tuples(st.floats(0, 1.5), st.integers(0, 30)), max_size=60))
def test_every_decision_is_the_exact_models(start: float, rate: int, asks: list[tuple[float, int]]) -> None:
    edges = [0.0, 0.0]
    now = start
    model = Model(rate, now)
    slack = rate * (TOLERANCE_S + len(asks) * STEP_ERROR_S)
    for pause, amount in asks:
        now += pause
        level = model.at(now)
        if take(edges, 0, now, amount / rate, 0.0):
            assert amount > level - slack
        else:
            assert amount < level + slack
            model.level -= amount


@settings(deadline=None)
@given(STARTS, RATES, st.lists(st.tuples(st.floats(0, 0.6), st.integers(1, 20)), min_size=1, max_size=50))
def test_no_stretch_of_time_admits_more_than_capacity_and_refill(
    start: float, rate: int, asks: list[tuple[float, int]]
) -> None:
    edges = [0.0, 0.0]
    times = [start + pause for pause in accumulate(pause for pause, _ in asks)]
    admitted = [
        0 if take(edges, 0, now, amount / rate, 0.0) else amount for now, (_, amount) in zip(times, asks, strict=True)
    ]
    slack = rate * (TOLERANCE_S + len(asks) * STEP_ERROR_S)
    for first in range(len(asks)):
        for last, total in enumerate(accumulate(admitted[first:]), first):
            elapsed = Fraction(times[last]) - Fraction(times[first])
            assert total <= rate * (1 + elapsed) + slack


@settings(deadline=None, max_examples=30)
@given(STARTS, st.sampled_from([1, 3, 10, 100]), st.floats(0.1, 3.0))
def test_asked_continuously_all_of_capacity_and_refill_is_admitted(start: float, rate: int, span: float) -> None:
    edges = [0.0, 0.0]
    asks = int(span * rate * 7) + rate + 1
    times = [start] * (rate + 1) + [start + span * step / asks for step in range(1, asks + 1)]
    admitted = sum(not take(edges, 0, now, 1 / rate, 0.0) for now in times)
    exact = rate * (1 + Fraction(times[-1]) - Fraction(start))
    assert exact - 1 - rate * TOLERANCE_S <= admitted <= exact + rate * TOLERANCE_S


@pytest.mark.parametrize("rate", [1, 2, 3, 7, 10, 49, 100, 200, 1000, 2000, 10_000])
@pytest.mark.parametrize("now", [1.0, 3.3, 54_321.123, 1e7 + 1 / 3])
def test_fresh_bucket_gives_exactly_its_rate_in_one_instant(rate: int, now: float) -> None:
    edges = [0.0, 0.0]
    waits = [take(edges, 0, now, 1 / rate, 0.0) for _ in range(rate + 2)]
    assert waits[:rate] == [0.0] * rate
    assert all(waits[rate:])


def test_tenth_request_of_ten_fits_and_the_eleventh_waits_a_tenth() -> None:
    edges = [0.0, 0.0]
    for _ in range(10):
        assert take(edges, 0, 50.0, 0.1, 0.0) == 0.0
    assert take(edges, 0, 50.0, 0.1, 0.0) == pytest.approx(0.1)
    assert take(edges, 0, 50.1, 0.1, 0.0) == 0.0


def test_refusal_changes_nothing() -> None:
    edges = [9.95, 9.5, 1.0, 2.0]
    before = list(edges)
    assert take(edges, 0, 10.0, 0.1, 0.1) > 0
    assert edges == before


def test_refusal_by_one_bucket_takes_nothing_from_the_other() -> None:
    edges = [9.0, 9.99]
    assert take(edges, 0, 10.0, 0.1, 0.1) == pytest.approx(0.09)
    assert edges == [9.0, 9.99]
    assert take(edges, 0, 10.0, 0.1, 0.01) == 0.0
    assert edges == pytest.approx([9.1, 10.0])


def test_wait_is_that_of_the_slower_bucket() -> None:
    assert take([9.9, 9.7], 0, 10.0, 0.2, 0.8) == pytest.approx(0.5)
    assert take([9.9, 9.7], 0, 10.0, 0.6, 0.1) == pytest.approx(0.5)


def test_returned_wait_is_enough() -> None:
    edges = [0.0, 0.0]
    now = 100.0
    for _ in range(50):
        if wait := take(edges, 0, now, 0.3, 0.7):
            now += wait
            assert take(edges, 0, now, 0.3, 0.7) == 0.0
    assert now == pytest.approx(100.0 + 50 * 0.7 - 1.0)


def test_asking_for_nothing_is_always_granted() -> None:
    edges = [10.0, 10.0]
    assert take(edges, 0, 10.0, 0.0, 0.0) == 0.0
    assert edges == [10.0, 10.0]


def test_neighbouring_slots_are_not_touched() -> None:
    edges = [1.0, 2.0, 0.0, 0.0, 3.0, 4.0]
    take(edges, 2, 50.0, 0.5, 0.5)
    assert edges == [1.0, 2.0, 49.5, 49.5, 3.0, 4.0]


def test_long_idle_bucket_holds_one_second_and_no_more() -> None:
    edges = [5.0, 5.0]
    admitted = sum(not take(edges, 0, 5_000.0, 0.1, 0.0) for _ in range(100))
    assert admitted == 10


@pytest.mark.parametrize("ahead", [MOST_AHEAD_S + 0.1, 3600.0, 1e9])
def test_edge_of_another_clock_heals_at_once(ahead: float) -> None:
    edges = [100.0 + ahead, 100.0 + ahead]
    assert take(edges, 0, 100.0, 0.1, 0.1) == 0.0
    assert edges == pytest.approx([99.1, 99.1])


def test_clock_that_steps_back_a_little_causes_no_long_wait() -> None:
    edges = [100.5, 100.5]
    wait = take(edges, 0, 100.0, 0.1, 0.1)
    assert 0.0 < wait <= 1.1
    assert take(edges, 0, 100.0 + wait, 0.1, 0.1) == 0.0


@pytest.mark.parametrize("late_s", [0.001, 0.5, 1.5, 30.0])
def test_process_that_was_stopped_after_reading_the_clock_gets_nothing_extra(late_s: float) -> None:
    """Another worker emptied the buckets meanwhile: the late one must not find them full."""
    edges = [0.0, 0.0]
    assert take(edges, 0, 100.0 + late_s, 1.0, 1.0) == 0.0
    assert take(edges, 0, 100.0, 0.1, 0.1) > 0.0
    assert edges == [100.0 + late_s] * 2


# An account and a key with lower limits


def test_key_with_lower_limits_takes_from_both_or_from_neither() -> None:
    edges = [0.0] * 4
    account, own = BucketRates(0, 10, 100), BucketRates(1, 4, 100)
    granted = [take_both(edges, account, own, 50.0, requests=1, units=1) == 0.0 for _ in range(6)]
    assert granted == [True] * 4 + [False] * 2
    assert remaining(edges[0], 50.0, 10) == 6
    assert [take(edges, 0, 50.0, 0.1, 0.0) == 0.0 for _ in range(7)] == [True] * 6 + [False]
    before = list(edges)
    assert take_both(edges, account, own, 50.1, requests=1, units=1) > 0.0
    assert take_both(edges, account, own, 50.25, requests=3, units=1) == pytest.approx(0.5)
    assert edges[::2] == pytest.approx(before[::2])


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 0.3), st.integers(0, 3), st.integers(0, 30)), max_size=60))
def test_both_are_granted_exactly_when_each_alone_would_be(asks: list[tuple[float, int, int]]) -> None:
    account, own = BucketRates(0, 10, 200), BucketRates(1, 7, 50)
    edges, now = [0.0] * 4, 1000.0
    for pause, requests, units in asks:
        now += pause
        alone = list(edges)
        waits = [take(alone, 2 * r.bucket_index, now, requests * r.request_s, units * r.unit_s) for r in (account, own)]
        before = list(edges)
        assert take_both(edges, account, own, now, requests=requests, units=units) == max(waits)
        if any(waits):
            assert [max(edge, now - 1.0) for edge in edges] == pytest.approx([max(edge, now - 1.0) for edge in before])
        else:
            assert edges == alone


def test_rate_limits_are_equal_by_value() -> None:
    assert BucketRates(1, 2, 3) == BucketRates(1, 2, 3) != BucketRates(1, 2, 4)
    assert hash(BucketRates(1, 2, 3)) == hash(BucketRates(1, 2, 3))
    assert repr(BucketRates(1, 2, 3)) == "<BucketRates 2 requests/s, 3 units/s, bucket 1>"


def test_given_back_amount_can_be_taken_again_and_once_only() -> None:
    edges = [0.0, 0.0]
    assert take(edges, 0, 10.0, 1.0, 1.0) == 0.0
    give_back(edges, 0, 0.3, 0.2)
    assert take(edges, 0, 10.0, 0.3, 0.2) == 0.0
    assert take(edges, 0, 10.0, 0.1, 0.0) > 0.0


def test_giving_back_to_a_full_bucket_adds_nothing() -> None:
    edges = [9.0, 9.0]
    give_back(edges, 0, 0.5, 0.5)
    assert sum(not take(edges, 0, 10.0, 0.1, 0.0) for _ in range(20)) == 10
    assert remaining(8.5, 10.0, 10) == 10


@pytest.mark.parametrize(
    ("edge", "left"),
    [(0.0, 10), (9.0, 10), (9.1, 9), (9.95, 0), (9.9, 1), (10.0, 0), (10.5, 0), (-1e9, 10)],
)
def test_remaining_is_what_can_still_be_taken(edge: float, left: int) -> None:
    assert remaining(edge, 10.0, 10) == left
    edges = [edge, 0.0]
    assert sum(not take(edges, 0, 10.0, 0.1, 0.0) for _ in range(left)) == left
    assert take(edges, 0, 10.0, 0.1, 0.0) > 0.0


@settings(deadline=None)
@given(st.sampled_from([1, 10, 100, 2000]), st.integers(0, 50), STARTS)
def test_headers_and_bucket_agree(rate: int, spent: int, start: float) -> None:
    edges = [0.0, 0.0]
    spent = sum(not take(edges, 0, start, 1 / rate, 0.0) for _ in range(spent))
    assert remaining(edges[0] if spent else start - 1.0, start, rate) == rate - spent


def test_window_ends_when_the_bucket_is_full_again() -> None:
    assert full_in(10.0, 10.0) == 1.0
    assert full_in(9.5, 10.0) == 0.5
    assert full_in(0.0, 10.0) == 0.0


@pytest.mark.parametrize(
    ("request_s", "unit_s", "fits"),
    [(0.0, 0.0, True), (1.0, 1.0, True), (sum([0.1] * 10), 1.0, True), (1.1, 0.0, False), (0.0, 1.005, False)],
)
def test_batch_beyond_a_full_bucket_never_fits(request_s: float, unit_s: float, fits: bool) -> None:
    assert fits_ever(request_s, unit_s) is fits
    assert (limits.take([0.0, 0.0], 0, 100.0, request_s, unit_s) == 0.0) is fits
