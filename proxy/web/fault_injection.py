"""Carries out the fault plan (`core/fault_plans.py`) of a test key's request.

A plan can delay requests and their replies, which are held in memory meanwhile. So an account may have a limited number of them
at a time, and a request whose client leaves is given up.
"""

from __future__ import annotations

import asyncio
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import web

from proxy.core.directives import Directives
from proxy.core.fault_plans import FaultPlan
from proxy.errors import Fault, RateLimited, Unavailable, UpstreamTimeout, of_status
from proxy.web.front.handler_connection import HandlerConnection
from proxy.web.reply import JSON

_MESSAGE = "injected by X-Fault"
# Pieces of a slow body that are sent per second.
PIECES_PER_S = 10
# A slow body is sent within this time, however large it is: it is held in memory until then.
LONGEST_BODY_S = 60
# Requests of one account that are delayed at a time, and the bytes of their bodies. A slow reply takes a hundredth of a
# worker's time for about 30 of them.
MOST_DELAYED, MOST_DELAYED_BYTES = 128, 16 << 20
# The same bounds for all accounts of the worker are so many times as large.
ACCOUNTS = 8


def plan_for(directives: Directives | None) -> FaultPlan | None:
    """The plan that applies to this request, by chance where the plan says so."""
    plan = None if directives is None else directives.fault
    return plan if plan is not None and random.random() < plan.p else None


class FaultInjection:
    """The fault plans of a worker's requests."""

    def __init__(self) -> None:
        # The delayed requests of each account, and the bytes of their bodies.
        self._delayed: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<FaultInjection {self._delayed.total()} delayed requests with {self._bytes.total()} bytes>"

    async def before(self, plan: FaultPlan, request: web.Request, account: str) -> None:
        """Delay or replace the request as the plan says. Raises the fault of the plan."""
        if plan.latency_ms:
            with self._delay(account, request.content.total_bytes):
                await _sleep(plan.latency_ms / 1000, request)
        if plan.reset:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError(_MESSAGE)
        if plan.status:
            raise fault_of_status(plan.status)

    def after(
        self, plan: FaultPlan, request: web.Request, account: str, body: bytes, *, status: int = 200
    ) -> web.Response:
        """The reply with this body, spoiled as the plan says."""
        if not plan.truncate and not plan.slow_body:
            return web.Response(body=body, status=status, content_type=JSON)
        reply = SpoiledResponse(body, plan, request, status)
        if plan.slow_body:
            # A large body has its own share of the memory for replies.
            self._take(account, 0)
            reply.on_written = weakref.finalize(reply, self._give_back, account, 0)
        return reply

    @contextmanager
    def _delay(self, account: str, size: int) -> Iterator[None]:
        self._take(account, size)
        try:
            yield
        finally:
            self._give_back(account, size)

    def _take(self, account: str, size: int) -> None:
        """Take a place for a request that is delayed. An account's only one always has a place of its own."""
        count, held = self._delayed[account], self._bytes[account] + size
        if count and (count >= MOST_DELAYED or held > MOST_DELAYED_BYTES):
            raise RateLimited("X-Fault delays too many requests of this account: send fewer at once", retry_after_s=1)
        total, total_bytes = self._delayed.total(), self._bytes.total() + size
        if total >= ACCOUNTS * MOST_DELAYED or total_bytes > ACCOUNTS * MOST_DELAYED_BYTES:
            raise Unavailable("X-Fault delays too many requests at the moment: try again shortly")
        self._delayed[account] += 1
        self._bytes[account] += size

    def _give_back(self, account: str, size: int) -> None:
        self._delayed[account] -= 1
        self._bytes[account] -= size
        if not self._delayed[account]:
            del self._delayed[account], self._bytes[account]


async def _sleep(seconds: float, request: web.Request) -> None:
    """Wait for the delay of a request. aiohttp does not cancel the handler of a client that leaves meanwhile."""
    connection, loop = request.protocol, asyncio.get_running_loop()
    if not isinstance(connection, HandlerConnection):
        await asyncio.sleep(seconds)
        return
    slept: asyncio.Future[None] = loop.create_future()
    timer = loop.call_later(seconds, slept.set_result, None)
    connection.on_lost = slept.cancel
    try:
        await slept
    finally:
        timer.cancel()
        connection.on_lost = None


def fault_of_status(status: int) -> Fault:
    match status:
        case 429:
            return RateLimited(_MESSAGE, retry_after_s=1)
        case 503:
            return Unavailable(_MESSAGE)
        case 504:
            return UpstreamTimeout(_MESSAGE)
        case _:
            return of_status(status, _MESSAGE)


class SpoiledResponse(web.Response):
    """A reply whose body is cut off or sent slowly."""

    def __init__(self, body: bytes, plan: FaultPlan, request: web.Request, status: int) -> None:
        super().__init__(body=body, status=status, content_type=JSON)
        self._plan = plan
        self._asked = request
        # Called when the body is written, or its client has left.
        self.on_written: Callable[[], object] | None = None

    async def write_eof(self, data: bytes = b"") -> None:
        try:
            await self._write_slowly()
        finally:
            if self.on_written is not None:
                self.on_written()

    async def _write_slowly(self) -> None:
        body = self.body if isinstance(self.body, bytes) else b""
        end = len(body) // 2 if self._plan.truncate else len(body)
        slowest = end // (LONGEST_BODY_S * PIECES_PER_S)
        size = max(1, self._plan.slow_body // PIECES_PER_S, slowest) if self._plan.slow_body else max(1, end)
        for start in range(0, end, size):
            if start:
                await asyncio.sleep(1 / PIECES_PER_S)
            await web.StreamResponse.write(self, body[start : min(start + size, end)])
        if self._plan.truncate and self._asked.transport is not None:
            self._asked.transport.close()
            raise ConnectionResetError(_MESSAGE)
        await web.StreamResponse.write_eof(self)
