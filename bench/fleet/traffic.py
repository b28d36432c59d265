"""The chain and the webhook receiver around the fleet."""

from __future__ import annotations

import asyncio
import time

import aiohttp
from aiohttp import web

from bench.fleet.ledger import FleetLedger
from bench.fleet.programs import NETWORK
from tests.chain_upstream import LittleChain

BLOCK_S = 1.0


class FleetTraffic:
    """Blocks are mined, and an event of every block is received."""

    def __init__(self, chain: LittleChain, ledger: FleetLedger, *, port: int, key: str) -> None:
        self._chain = chain
        self._ledger = ledger
        self._base = f"http://127.0.0.1:{port}/v1"
        self._headers = {"X-API-Key": key}
        self._runner: web.AppRunner | None = None
        self.first_block = 0
        # Received blocks by hash, with their numbers.
        self.received: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<FleetTraffic {self._ledger.answered} calls, {len(self.received)} events>"

    async def open(self) -> None:
        """Receive events of all blocks from here on."""
        application = web.Application()
        application.router.add_post("/", self._receive)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        port = self._runner.addresses[0][1]
        self.first_block = self._chain.head + 1
        body = {"url": f"http://127.0.0.1:{port}/", "chain": NETWORK.partition("/")[0], "event_type": "NEW_BLOCK"}
        async with (
            aiohttp.ClientSession(headers=self._headers) as session,
            session.post(f"{self._base}/webhooks", json=body) as response,
        ):
            if response.status != 201:
                raise RuntimeError(f"the webhook was not created: {await response.text()}")

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _receive(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("type") == "NEW_BLOCK":
            self.received[body["data"]["blockHash"]] = body["data"]["blockNumber"]
        return web.Response()

    async def mine(self) -> None:
        while True:
            await asyncio.sleep(BLOCK_S)
            self._chain.mine(())

    async def event_after(self, block: int, within_s: float) -> bool:
        """Wait for the event of a later block."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            if any(number > block for number in self.received.values()):
                return True
            await asyncio.sleep(0.05)
        return False

    async def settle(self, within_s: float) -> None:
        """Wait for the events of all blocks that exist now, then compare them with the chain."""
        wanted = {block.hash for block in self._chain.blocks[self.first_block :]}
        end = time.monotonic() + within_s
        while wanted - self.received.keys() and time.monotonic() < end:  # noqa: ASYNC110 - as in `event_after`
            await asyncio.sleep(0.05)
        known = {block.hash for block in self._chain.blocks}
        self._ledger.expected = len(wanted)
        self._ledger.lost = len(wanted - self.received.keys())
        self._ledger.invented = len(self.received.keys() - known)
