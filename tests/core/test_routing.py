"""Which upstream a call goes to: health, the breaker, the choice and the budget, by plain calls with time as a parameter."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.credits import CallPrices, CreditMeter, CreditTable
from proxy.core.data_bounds import DATA_INDEX, DataBounds
from proxy.core.latency_histogram import ENOUGH_SAMPLES, FORGET_AT
from proxy.core.limits import ProcessRate
from proxy.core.pace import LONGEST_REST_S, PACED_S
from proxy.core.retry_budget import OWN_RETRIES, OWN_RETRIES_PER_S, RetryBudget
from proxy.core.routing import HEDGE_CEILING_S, HEDGE_FLOOR_S, CostPolicy, UpstreamGroup
from proxy.core.routing_rules import RoutingRule, exclusions, steered
from proxy.core.upstream_health import (
    FAILURES_IN_A_ROW,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Standing,
    UpstreamHealth,
)

METHOD = "eth_call"


def healths(*options: dict[str, Any]) -> list[UpstreamHealth]:
    return [UpstreamHealth(f"up{index}", index=index, **each) for index, each in enumerate(options)]


def group(*options: dict[str, Any]) -> UpstreamGroup:
    return UpstreamGroup(healths(*options))


def chosen(of: UpstreamGroup, count: int = 1, now: float = 100.0, **wishes: Any) -> Counter[str]:
    found = [of.choose(now, METHOD, **wishes) for _ in range(count)]
    return Counter(member.label if member else "nobody" for member in found)


def break_open(health: UpstreamHealth, now: float) -> None:
    for _ in range(FAILURES_IN_A_ROW):
        health.failed(now)


# Score and choice


def test_score_grows_with_latency_load_and_failures_and_falls_with_weight() -> None:
    plain, slow, loaded, failing, heavy = healths({}, {}, {}, {}, {"weight": 4.0})
    slow.latency_s = 0.1
    loaded.inflight = heavy.inflight = 8
    failing.failing_share = 0.3
    assert plain.score() < min(slow.score(), loaded.score(), failing.score())
    assert plain.score() < heavy.score() < loaded.score()


def test_equal_upstreams_share_the_calls_equally() -> None:
    counts = chosen(group({}, {}, {}), 3000)
    assert all(900 < count < 1100 for count in counts.values())
    assert len(counts) == 3


@pytest.mark.parametrize(("weights", "shares"), [((3.0, 1.0), (0.75, 0.25)), ((1.0, 2.0, 1.0), (0.25, 0.5, 0.25))])
def test_upstreams_that_are_equally_fast_share_by_weight(weights: tuple[float, ...], shares: tuple[float, ...]) -> None:
    counts = chosen(group(*({"weight": weight} for weight in weights)), 4000)
    for index, share in enumerate(shares):
        assert counts[f"up{index}"] / 4000 == pytest.approx(share, abs=0.03)


def test_calls_under_way_settle_by_weight_too() -> None:
    of = group({"weight": 3.0}, {"weight": 1.0})
    for _ in range(400):
        member = of.choose(100.0, METHOD)
        assert member is not None
        member.begin(100.0)
    assert of.members[0].inflight / 400 == pytest.approx(0.75, abs=0.04)


def test_slow_upstream_is_passed_by_while_others_are_quick() -> None:
    of = group({}, {}, {})
    of.members[1].latency_s = 2.0
    assert chosen(of, 2000)["up1"] == 0


def test_small_difference_in_latency_leaves_no_upstream_without_calls() -> None:
    of = group({}, {})
    of.members[1].latency_s = of.members[0].latency_s * 1.2
    assert min(chosen(of, 1000).values()) > 400


def test_one_that_looks_best_to_everybody_is_not_run_over() -> None:
    of = group({}, {}, {}, {})
    of.members[0].latency_s = 0.001
    for _ in range(400):
        member = of.choose(100.0, METHOD)
        assert member is not None
        member.begin(100.0)
    assert 0 < of.members[0].inflight < 400
    assert all(member.inflight > 0 for member in of.members)


def test_slow_spell_is_forgotten_by_what_the_upstream_says_of_its_head() -> None:
    of = group({}, {})
    of.members[1].latency_s = 2.0
    assert chosen(of, 200)["up1"] == 0
    for look in range(10):
        of.members[1].head_reported(0.01, 100.0 + look)
    assert chosen(of, 200)["up1"] > 50


def test_slow_word_about_the_head_says_nothing_about_calls() -> None:
    health = UpstreamHealth("up")
    health.head_reported(2.0, 100.0)
    assert health.latency_s == pytest.approx(0.01)


# The breaker


def test_breaker_opens_after_a_run_of_failures_and_not_before() -> None:
    health = UpstreamHealth("up")
    for _ in range(FAILURES_IN_A_ROW - 1):
        health.failed(10.0)
    assert health.takes_calls(10.0)
    health.failed(10.0)
    assert not health.takes_calls(10.0)
    assert not health.takes_calls(10.0 + FIRST_PAUSE_S - 0.001)


def test_success_between_failures_keeps_it_closed() -> None:
    health = UpstreamHealth("up")
    for _ in range(10):
        for _ in range(FAILURES_IN_A_ROW - 1):
            health.failed(10.0)
        for _ in range(FAILURES_IN_A_ROW):
            health.succeeded(0.01)
    assert health.takes_calls(10.0)


def test_breaker_opens_when_most_calls_fail_although_never_many_in_a_row() -> None:
    health = UpstreamHealth("up")
    for step in range(200):
        if step % 4 == 3:
            health.succeeded(0.01)
        else:
            health.failed(10.0)
    assert not health.takes_calls(10.0)


def test_half_open_breaker_lets_one_trial_through_at_a_time() -> None:
    health = UpstreamHealth("up")
    break_open(health, 10.0)
    later = 10.0 + FIRST_PAUSE_S
    assert health.takes_calls(later)
    health.begin(later)
    assert not health.takes_calls(later)
    # A trial of which nothing is heard does not block for ever.
    assert health.takes_calls(later + 1.0)


def test_good_trial_closes_the_breaker() -> None:
    health = UpstreamHealth("up")
    break_open(health, 10.0)
    health.begin(11.0)
    health.succeeded(0.01)
    assert all(health.takes_calls(11.0) for _ in range(3))


def test_each_failed_trial_doubles_the_pause_up_to_the_longest() -> None:
    health = UpstreamHealth("up")
    now, pauses = 10.0, []
    break_open(health, now)
    for _ in range(9):
        pauses.append(health.paused_until - now)
        now = health.paused_until
        health.begin(now)
        health.failed(now)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]


def test_failures_of_calls_under_way_when_it_opened_do_not_double_the_pause() -> None:
    health = UpstreamHealth("up")
    for _ in range(100):
        health.failed(10.0)
    assert health.paused_until == 10.0 + FIRST_PAUSE_S


def test_next_fault_after_a_recovery_starts_with_the_shortest_pause() -> None:
    health = UpstreamHealth("up")
    break_open(health, 10.0)
    health.begin(11.0)
    health.failed(11.0)
    health.succeeded(0.01)
    break_open(health, 50.0)
    assert health.paused_until == 50.0 + FIRST_PAUSE_S


def test_call_that_another_answered_first_counts_as_failed_and_slow() -> None:
    health = UpstreamHealth("up")
    for _ in range(FAILURES_IN_A_ROW):
        health.late(0.06, 10.0)
    assert not health.takes_calls(10.0)
    assert health.latency_s > 0.02


def test_silent_upstream_that_speaks_again_is_tried_at_once() -> None:
    health = UpstreamHealth("up")
    break_open(health, 10.0)
    for second in range(11, 60):
        health.head_poll_failed(float(second))
    assert health.pause_s > 10.0
    health.head_reported(0.01, 60.0)
    assert health.takes_calls(60.0)
    health.begin(60.0)
    assert not health.takes_calls(60.0)


def test_upstream_that_only_fails_calls_is_not_tried_sooner_because_it_speaks() -> None:
    health = UpstreamHealth("up")
    break_open(health, 10.0)
    health.head_reported(0.01, 10.1)
    assert not health.takes_calls(10.1)


def test_silence_alone_opens_nothing() -> None:
    health = UpstreamHealth("up")
    for second in range(50):
        health.head_poll_failed(float(second))
    assert health.takes_calls(50.0)


# Rests and limits


@pytest.mark.parametrize(("asked_s", "given_s"), [(1.0, 1.0), (60.0, 60.0), (86_400.0, LONGEST_REST_S)])
def test_rest_that_an_upstream_asks_for_is_given_and_is_no_failure(asked_s: float, given_s: float) -> None:
    health = UpstreamHealth("up")
    health.rest(10.0, asked_s)
    assert not health.takes_calls(10.0 + given_s - 0.001)
    assert health.takes_calls(10.0 + given_s)
    assert (health.bad, health.failures_in_a_row, health.pause_s) == (0, 0, 0.0)


def test_shorter_rest_and_an_opened_breaker_do_not_cut_a_longer_rest_short() -> None:
    health = UpstreamHealth("up")
    health.rest(10.0, 20.0)
    health.rest(10.0, 1.0)
    break_open(health, 10.0)
    health.head_poll_failed(11.0)
    health.head_reported(0.01, 12.0)
    assert not health.takes_calls(29.9)
    assert health.takes_calls(30.0)


@pytest.mark.parametrize("rate", [0.5, 1.0, 10.0, 250.0])
def test_own_rate_limit_is_held_over_time_and_never_bars_for_good(rate: float) -> None:
    health = UpstreamHealth("up", rate=ProcessRate(rate))
    sent, now = 0, 100.0
    for _ in range(20_000):
        if health.takes_calls(now):
            health.begin(now)
            sent += 1
        now += 0.001
    assert 20 * rate * 0.95 <= sent <= 20 * rate + max(1.0, rate) + 1


def test_cordoned_upstream_takes_nothing() -> None:
    health = UpstreamHealth("up")
    health.cordon(cordoned=True, now=10.0)
    assert not health.takes_calls(10.0)
    assert not health.free


@pytest.mark.parametrize("standing", ["unchecked", "wrong_chain", "forked"])
def test_upstream_that_is_not_in_good_standing_takes_nothing(standing: Standing) -> None:
    health = UpstreamHealth("up")
    assert health.set_standing(standing, 10.0)
    assert not health.set_standing(standing, 10.0)
    assert not health.takes_calls(10.0)
    assert not health.free
    assert UpstreamGroup([health]).choose(10.0, "eth_call") is None
    health.cordon(cordoned=True, now=11.0)
    health.set_standing("good", 11.0)
    assert not health.takes_calls(11.0)
    health.cordon(cordoned=False, now=12.0)
    assert health.takes_calls(12.0)
    assert health.free


def test_short_way_is_closed_by_a_pause_a_rest_or_a_limit_and_opened_again_in_time() -> None:
    health, limited = UpstreamHealth("up"), UpstreamHealth("limited", rate=ProcessRate(5.0))
    assert health.free
    assert not limited.free
    health.rest(10.0, 2.0)
    assert not health.free
    health.refresh(11.9)
    assert not health.free
    health.refresh(12.0)
    assert not health.free  # calls keep its pace
    health.refresh(10.1 + PACED_S)
    assert health.free
    break_open(health, 80.0)
    health.refresh(80.0 + FIRST_PAUSE_S)
    assert not health.free  # half open: a trial goes the long way
    health.succeeded(0.01)
    health.refresh(81.0)
    assert health.free


# Eligible upstreams


def test_higher_tier_is_used_only_when_no_lower_one_can_be() -> None:
    of = group({}, {}, {"tier": 1}, {"tier": 9})
    assert set(chosen(of, 500)) == {"up0", "up1"}
    break_open(of.members[0], 100.0)
    assert chosen(of, 100) == {"up1": 100}
    assert set(chosen(of, 100, tried=0b0010)) == {"up2"}
    assert set(chosen(of, 100, tried=0b0110)) == {"up3"}
    assert chosen(of, tried=0b1110) == {"nobody": 1}


def test_method_lists_apply_even_when_no_other_upstream_is_left() -> None:
    of = group({"allow": ["eth_chainId"]}, {"deny": [METHOD]}, {"allow": [METHOD], "deny": []})
    assert chosen(of, 50) == {"up2": 50}
    assert chosen(of, tried=0b100) == {"nobody": 1}
    assert of.choose(100.0, "eth_chainId", tried=0b110) is of.members[0]


def test_upstreams_that_were_tried_are_passed_over() -> None:
    of = group({}, {}, {})
    assert set(chosen(of, 100, tried=0b001)) == {"up1", "up2"}
    assert chosen(of, 10, tried=0b101) == {"up1": 10}
    assert chosen(of, tried=0b111) == {"nobody": 1}


def test_head_is_a_wish_and_an_unknown_head_is_given_the_benefit_of_the_doubt() -> None:
    of = group({}, {}, {})
    for member, head in zip(of.members, (10, 9, 0), strict=True):
        member.head = head
    assert set(chosen(of, 200, head=10)) == {"up0", "up2"}
    assert set(chosen(of, 200, head=11)) == {"up2"}
    assert set(chosen(of, 200, head=11, tried=0b100)) == {"up0"}


def test_if_none_has_the_head_the_newest_ones_are_taken_and_no_impossible_one() -> None:
    of = group({}, {}, {}, {})
    for member, head in zip(of.members, (10, 10, 9, 1000), strict=True):
        member.head = head
    of.members[3].ahead = of.members[3].lagging = True
    assert set(chosen(of, 200, head=11)) == {"up0", "up1"}
    assert set(chosen(of, 200, head=11, tried=0b011)) == {"up2"}


def test_lagging_upstream_is_out_until_it_is_back_or_the_only_one() -> None:
    of = group({}, {})
    of.members[0].lagging = True
    assert chosen(of, 100) == {"up1": 100}
    assert chosen(of, 10, tried=0b10) == {"up0": 10}
    of.members[0].lagging = False
    assert set(chosen(of, 100)) == {"up0", "up1"}


def test_old_block_is_never_given_up() -> None:
    of = group({}, {"bounds": DataBounds({"state": -4, "blocks": 0})})
    state, blocks = DATA_INDEX["state"], DATA_INDEX["blocks"]
    of.members[0].lagging = True
    of.members[0].head, of.members[1].head = 5, 10
    assert chosen(of, 100, oldest=6, data=state, head=10) == {"up0": 100}
    assert chosen(of, 100, oldest=7, data=state, head=10) == {"up1": 100}
    assert chosen(of, 100, oldest=6, data=blocks) == {"up1": 100}
    assert chosen(of, 100, oldest=6, data=state, tried=0b01) == {"nobody": 100}


@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 2), st.integers(0, 12)), min_size=1, max_size=6),
    st.integers(0, 63),
    st.booleans(),
    st.integers(0, 12),
)
def test_upstream_is_chosen_exactly_when_one_is_left(
    members: list[tuple[bool, bool, int, int]], tried: int, is_old: bool, head: int
) -> None:
    of = group(*({"bounds": DataBounds({"blocks": 0 if all_ else 5}), "tier": tier} for _, all_, tier, _ in members))
    for member, (lagging, _, _, at) in zip(of.members, members, strict=True):
        member.lagging, member.head = lagging, at
    found = of.choose(100.0, METHOD, tried=tried, oldest=4 if is_old else -1, head=head)
    left = [
        member
        for member, (_, has_all, _, _) in zip(of.members, members, strict=True)
        if not tried >> member.index & 1 and (has_all or not is_old)
    ]
    assert (found in left) if left else found is None


# The budget


@pytest.mark.parametrize("calls", [0, 1, 100, 5000])
def test_extra_load_is_at_most_a_fifth_and_what_was_saved_at_first(calls: int) -> None:
    budget = RetryBudget()
    at_first = sum(budget.spend() for _ in range(1000))
    spent = 0
    for _ in range(calls):
        budget.earn()
        spent += budget.spend()
    assert at_first == 100
    assert spent <= 0.2 * calls
    assert spent >= int(0.2 * calls) - 1


def test_budget_saves_up_to_its_limit_and_no_more() -> None:
    budget = RetryBudget(most=50.0)
    for _ in range(10_000):
        budget.earn()
    assert sum(budget.spend() for _ in range(1000)) == 50


def test_client_that_spends_the_savings_leaves_the_others_their_own_retries() -> None:
    budget = RetryBudget()
    attacker = sum(budget.spend(10.0, f"attacker_{n % 7}") for n in range(10_000))
    assert attacker == 100 + 7 * OWN_RETRIES
    assert sum(budget.spend(10.0, "good") for _ in range(1000)) == OWN_RETRIES
    assert sum(budget.spend(11.0, "good") for _ in range(1000)) == OWN_RETRIES_PER_S
    assert not budget.spend(11.0)


# When another is asked as well


def served(health: UpstreamHealth, *seconds: float, times: int = 1) -> None:
    for _ in range(times):
        for each in seconds:
            health.succeeded(each)


def test_hedge_waits_for_the_ceiling_while_no_upstream_has_enough_samples() -> None:
    of = group({}, {})
    served(of.members[0], 0.001, times=ENOUGH_SAMPLES - 1)
    assert of.hedge_after_s(of.members[0]) == HEDGE_CEILING_S


def test_upstream_with_too_few_samples_is_measured_by_the_quickest_of_the_others() -> None:
    of = group({}, {}, {})
    served(of.members[1], 0.2, times=50)
    served(of.members[2], 0.09, times=50)
    assert of.hedge_after_s(of.members[0]) == 0.1


@pytest.mark.parametrize(
    ("usual_s", "rare_s", "after_s"),
    [(0.001, 0.001, HEDGE_FLOOR_S), (0.09, 0.09, 0.1), (0.001, 0.4, HEDGE_FLOOR_S), (30.0, 30.0, HEDGE_CEILING_S)],
)
def test_hedge_comes_after_all_but_a_twentieth_of_the_replies(usual_s: float, rare_s: float, after_s: float) -> None:
    of = group({}, {})
    served(of.members[0], *[usual_s] * 49, rare_s, times=4)
    assert of.hedge_after_s(of.members[0]) == after_s


def test_histogram_speaks_of_the_recent_past() -> None:
    health = UpstreamHealth("up")
    served(health, 0.001, times=FORGET_AT)
    served(health, 0.4, times=FORGET_AT)
    assert health.quantile_s(0.5) == 0.5
    assert health.latencies.samples <= FORGET_AT


# Blame


def test_failures_that_calls_may_have_caused_open_the_breaker_only_softly() -> None:
    health = UpstreamHealth("up")
    for _ in range(100):
        health.failed(10.0, by_call=True)
    assert not health.takes_calls(10.0)
    assert health.allows_fallback(10.0)
    health.succeeded(0.01)
    assert health.takes_calls(10.0)


@pytest.mark.parametrize("silent_first", [False, True])
def test_failed_calls_and_a_silent_probe_open_the_breaker_fully(silent_first: bool) -> None:
    health = UpstreamHealth("up")
    if silent_first:
        health.head_poll_failed(9.0)
    for _ in range(FAILURES_IN_A_ROW):
        health.failed(10.0, by_call=True)
    if not silent_first:
        health.head_poll_failed(10.1)
    assert not health.allows_fallback(10.1)


def test_refused_connection_is_not_a_clients_doing() -> None:
    health = UpstreamHealth("up")
    for _ in range(FAILURES_IN_A_ROW):
        health.failed(10.0)
    assert not health.allows_fallback(10.0)


def test_softly_opened_upstream_is_used_when_no_other_takes_calls() -> None:
    of = group({}, {})
    for _ in range(FAILURES_IN_A_ROW):
        of.members[0].failed(10.0, by_call=True)
    assert chosen(of, 50, now=10.0) == {"up1": 50}
    break_open(of.members[1], 10.0)
    found = of.choose(10.0, "eth_call")
    assert found is of.members[0]


@given(st.lists(st.sampled_from(["acc_1", "acc_1", "acc_1", "good"]), max_size=200))
def test_whatever_one_client_fails_the_others_are_served(calls: list[str]) -> None:
    """Every call of acc_1 fails and every other succeeds: in no order is the only upstream closed."""
    of, now = group({}), 10.0
    for client in calls:
        now += 0.05
        health = of.choose(now, "eth_call")
        assert health is not None
        health.begin(now)
        health.inflight -= 1
        if client == "good":
            health.succeeded(0.01)
        else:
            health.failed(now, by_call=True)


@pytest.mark.parametrize(("took_s", "late_s"), [(0.001, 0.05), (0.04, 0.08), (0.1, 0.2), (3.0, 1.0)])
def test_call_is_late_by_the_usual_latency_of_its_upstream(took_s: float, late_s: float) -> None:
    health = UpstreamHealth("up")
    assert health.late_after_s() == pytest.approx(0.05)
    for _ in range(500):
        health.succeeded(took_s)
    assert health.late_after_s() == pytest.approx(late_s)


def test_upstream_that_a_rule_gives_no_calls_is_forgiven_its_failures_while_polls_succeed() -> None:
    (health,) = healths({})
    rule = RoutingRule(number=1, above={"error_rate": 0.2})
    for _ in range(8):
        health.count_failure(0.0)
    assert steered([rule], [health], "") == (0, 1)
    health.judged(tuple(exclusions([rule], health, 0).values()))
    for poll in range(30):
        health.head_reported(0.01, float(poll))
    assert steered([rule], [health], "") == (0, 0)


def test_failures_of_calls_count_although_polls_succeed() -> None:
    (health,) = healths({})
    health.judged(("excluded by rule 1: 40% of its calls fail",))
    for poll in range(40):
        health.count_failure(float(poll))
        health.pause_s = 0.0
        health.head_reported(0.01, float(poll))
    assert health.failing_share > 0.8


# Cost


def priced(label: str, index: int, **prices: int) -> UpstreamHealth:
    meter = CreditMeter(label, "net", CallPrices(CreditTable(), "net", prices), Decimal("1"))
    return UpstreamHealth(label, index=index, meter=meter)


def test_cheapest_of_equally_fast_upstreams_is_taken() -> None:
    members = [priced("a", 0, eth_call=26, eth_getLogs=60), priced("b", 1, eth_call=80, eth_getLogs=20)]
    group = UpstreamGroup(members)
    assert {group.choose(0.0, "eth_call") for _ in range(20)} == {members[0]}
    assert {group.choose(0.0, "eth_getLogs") for _ in range(20)} == {members[1]}


def test_own_node_costs_nothing() -> None:
    members = [priced("a", 0, eth_call=1), UpstreamHealth("own", index=1)]
    group = UpstreamGroup(members)
    assert {group.choose(0.0, "eth_call") for _ in range(20)} == {members[1]}


def test_faster_upstream_is_taken_although_it_costs_more() -> None:
    members = [priced("fast", 0, eth_call=26), UpstreamHealth("own", index=1)]
    members[0].latency_s, members[1].latency_s = 0.01, 0.1
    assert UpstreamGroup(members).choose(0.0, "eth_call") is members[0]


def test_loaded_upstream_is_not_taken_because_it_is_cheap() -> None:
    members = [priced("dear", 0, eth_call=26), UpstreamHealth("own", index=1)]
    members[1].inflight = 5
    assert UpstreamGroup(members).choose(0.0, "eth_call") is members[0]


@pytest.mark.parametrize(
    ("policy", "own_s", "chosen"),
    [
        (CostPolicy(), 0.010, "own"),
        (CostPolicy(), 0.030, "paid"),
        (CostPolicy(equally_fast=4.0), 0.030, "own"),
        (CostPolicy(equally_fast=1.0), 0.011, "paid"),
        # A call costs 0.0026 cents: 26 ms at 10,000 ms for a cent.
        (CostPolicy(ms_per_cent=10_000), 0.030, "own"),
        (CostPolicy(ms_per_cent=10_000), 0.040, "paid"),
        (CostPolicy(ms_per_cent=100), 0.011, "paid"),
        (CostPolicy(ms_per_cent=100), 0.010, "own"),
    ],
)
def test_policy_says_how_much_latency_a_cent_is_worth(policy: CostPolicy, own_s: float, chosen: str) -> None:
    members = [priced("paid", 0, eth_call=26), UpstreamHealth("own", index=1)]
    members[0].latency_s, members[1].latency_s = 0.010, own_s
    group = UpstreamGroup(members, policy)
    assert {found.label for _ in range(20) if (found := group.choose(0.0, "eth_call"))} == {chosen}


def test_upstreams_of_one_price_share_calls_if_a_cent_is_worth_some_latency() -> None:
    members = [UpstreamHealth("one", index=0), UpstreamHealth("two", index=1), priced("paid", 2, eth_call=26)]
    members[1].latency_s = 0.011
    group = UpstreamGroup(members, CostPolicy(ms_per_cent=10_000))
    assert {found.label for _ in range(40) if (found := group.choose(0.0, "eth_call"))} == {"one", "two"}
