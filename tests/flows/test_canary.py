"""An upstream on trial is promoted by steps, falls back when a reply differs, and every step is in the log of actions."""

from __future__ import annotations

import asyncio
from typing import Any

from proxy.core.canary import ENOUGH_READS
from proxy.services.canaries import OPERATION, CanaryWatch
from proxy.store.postgres.actions import ActionFilter, ActionStore
from proxy.store.postgres.fleet import FleetStore
from tests.database import connected
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.service import until
from tests.web.worker import on_uvloop

CANARY = {"name": "new", "shadow": 1.0, "canary": True, "requests_per_second": 100_000}


class Promotion:
    """A worker with one upstream in use, and one that can be promoted."""

    def __init__(self, harness: RpcHarness) -> None:
        app = harness.worker.app
        self.harness = harness
        self.store = FleetStore(app.pool)
        self.fleet, self.actions = app.dashboard.fleet, app.dashboard.actions
        self.watch = CanaryWatch(self.store, ActionStore(app.pool), step_s=0.0)
        (self.shadow,) = harness.route.shadows
        self.health = self.shadow.upstream.health
        self.number = 0
        self.results: list[Any] = []

    async def read(self, count: int, *, at_once: int = 1) -> int:
        """Make reads, and return how many of them the canary answered."""
        second = self.harness.upstreams[1]
        before, tried = second.count("eth_getBalance"), self.shadow.trial.total.reads
        for _ in range(0, count, at_once):
            await asyncio.gather(*(self._read_one() for _ in range(at_once)))
        await until(lambda: not self.shadow._queue and not self.health.inflight)
        return second.count("eth_getBalance") - before - (self.shadow.trial.total.reads - tried)

    async def _read_one(self) -> None:
        self.number += 1
        self.results.append(await self.harness.result("eth_getBalance", [f"0x{self.number:040x}", hex(900)]))

    async def step(self) -> float:
        """Report what was read, and let the canary take a step."""
        await self.fleet._report()
        await self.watch.check()
        await self.fleet.cordons.refresh()
        return self.health.share

    async def log(self) -> list[tuple[float, float]]:
        found, _ = await self.actions.search(ActionFilter(action=OPERATION), 50)
        return [(row["before"]["share"], row["after"]["share"]) for row in reversed(found)]


def test_canary_rises_to_its_share_and_falls_when_a_reply_differs(database: str) -> None:
    @on_uvloop
    async def main() -> None:
        options: list[dict[str, Any]] = [{}, CANARY]
        sections: dict[str, Any] = {"cache": {"enabled": False}, "database": {"url": database}}
        async with connected(database), rpc_harness(2, options=options, **sections) as harness:
            await harness.worker.app.pool.open()
            await harness.look()
            promotion = Promotion(harness)
            assert await promotion.read(ENOUGH_READS) == 0, "it is on trial"
            assert await promotion.step() == 0.0, "only an operator can begin"
            await promotion.fleet.promote(promotion.health.upstream_id, by="ops", anyway=True)
            assert promotion.health.share == 0.01
            for share in (0.05, 0.25, 1.0):
                taken = await promotion.read(ENOUGH_READS + 20 + int(300 * promotion.health.share))
                assert taken <= 2 + 600 * promotion.health.share
                assert await promotion.step() == share
            assert await promotion.read(100, at_once=20) > 0, "calls at the same time go to both"
            harness.upstreams[1].answers["eth_getBalance"] = lambda _: "0xbad"
            await promotion.read(50)
            assert await promotion.step() == 0.0
            promotion.results.clear()
            await promotion.read(20)
            assert "0xbad" not in promotion.results
            assert await promotion.log() == [(0.01, 0.05), (0.05, 0.25), (0.25, 1.0), (1.0, 0.0)]

    main()
