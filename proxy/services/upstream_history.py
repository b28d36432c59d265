"""The health of upstreams over time, for operators: sampled from what all workers report.

Every worker checks whether the current moment has been sampled; the first one to find that it has not writes the samples of all
upstreams. A change of state is a difference between two samples, or between the last one and what the workers report now.
"""

from __future__ import annotations

import asyncio
import datetime
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from proxy.errors import InvalidRequest, Unavailable
from proxy.store.postgres.upstream_samples import UpstreamSamples

# Points of one chart.
MOST_POINTS = 240
# Changes of state that are listed.
MOST_CHANGES = 100
# Samples are rarer than reports of the workers by this factor.
REPORTS_PER_SAMPLE = 7.5
# Reads the views of all workers, and the networks merged from them.
FleetReader = Callable[[], Awaitable[tuple[list[dict[str, Any]], list[dict[str, Any]]]]]


class UpstreamHistory:
    def __init__(self, samples: UpstreamSamples, fleet: FleetReader, *, report_s: float) -> None:
        self._samples = samples
        self._fleet = fleet
        self._sample_s = report_s * REPORTS_PER_SAMPLE

    def __repr__(self) -> str:
        return f"<UpstreamHistory every {self._sample_s} s>"

    async def run(self) -> None:
        """Supervised loop."""
        while True:
            await asyncio.sleep(self._sample_s)
            try:
                await self._sample(_moment(math.floor(time.time() / self._sample_s) * self._sample_s))
            except Unavailable:
                pass

    async def _sample(self, moment: datetime.datetime) -> None:
        if await self._samples.has(moment):
            return
        _, networks = await self._fleet()
        upstreams = [{**each, "network": network["network"]} for network in networks for each in network["upstreams"]]
        if upstreams:
            await self._samples.add(moment, upstreams)

    async def read(
        self, upstream: str, first: datetime.datetime, last: datetime.datetime
    ) -> tuple[float, list[dict[str, Any]]]:
        """The seconds between two points of a chart, and the points."""
        span_s = (last - first).total_seconds()
        if span_s <= 0:
            raise InvalidRequest("parameter 'to': must be after 'from'", param="to")
        step_s = max(self._sample_s, span_s / MOST_POINTS)
        return step_s, await self._samples.read(upstream, first, last, step_s=step_s)

    async def changes(self) -> list[dict[str, Any]]:
        """Changes of state in the last day, newest first. Those since the last sample count from now."""
        sampled = await self._samples.last_states()
        _, networks = await self._fleet()
        now = datetime.datetime.now(datetime.UTC)
        new = [
            _change(network["network"], each, sampled[each["id"]], now)
            for network in networks
            for each in network["upstreams"]
            if sampled.get(each["id"], each["state"]) != each["state"]
        ]
        return [*new, *await self._samples.changes(MOST_CHANGES)][:MOST_CHANGES]


def _change(network: str, upstream: Mapping[str, Any], before: str, at: datetime.datetime) -> dict[str, Any]:
    return {
        "upstream": upstream["id"],
        "network": network,
        "label": upstream["label"],
        "at": at,
        "before": before,
        "state": upstream["state"],
    }


def _moment(unix: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(unix, datetime.UTC)
