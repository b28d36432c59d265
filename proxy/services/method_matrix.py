"""Calls, errors and latencies by method and upstream, for operators.

The figures of a method are counted: they are the tallies that usage and metrics show too. Errors that the caller caused, such
as a revert, are kept apart from failures, which are ours or an upstream's. The share of each upstream is estimated from the
records of requests, so that counting costs calls nothing: failed and slow requests are recorded one by one, and a sampled one
stands for all that its account's plan has skipped. Without a sample of a method there is nothing to compare its failed requests
with, and no estimate. An estimate of few calls may be too high: parts that add up to more than the whole are scaled down.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxy.core.usage import BUCKETS, LATENCY_S, UsageStep, UsageSums, quantile_ms, step_start
from proxy.store.postgres.request_store import RequestStore
from proxy.store.postgres.usage import UsageStore

# Methods of each network that are listed, those with the most calls.
MOST_METHODS = 25
# Longer periods are added up from hours instead of minutes.
SHORT = datetime.timedelta(hours=1)


class SampledPlan(Protocol):
    @property
    def sample_every(self) -> int: ...


@dataclass(slots=True)
class MatrixCell:
    """One method on one upstream."""

    calls: int = 0
    failures: int = 0
    sampled: int = 0
    took: list[int] = field(default_factory=lambda: [0] * BUCKETS)

    def add(self, row: Mapping[str, Any]) -> None:
        self.calls += row["calls"]
        self.failures += row["failures"]
        self.sampled += row["sampled"]
        self.took[min(row["bucket"], BUCKETS - 1)] += row["calls"]

    def scale(self, factor: float) -> None:
        """Failures are recorded one by one, so there are at least as many calls."""
        self.calls = max(self.failures, round(self.calls * factor))

    @property
    def p50_ms(self) -> float | None:
        return quantile_ms(self.took, 0.5)

    @property
    def p99_ms(self) -> float | None:
        return quantile_ms(self.took, 0.99)


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """One method of a network: all its calls, and those of each upstream by its label."""

    calls: UsageSums
    cells: dict[str, MatrixCell]


# By network and method.
Matrix = dict[str, dict[str, MatrixRow]]


class MethodMatrix:
    def __init__(self, usage: UsageStore, records: RequestStore, plans: Mapping[str, SampledPlan]) -> None:
        self._usage = usage
        self._records = records
        self._sample_every = {name: plan.sample_every or 1 for name, plan in plans.items()}

    def __repr__(self) -> str:
        return f"<MethodMatrix {self._records!r}>"

    async def read(self, span: datetime.timedelta) -> Matrix:
        step: UsageStep = "minute" if span <= SHORT else "hour"
        since = step_start(datetime.datetime.now(datetime.UTC) - span, step)
        counted = await self._usage.methods(step, since)
        return matrix_of(counted, await self._records.count_attempts(since, self._sample_every, LATENCY_S))


def matrix_of(counted: Mapping[tuple[str, str], UsageSums], attempts: Iterable[Mapping[str, Any]]) -> Matrix:
    """The methods, with the busiest of each network first."""
    cells: dict[tuple[str, str], dict[str, MatrixCell]] = {}
    for row in attempts:
        of_method = cells.setdefault((row["network"], row["method"]), {})
        of_method.setdefault(row["upstream"], MatrixCell()).add(row)
    matrix: Matrix = {}
    for (network, method), calls in sorted(counted.items(), key=lambda item: (item[0][0], -item[1].requests)):
        methods = matrix.setdefault(network, {})
        if len(methods) < MOST_METHODS:
            estimated = cells.get((network, method), {})
            if (total := sum(cell.calls for cell in estimated.values())) > calls.requests:
                for cell in estimated.values():
                    cell.scale(calls.requests / total)
            is_estimated = any(cell.sampled for cell in estimated.values())
            methods[method] = MatrixRow(calls, estimated if is_estimated else {})
    return matrix
