"""The pace of an upstream that answers 429, and the trials during its rest."""

from __future__ import annotations

import random

import pytest

from proxy.core.upstream_health import FIRST_TRIAL_S, PACED_S, UpstreamHealth


def paced(now: float = 100.0, *, answered: int = 10) -> UpstreamHealth:
    """An upstream that has answered so many calls in the last second before its first 429."""
    health = UpstreamHealth("up")
    health.refresh(now - 2.0)
    health.refresh(now - 1.0)
    for _ in range(answered):
        health.begin(now - 0.5)
        health.inflight -= 1
        health.succeeded(0.01)
    health.rest(now, 5.0)
    return health


def test_trials_of_a_rest_become_rare_and_a_good_one_ends_it() -> None:
    health, now, trials = paced(), 100.0, list[float]()
    while now < 104.9:
        if health.allows_fallback(now):
            assert not health.takes_calls(now)
            health.begin(now)
            assert not health.allows_fallback(now)  # one at a time
            trials.append(now - 100.0)
            health.rest(now, 5.0)
        now += 0.01
    assert trials[0] == pytest.approx(FIRST_TRIAL_S, abs=0.02)
    assert len(trials) <= 5
    now = 120.0
    health.rest(now, 5.0)
    assert health.allows_fallback(now + 4.0)
    health.begin(now + 4.0)
    health.succeeded(0.01)
    assert health.takes_calls(now + 4.5)


def test_calls_under_way_at_the_first_429_change_nothing() -> None:
    health = paced()
    pace_s = health.pace_s
    for _ in range(5):
        health.rest(100.01, 5.0)
    assert health.pace_s == pace_s
    assert health.allows_fallback(100.0 + FIRST_TRIAL_S + 0.01)


@pytest.mark.parametrize("limit", [3, 10, 100])
def test_calls_follow_the_limit_of_the_upstream(limit: int) -> None:
    """A minute of demand above the limit: most of the limit is used, and few calls are refused."""
    health, now, edge, answered, refused = paced(answered=1), 110.0, 0.0, 0, 0
    chance = random.Random(7)
    end = now + 60.0
    while now < end:
        health.refresh(now)
        if health.takes_calls(now) or health.allows_fallback(now):
            health.begin(now)
            health.inflight -= 1
            after = max(edge, now - 1.0) + 1.0 / limit
            if after > now:
                refused += 1
                health.rest(now, 5.0)
            else:
                edge = after
                answered += 1
                health.succeeded(0.01)
        now += 0.001 + 0.001 * chance.random()
    assert answered >= 0.7 * 60 * limit
    assert refused <= 60


def test_pace_ends_without_a_429_for_a_while() -> None:
    health = paced()
    health.refresh(106.0)
    assert not health.free
    health.refresh(101.0 + PACED_S)
    assert health.free
