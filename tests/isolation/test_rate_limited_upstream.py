"""An only upstream that answers 429 with Retry-After: its capacity is used, and it is not hammered."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from aiohttp import web

from tests.http_client import Reply
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import ScriptedUpstream
from tests.web.worker import NO_CACHE, on_uvloop

RATE = 10


class RateLimitedUpstream(ScriptedUpstream):
    """Answers so many requests per second, and the others with a 429."""

    is_on = False
    per_second = RATE
    wait = "5"
    # How long it refuses everything after a 429.
    banned_s = 0.0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.edge = self.banned_until = 0.0
        self.answered = self.refused = 0
        self.application.middlewares.append(self._limit)

    @web.middleware
    async def _limit(self, request: web.Request, handler: Any) -> web.StreamResponse:
        now = time.monotonic()
        edge = max(self.edge, now - 1.0) + 1.0 / self.per_second
        if self.is_on and (edge > now or now < self.banned_until):
            self.refused += 1
            if now >= self.banned_until:
                self.banned_until = now + self.banned_s
            return web.Response(status=429, text="slow down", headers={"Retry-After": self.wait})
        self.edge = edge
        self.answered += 1
        reply: web.StreamResponse = await handler(request)
        return reply


async def load(harness: RpcHarness, calls: int, *, over_s: float, key: str = "main") -> list[Reply]:
    async def call(number: int) -> Reply:
        await asyncio.sleep(over_s * number / calls)
        return await harness.call("eth_call", [{"data": f"{key}{number}"}, "latest"], key=key)

    return await asyncio.gather(*(call(number) for number in range(calls)))


def limited(harness: RpcHarness) -> RateLimitedUpstream:
    (upstream,) = harness.upstreams
    assert isinstance(upstream, RateLimitedUpstream)
    upstream.is_on = True
    upstream.answered = upstream.refused = 0
    return upstream


@on_uvloop
async def test_as_many_calls_are_answered_as_the_upstream_answers() -> None:
    async with rpc_harness(1, kind=RateLimitedUpstream, **NO_CACHE) as harness:
        upstream = limited(harness)
        began = time.monotonic()
        replies = await load(harness, 300, over_s=6.0)
        took_s = time.monotonic() - began
        answered = [reply for reply in replies if reply.status == 200]
        assert {reply.status for reply in replies} == {200, 503}
        assert len(answered) >= RATE * 6 * 0.5
        # The calls that were under way at the first 429, and few after it.
        assert upstream.refused <= 20 + 2 * took_s


@pytest.mark.parametrize("banned_s", [1.5, 5.0])
@on_uvloop
async def test_upstream_that_refuses_everything_for_a_while_gets_few_calls(banned_s: float) -> None:
    async with rpc_harness(1, kind=RateLimitedUpstream, **NO_CACHE) as harness:
        upstream = limited(harness)
        upstream.banned_s = banned_s
        await load(harness, 12, over_s=0.0)
        first = upstream.refused
        replies = await load(harness, 200, over_s=banned_s - 0.2)
        assert upstream.refused - first <= 8
        assert banned_s > 2.0 or [reply for reply in replies if reply.status == 200]


@on_uvloop
async def test_burst_above_the_rate_waits_for_it() -> None:
    async with rpc_harness(1, kind=RateLimitedUpstream, **NO_CACHE) as harness:
        limited(harness)
        replies = await load(harness, 2 * RATE, over_s=0.0)
        assert [reply.status for reply in replies] == [200] * 2 * RATE


@on_uvloop
async def test_accounts_take_turns_at_an_upstream_that_limits_the_rate() -> None:
    async with rpc_harness(1, kind=RateLimitedUpstream, **NO_CACHE) as harness:
        harness.worker.add_key("greedy")
        limited(harness)
        greedy = asyncio.get_running_loop().create_task(load(harness, 400, over_s=4.0, key="greedy"))
        await asyncio.sleep(1.0)
        replies = await load(harness, 6, over_s=2.4)
        assert [reply.status for reply in replies] == [200] * 6
        await greedy
