"""The pace of an upstream that answers 429, and the trials during its rest."""

from __future__ import annotations

import itertools
import random

import pytest

from proxy.core.limits import ProcessRate
from proxy.core.pace import FIRST_TRIAL_S, PACED_S, MethodLimit
from proxy.core.routing import UpstreamGroup
from proxy.core.upstream_health import UpstreamHealth


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
    pace_s = health.pace.cost_s
    for _ in range(5):
        health.rest(100.01, 5.0)
    assert health.pace.cost_s == pace_s
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


def limited(per_second: float, label: str = "up", index: int = 0) -> UpstreamHealth:
    """An upstream whose settings limit eth_getLogs."""
    return UpstreamHealth(
        label, index=index, method_limits={"eth_getL*": MethodLimit(ProcessRate(per_second), per_second)}
    )


@pytest.mark.parametrize(("declared", "limit"), [(50.0, 5), (200.0, 40), (4.0, 2)])
def test_limit_of_a_method_is_learnt_below_the_declared_one(declared: float, limit: int) -> None:
    """Two minutes of demand: most of the real limit is used, few calls are refused, and other methods go on."""
    health, now, edge, answered, refused = limited(declared), 100.0, 0.0, 0, 0
    began, end = now, now + 120.0
    while now < end:
        health.refresh(now)
        assert health.takes_calls(now), "other methods go on"
        if health.admits("eth_getLogs", now):
            health.begin(now)
            health.begin_method("eth_getLogs", now)
            health.ended()
            after = max(edge, now - 1.0) + 1.0 / limit
            if after > now:
                refused += 1
                health.limited("eth_getLogs", now, 1.0)
            else:
                edge = after
                answered += 1
                health.succeeded(0.01, "eth_getLogs")
        now += 0.002
    assert answered >= 0.6 * limit * (end - began)
    assert refused <= 60


def test_declared_limit_of_a_method_is_restored_slowly() -> None:
    health, now = limited(40.0), 100.0
    health.refresh(now)
    health.limited("eth_getLogs", now, 1.0)

    def sent_in_second(start: float) -> int:
        health.refresh(start)
        count = 0
        for step in range(1000):
            at = start + step / 1000
            if health.admits("eth_getLogs", at):
                health.begin_method("eth_getLogs", at)
                health.succeeded(0.001, "eth_getLogs")
                count += 1
        return count

    found = [sent_in_second(now + second) for second in range(1, 40)]
    assert found[2] < 20
    assert all(after <= 1.3 * before + 2 for before, after in itertools.pairwise(found[2:])), found
    assert 38 <= found[-1] <= 42, found


def test_method_that_rests_is_tried_only_where_no_other_upstream_takes_it() -> None:
    one, other = limited(10.0), UpstreamHealth("other", index=1)
    both, alone = UpstreamGroup([one, other]), UpstreamGroup([one])
    one.limited("eth_getLogs", 100.0, 30.0)
    assert {both.choose(101.0 + n, "eth_getLogs") for n in range(20)} == {other}
    assert one in {both.choose(101.0 + n, "eth_call") for n in range(20)}
    assert alone.choose(100.1, "eth_getLogs") is None
    assert alone.choose(101.0, "eth_getLogs") is one
    one.begin(101.0)
    one.begin_method("eth_getLogs", 101.0)
    assert alone.choose(101.1, "eth_getLogs") is None, "one trial at a time"
    assert alone.choose(101.1, "eth_call") is one
    one.succeeded(0.01, "eth_getLogs")
    assert alone.choose(101.5, "eth_getLogs") is one
    assert both.choose(101.6, "eth_getLogs") is not None
