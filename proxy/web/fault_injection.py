"""Carries out the fault plan (`core/fault_plans.py`) of a test key's request."""

from __future__ import annotations

import asyncio
import random

from aiohttp import web

from proxy.core.directives import Directives
from proxy.core.fault_plans import FaultPlan
from proxy.errors import Fault, RateLimited, Unavailable, UpstreamTimeout, of_status
from proxy.web.reply import JSON

_MESSAGE = "injected by X-Fault"
# Pieces of a slow body that are sent per second.
PIECES_PER_S = 10
# A slow body is sent within this time, however large it is: it is held in memory until then.
LONGEST_BODY_S = 60


def plan_for(directives: Directives | None) -> FaultPlan | None:
    """The plan that applies to this request, by chance where the plan says so."""
    plan = None if directives is None else directives.fault
    return plan if plan is not None and random.random() < plan.p else None


async def before(plan: FaultPlan, request: web.Request) -> None:
    """Delay or replace the request as the plan says. Raises the fault of the plan."""
    if plan.latency_ms:
        await asyncio.sleep(plan.latency_ms / 1000)
    if plan.reset:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(_MESSAGE)
    if plan.status:
        raise fault_of_status(plan.status)


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

    async def write_eof(self, data: bytes = b"") -> None:
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


def after(plan: FaultPlan, request: web.Request, body: bytes, *, status: int = 200) -> web.Response:
    """The reply with this body, spoiled as the plan says."""
    if plan.truncate or plan.slow_body:
        return SpoiledResponse(body, plan, request, status)
    return web.Response(body=body, status=status, content_type=JSON)
