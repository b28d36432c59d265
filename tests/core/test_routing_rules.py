"""Rules that exclude upstreams by their figures."""

from __future__ import annotations

from decimal import Decimal

from proxy.core.credits import CallPrices, CreditMeter, CreditTable
from proxy.core.routing_rules import RoutingRule, exclusions, steered
from proxy.core.upstream_health import UpstreamHealth


def upstream(index: int = 0, *, head: int = 100, price: int = 0) -> UpstreamHealth:
    prices = CallPrices(CreditTable(default=price), "any")
    meter = CreditMeter("a", "b", prices, Decimal(1)) if price else None
    found = UpstreamHealth(f"a#{index}", index=index, labels=("region=eu",) if index else (), meter=meter)
    found.saw_head(head, 1.0)
    return found


def test_each_figure_above_its_limit_is_a_reason() -> None:
    found = upstream(1, head=86, price=100)
    found.latency_s, found.failing_share = 0.9, 0.25
    limits = {"lag_blocks": 13, "error_rate": 0.2, "latency_ms": 899, "cost_usd": 0.00009}
    rule = RoutingRule(number=3, above=limits)  # type: ignore[arg-type]
    assert exclusions([rule], found, 100) == {
        3: "excluded by rule 3: 14 blocks behind, 25% of its calls fail, a latency of 900 ms, a cost of 0.000100000 US dollars"
    }
    assert exclusions([rule], upstream(), 100) == {}


def test_value_at_the_limit_is_not_above_it() -> None:
    assert exclusions([RoutingRule(number=1, above={"lag_blocks": 14})], upstream(head=86), 100) == {}


def test_rule_excludes_or_puts_last_and_a_dry_run_does_neither() -> None:
    members = [upstream(0), upstream(1, head=90)]
    members[1].latency_s, members[1].failing_share = 0.2, 0.2
    for rule, expected in (
        (RoutingRule(number=1, above={"lag_blocks": 5}), (0b10, 0)),
        (RoutingRule(number=1, above={"lag_blocks": 5}, then="last"), (0, 0b10)),
        (RoutingRule(number=1, above={"lag_blocks": 5}, dry_run=True), (0, 0)),
        # Clients' calls can cause these, so calls that no other upstream takes are left to it.
        (RoutingRule(number=1, above={"error_rate": 0.1}), (0, 0b10)),
        (RoutingRule(number=1, above={"latency_ms": 100}), (0, 0b10)),
        (RoutingRule(number=1, above={"lag_blocks": 5, "error_rate": 0.1}), (0b10, 0)),
        (RoutingRule(number=1, above={"lag_blocks": 5}, labels=("region=us",)), (0, 0)),
        (RoutingRule(number=1, above={"lag_blocks": 5}, labels=("region=eu",)), (0b10, 0)),
        (RoutingRule(number=1, above={"lag_blocks": 5}, keys=("key_1",)), (0, 0)),
    ):
        assert steered([rule], members, "", tip=100) == expected, rule


def test_upstream_without_a_head_is_not_behind() -> None:
    assert exclusions([RoutingRule(number=1, above={"lag_blocks": 0})], upstream(head=0), 100) == {}
