"""Calls, errors and latencies by method and upstream, for operators.

They are estimated from the records of requests, so that counting costs calls nothing: failed and slow requests are recorded
one by one, and a sampled one stands for all that its account's plan has skipped.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxy.core.usage import BUCKETS, LATENCY_S, quantile_ms
from proxy.store.postgres.request_store import RequestStore

# Methods of each network that are listed, those with the most calls.
MOST_METHODS = 25


class SampledPlan(Protocol):
    @property
    def sample_every(self) -> int: ...


@dataclass(slots=True)
class MatrixCell:
    """One method on one upstream."""

    calls: int = 0
    errors: int = 0
    took: list[int] = field(default_factory=lambda: [0] * BUCKETS)

    def add(self, row: Mapping[str, Any]) -> None:
        self.calls += row["calls"]
        self.errors += row["errors"]
        self.took[min(row["bucket"], BUCKETS - 1)] += row["calls"]

    @property
    def p50_ms(self) -> float | None:
        return quantile_ms(self.took, 0.5)

    @property
    def p99_ms(self) -> float | None:
        return quantile_ms(self.took, 0.99)


# By network, method and upstream.
Matrix = dict[str, dict[str, dict[str, MatrixCell]]]


class MethodMatrix:
    def __init__(self, store: RequestStore, plans: Mapping[str, SampledPlan]) -> None:
        self._store = store
        self._sample_every = {name: plan.sample_every or 1 for name, plan in plans.items()}

    def __repr__(self) -> str:
        return f"<MethodMatrix {self._store!r}>"

    async def read(self, span: datetime.timedelta) -> Matrix:
        since = datetime.datetime.now(datetime.UTC) - span
        return matrix_of(await self._store.count_attempts(since, self._sample_every, LATENCY_S))


def matrix_of(rows: Iterable[Mapping[str, Any]]) -> Matrix:
    """The cells, with the busiest methods of each network first."""
    found: Matrix = {}
    for row in rows:
        methods = found.setdefault(row["network"], {})
        methods.setdefault(row["method"], {}).setdefault(row["upstream"], MatrixCell()).add(row)
    return {network: _busiest(methods) for network, methods in sorted(found.items())}


def _busiest(methods: dict[str, dict[str, MatrixCell]]) -> dict[str, dict[str, MatrixCell]]:
    def calls(name: str) -> int:
        return -sum(cell.calls for cell in methods[name].values())

    return {name: methods[name] for name in sorted(methods, key=calls)[:MOST_METHODS]}
