"""A worker without calls does little."""

from __future__ import annotations

import asyncio
import time

from proxy.compose.worker_loops import IDLE_SWEEP_S, IDLE_TICK_S
from tests.service import until
from tests.web.worker import LIVE, Worker, on_uvloop, running_worker
from tests.wire.upstreams import Scripted, stub

IDLE_S = 1.5
# Each tick earns a fifth of a retry for an only upstream.
EARNED = 0.2


def retries(worker: Worker) -> int:
    """The retries that were saved. They are used up then."""
    budget, count = worker.app.networks.routes[LIVE].dispatcher.budget, 0
    while budget.spend():
        count += 1
    return count


@on_uvloop
async def test_upstreams_of_an_idle_worker_are_ticked_rarely() -> None:
    async with (
        Scripted(stub({"eth_blockNumber": "0x10", "eth_chainId": "0x1"})) as server,
        running_worker({LIVE: [{"url": server.url}]}) as worker,
    ):
        retries(worker)
        await asyncio.sleep(IDLE_S)
        # One more for the part of a retry that was left.
        assert retries(worker) <= EARNED * (IDLE_S / IDLE_TICK_S + 2) + 1
        upstream = worker.app.networks.routes[LIVE].upstreams[0]
        await until(lambda: time.monotonic() - upstream.now < 2 * IDLE_SWEEP_S)
