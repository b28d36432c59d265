"""Changes of an upstream's state: between two samples, and since the last one."""

from __future__ import annotations

import datetime
from typing import Any

from proxy.services.upstream_history import UpstreamHistory
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.upstream_samples import UpstreamSamples

REPORTED = {"breaker": "closed", "lag_blocks": 0, "error_rate": 0.0, "p50_ms": 1.0, "p99_ms": 2.0}


def upstream(state: str) -> dict[str, Any]:
    return {"id": "mark-1", "label": "test/changes#1", "state": state, "network": "test/changes", **REPORTED}


async def test_change_is_listed_before_it_is_sampled(pool: Pool) -> None:
    samples, now = UpstreamSamples(pool), datetime.datetime.now(datetime.UTC)
    state = "up"

    async def fleet() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        return [], [{"network": "test/changes", "upstreams": [upstream(state)]}]

    history = UpstreamHistory(samples, fleet, report_s=2.0)
    assert await history.changes() == []
    await samples.add(now - datetime.timedelta(seconds=15), [upstream("up")])
    assert await history.changes() == []
    state = "cordoned"
    (change,) = await history.changes()
    assert (change["upstream"], change["before"], change["state"]) == ("mark-1", "up", "cordoned")
    await samples.add(now, [upstream("cordoned")])
    (change,) = await history.changes()
    assert (change["before"], change["state"], change["at"]) == ("up", "cordoned", now)
