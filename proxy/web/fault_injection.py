"""Carries out the fault plan (`core/fault_plans.py`) of a test key's request.

A plan can delay requests and replies, which are held in memory meanwhile. So the number of delayed requests is limited, in
total and per account, and a request whose client leaves is cancelled.
"""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import web

from proxy.core.directives import Directives
from proxy.core.fair_permits import FairPermits
from proxy.core.fault_plans import FaultPlan
from proxy.errors import Fault, RateLimited, Unavailable, UpstreamTimeout, of_status
from proxy.web.front.connection_limiter import ConnectionLimiter
from proxy.web.front.handler_connection import HandlerConnection
from proxy.web.reply import JSON

_MESSAGE = "injected by X-Fault"
# Pieces of a slow body that are sent per second.
PIECES_PER_S = 10
# A slow body is sent within this time, however large it is: it is held in memory until then.
LONGEST_BODY_S = 60
# Requests that are delayed at a time, in total and of one account. About 30 slow replies take a hundredth of a worker's time.
MOST_DELAYED, MOST_OF_ACCOUNT = 1024, 128


def plan_for(directives: Directives | None) -> FaultPlan | None:
    """The fault plan of this request, or None. A plan with `p` applies by chance."""
    plan = None if directives is None else directives.fault
    return plan if plan is not None and random.random() < plan.p else None


class FaultInjection:
    """The fault plans of a worker's requests."""

    def __init__(self, limiter: ConnectionLimiter) -> None:
        self._limiter = limiter
        self._delayed = FairPermits(MOST_DELAYED, per_client=MOST_OF_ACCOUNT)

    def __repr__(self) -> str:
        return f"<FaultInjection {len(self._delayed)} delayed requests>"

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
        """The reply with this body, with the faults of the plan."""
        if not plan.truncate and not plan.slow_body:
            return web.Response(body=body, status=status, content_type=JSON)
        reply = FaultyResponse(body, plan, request, status)
        if plan.slow_body:
            # Takes a place only: the memory of a large reply is counted elsewhere (`ReplyShare`).
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
        """Take a place for a request that is delayed, and the memory of its body."""
        if not self._delayed.take(account):
            if self._delayed.held_by(account):
                message = "X-Fault delays too many requests of this account: send fewer at once"
                raise RateLimited(message, retry_after_s=1)
            raise Unavailable("X-Fault delays too many requests at the moment: try again shortly")
        if refusal := self._limiter.take_body(account, size):
            self._delayed.give_back(account)
            raise refusal

    def _give_back(self, account: str, size: int) -> None:
        self._delayed.give_back(account)
        self._limiter.give_back_body(account, size)


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


class FaultyResponse(web.Response):
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
