"""An upstream of limited capacity: so many calls at a time, each for a fixed time. It finishes calls whose client has left."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tests.rpc_upstreams import Chain, ScriptedUpstream
from tests.socket_upstream import SocketServer

SERVICE_S = 0.2
CAPACITY = 16
# Calls of clients. Our own probes ask for other things and cost nothing.
WORK = ("eth_call", "eth_estimateGas")


class LimitedUpstream(ScriptedUpstream):
    def __init__(self, chain: Chain) -> None:
        super().__init__(chain)
        self.service_s = SERVICE_S
        self.capacity = asyncio.Semaphore(CAPACITY)
        # Calls that it has begun to work on, and the time that all of them took.
        self.worked = 0
        self.busy_s = 0.0
        self.in_flight = 0
        self.most_in_flight = 0

    async def _reply(self, call: dict[str, Any]) -> dict[str, Any]:
        if call["method"] not in WORK:
            return await super()._reply(call)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            async with self.capacity:
                began = time.monotonic()
                self.worked += 1
                await asyncio.sleep(self.service_s)
                self.busy_s += time.monotonic() - began
            return await super()._reply(call)
        finally:
            self.in_flight -= 1


class LimitedSocket(SocketServer, LimitedUpstream):
    """The same behind a WebSocket."""
