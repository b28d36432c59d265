"""The periodic work of a worker: deadlines of calls, the Date header, counts for metrics."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from proxy.core.routing import HEDGE_FLOOR_S
from proxy.services.fleet import UpstreamWatch
from proxy.services.rpc.networks import Networks
from proxy.services.usage import UsageService
from proxy.telemetry import Tallies
from proxy.web.front.front_context import FrontContext

# How often the deadlines and hedges of calls are checked, and whether another process has found a new head.
SWEEP_S = 0.02
# While no call is in flight, they are checked this often: the next call is not late before that.
IDLE_SWEEP_S = HEDGE_FLOOR_S
TALLY_S = 1.0


async def sweep(groups: Sequence[Networks], adopt_heads: Callable[[], None]) -> None:
    healths = [
        each.health for networks in groups for route in networks.routes.values() for each in route.every_upstream
    ]
    while True:
        await asyncio.sleep(SWEEP_S if any(health.inflight for health in healths) else IDLE_SWEEP_S)
        for networks in groups:
            networks.sweep()
        adopt_heads()


async def update_date(front: FrontContext) -> None:
    """Update the Date header at the start of every second."""
    while True:
        front.tick()
        await asyncio.sleep(1.0 - time.time() % 1.0)


async def write_counts(groups: Sequence[Networks], usage: UsageService, tallies: Tallies) -> None:
    """Write the counts once a second to the file that the supervisor reads."""
    directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    watch = UpstreamWatch(groups)
    while directory:
        await asyncio.sleep(TALLY_S)
        await usage.gather_in_steps()
        watch.observe()
        counts = [row for networks in groups for row in networks.counts()]
        tallies.write(Path(directory) / f"calls-{os.getpid()}.json", counts)
