"""A subscription to new heads through the balancer, which reconnects and resumes: no head may be missing or come twice."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from bench.fleet.ledger import FleetLedger
from bench.fleet.programs import NETWORK

AGAIN_S = 0.2


class SocketWatch:
    def __init__(self, ledger: FleetLedger, *, port: int, key: str, first: int) -> None:
        """`first`: the number of the first head."""
        self._ledger = ledger
        self._url = f"ws://127.0.0.1:{port}/v1/ws/{NETWORK}?apiKey={key}"
        self._next = first

    def __repr__(self) -> str:
        return f"<SocketWatch before {self._next}>"

    async def run(self) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                try:
                    await self._follow(session)
                except (aiohttp.ClientError, OSError, TimeoutError):
                    pass
                self._ledger.reconnects += 1
                await asyncio.sleep(AGAIN_S)

    async def _follow(self, session: aiohttp.ClientSession) -> None:
        async with session.ws_connect(self._url, timeout=aiohttp.ClientWSTimeout(ws_close=1.0)) as socket:
            options = {"fromBlock": hex(self._next)}
            await socket.send_json(
                {"jsonrpc": "2.0", "id": 1, "method": "eth_subscribe", "params": ["newHeads", options]}
            )
            async for message in socket:
                self._note(message.json())

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("method") != "eth_subscription":
            return
        number = int(message["params"]["result"]["number"], 16)
        self._ledger.heads += 1
        self._ledger.gaps += number > self._next
        self._ledger.repeated += number < self._next
        self._next = number + 1
