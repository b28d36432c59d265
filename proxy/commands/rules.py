"""`upstreams rules`: replay the recorded health of upstreams against the routing rules of the settings."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from proxy.commands import context, output
from proxy.compose.credit_budgets import prices_of
from proxy.compose.networks import rules_of
from proxy.core.routing_rules import Figure, RoutingRule, effect_of
from proxy.errors import InvalidRequest
from proxy.settings import Settings, Tables
from proxy.settings.sections import UpstreamSettings
from proxy.store.postgres.upstream_samples import UpstreamSamples

COLUMNS = ("rule", "upstream", "effect", "times", "samples", "of", "last", "reason")
# Samples are kept for three days; there is one every 15 seconds or so.
MOST_HOURS, MOST_SAMPLES = 72, 1_000_000


@dataclass(frozen=True, slots=True)
class RuleSource:
    settings: Settings
    tables: Tables
    samples: UpstreamSamples


def add_rules(actions: Any) -> None:
    about = "show which upstreams the [[routing]] limits of the settings would have excluded lately"
    parser = context.add_action(actions, "rules", about, _replay, _source)
    parser.add_argument(
        "--hours", type=float, default=1.0, metavar="N", help="the last N hours, 72 at most (default: 1)"
    )


@asynccontextmanager
async def _source(args: argparse.Namespace) -> AsyncIterator[RuleSource]:
    async with context.opened(args) as (settings, pool):
        yield RuleSource(settings, context.tables_of(settings), UpstreamSamples(pool))


async def _replay(source: RuleSource, args: argparse.Namespace) -> None:
    if not 0 < args.hours <= MOST_HOURS:
        raise InvalidRequest(f"--hours must be above 0 and at most {MOST_HOURS}")
    if not any(rule.above for rule in source.settings.routing):
        raise InvalidRequest("no [[routing]] rule has limits: write them as above = { lag_blocks = 5 }")
    first = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=args.hours)
    samples = await source.samples.since(first, MOST_SAMPLES)
    output.rows([*_rows(source, samples)], COLUMNS, as_json=args.json)


def _rows(source: RuleSource, samples: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    known = _upstreams(source)
    for label, group in groupby(samples, itemgetter("label")):
        upstream_samples = [*group]
        if label in known:
            for rule in rules_of(source.settings.routing, upstream_samples[0]["network"]):
                labels, cost_usd = _facts(source, known[label], rule)
                if rule.above and labels.issuperset(rule.labels):
                    yield _row(rule, label, upstream_samples, labels, cost_usd)


def _row(
    rule: RoutingRule, label: str, samples: list[dict[str, Any]], labels: frozenset[str], cost_usd: float
) -> dict[str, Any]:
    reasons = [rule.exceeded(labels, _figures(sample, cost_usd)) for sample in samples]
    times = sum(bool(reason) and not before for reason, before in zip(reasons, ["", *reasons], strict=False))
    last = max((index for index, reason in enumerate(reasons) if reason), default=None)
    return {
        "rule": rule.number,
        "upstream": label,
        "effect": effect_of(rule),
        "times": times,
        "samples": sum(map(bool, reasons)),
        "of": len(samples),
        "last": None if last is None else samples[last]["at"],
        "reason": None if last is None else reasons[last],
    }


def _figures(sample: Mapping[str, Any], cost_usd: float) -> dict[Figure, float]:
    return {
        "lag_blocks": sample["lag_blocks"] or 0,
        "error_rate": sample["error_rate"] or 0.0,
        "latency_ms": sample["p50_ms"] or 0.0,
        "cost_usd": cost_usd,
    }


def _facts(source: RuleSource, given: UpstreamSettings, rule: RoutingRule) -> tuple[frozenset[str], float]:
    """Its labels, and the cost of the first method of the rule."""
    network = source.tables.find_network(given.network)
    assert network is not None  # The settings were validated.
    if not given.is_metered:
        return given.own_labels, 0.0
    prices, usd_per_million = prices_of(given, network, source.tables)
    credits_ = prices.credits(rule.methods[0] if rule.methods else "")
    return given.own_labels, float(credits_ * usd_per_million / 1_000_000)


def _upstreams(source: RuleSource) -> dict[str, UpstreamSettings]:
    """The upstreams of the settings, by label."""
    upstreams: dict[str, UpstreamSettings] = {}
    positions: dict[str, int] = {}
    for each in source.settings.upstreams:
        network = source.tables.find_network(each.network)
        assert network is not None  # The settings were validated.
        positions[network.id] = positions.get(network.id, 0) + 1
        upstreams[f"{network.id}#{each.name or positions[network.id]}"] = each
    return upstreams
