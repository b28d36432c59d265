"""Latencies of an upstream: operators see those of the last minutes, however few calls there were."""

from __future__ import annotations

from proxy.core.latency_histogram import ENOUGH_SAMPLES, STEP_S, WINDOW_S, LatencyHistogram
from proxy.core.usage import quantile_ms


def p99_ms(histogram: LatencyHistogram, now: float) -> float | None:
    return quantile_ms(histogram.recent(now), 0.99)


def test_slow_calls_are_out_of_sight_after_the_window_even_if_few_calls_follow() -> None:
    histogram = LatencyHistogram()
    histogram.recent(0.0)
    for _ in range(100):
        histogram.add(0.09)
    slow = p99_ms(histogram, 1.0)
    assert slow is not None
    assert slow > 50
    # One call in ten seconds.
    now = 1.0
    for _ in range(int(1.2 * WINDOW_S / 10)):
        now += 10.0
        histogram.add(0.008)
        histogram.recent(now)
    quick = p99_ms(histogram, now)
    assert quick is not None
    assert quick <= 10
    assert WINDOW_S / 10 - 3 <= sum(histogram.recent(now)) <= (WINDOW_S + STEP_S) / 10 + 1


def test_window_without_calls_is_empty_and_hedges_remember_the_last_ones() -> None:
    histogram = LatencyHistogram()
    for _ in range(ENOUGH_SAMPLES):
        histogram.add(0.02)
    assert sum(histogram.recent(0.0)) == ENOUGH_SAMPLES
    for step in range(int(2 * WINDOW_S / STEP_S)):
        histogram.recent(step * STEP_S)
    assert sum(histogram.recent(2 * WINDOW_S)) == 0
    assert histogram.quantile_s(0.95) == 0.025
    assert len(histogram._steps) <= WINDOW_S / STEP_S + 2
