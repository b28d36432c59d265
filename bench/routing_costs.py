"""Measures the savings of choosing by price: a day's calls on an own node and three providers, in virtual time, chosen by price
among those that are equally fast, and by latency alone.

The day is a captured one (`penstock capture`), if PENSTOCK_CAPTURED_DAY names its file. Otherwise it is made up: methods in the
shares of a wallet's and an indexer's calls, and half as many calls at night as at noon. The own node serves AT_ONCE calls at a
time, so that the day's peak needs the providers.
"""

import heapq
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path

from bench.cases import LATENCY_ONLY
from proxy.commands.capture_file import read_capture
from proxy.compose.credit_budgets import prices_of
from proxy.core.credits import NANOS_PER_USD, CreditMeter
from proxy.core.routing import UpstreamGroup
from proxy.core.upstream_health import UpstreamHealth
from proxy.settings import load_tables
from proxy.settings.sections import UpstreamSettings

FIGURES = {"cost": "US$ per million calls", "p99": "ms"}
CALLS = 100_000
NETWORK = "ethereum/mainnet"
# The median latency of each upstream. The own node has no price.
LATENCIES_MS = {"own": 30.0, "alchemy": 28.0, "infura": 32.0, "quicknode": 26.0}
SPREAD = 0.35
# Calls that the own node works on at a time. Further ones wait.
AT_ONCE = 12
MIX = {
    "eth_call": 40, "eth_getBalance": 12, "eth_getTransactionReceipt": 10, "eth_getLogs": 8, "eth_getBlockByNumber": 8,
    "eth_blockNumber": 8, "eth_getTransactionByHash": 6, "eth_estimateGas": 4, "debug_traceTransaction": 2, "eth_feeHistory": 2,
}  # fmt: skip
# Calls per second on average, in a day that is squeezed so that breakers, samples and histograms see a usual rate.
PER_SECOND = 400.0
REFRESH_S = 0.5


def rounds(count: int) -> dict[str, dict[str, list[float]]]:
    """By figure and kind of choice: a value per round."""
    found: dict[str, dict[str, list[float]]] = {figure: {LATENCY_ONLY: [], "penstock": []} for figure in FIGURES}
    for seed in range(count):
        for kind in (LATENCY_ONLY, "penstock"):
            cost, p99 = _day(random.Random(seed), by_price=kind == "penstock")
            found["cost"][kind].append(cost)
            found["p99"][kind].append(p99)
    return found


def _calls(chance: random.Random) -> Iterator[tuple[float, str]]:
    """When each call arrives, and its method."""
    if file := os.environ.get("PENSTOCK_CAPTURED_DAY"):
        for call in read_capture(Path(file), NETWORK):
            yield call.at_ms / 1000, call.method
        return
    methods = chance.choices([*MIX], weights=[*MIX.values()], k=CALLS)
    now, length_s = 0.0, CALLS / PER_SECOND
    for method in methods:
        rate = PER_SECOND * (1.0 - 0.34 * math.cos(2 * math.pi * now / length_s))
        now += chance.expovariate(rate)
        yield now, method


def _day(chance: random.Random, *, by_price: bool) -> tuple[float, float]:
    """The cost of a million calls in US dollars, and the p99 in milliseconds."""
    tables = load_tables()
    network = tables.find_network(NETWORK)
    assert network is not None
    healths, meters = [], list[CreditMeter | None]()
    for index, name in enumerate(LATENCIES_MS):
        meter = None
        if name != "own":
            given = UpstreamSettings(url="https://example.com", network=NETWORK, cost=name)
            meter = CreditMeter(name, NETWORK, *prices_of(given, network, tables))
        meters.append(meter)
        healths.append(UpstreamHealth(name, index=index, meter=meter if by_price else None))
    return _simulate(chance, UpstreamGroup(healths), meters)


def _simulate(chance: random.Random, group: UpstreamGroup, meters: list[CreditMeter | None]) -> tuple[float, float]:
    medians = [*LATENCIES_MS.values()]
    free_at = [0.0] * AT_ONCE  # When each of the own node's places is free.
    under_way: list[tuple[float, int, float]] = []
    took: list[float] = []
    nanos, refreshed_at = 0, 0.0
    for now, method in _calls(chance):
        while under_way and under_way[0][0] <= now:
            _, index, latency_s = heapq.heappop(under_way)
            group.members[index].ended()
            group.members[index].succeeded(latency_s)
        if now - refreshed_at >= REFRESH_S:
            refreshed_at = now
            for member in group.members:
                member.refresh(now)
        chosen = group.choose(now, method)
        assert chosen is not None
        chosen.begin(now)
        latency_s = medians[chosen.index] / 1000 * chance.lognormvariate(0.0, SPREAD)
        meter = meters[chosen.index]
        if meter is None:
            began = max(now, heapq.heappop(free_at))
            heapq.heappush(free_at, began + latency_s)
            latency_s += began - now
        else:
            nanos += meter.cost_of(method)
        heapq.heappush(under_way, (now + latency_s, chosen.index, latency_s))
        took.append(latency_s)
    took.sort()
    return nanos / NANOS_PER_USD / len(took) * 1e6, took[int(len(took) * 0.99)] * 1000
