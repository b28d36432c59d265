"""Several accounts together spoil nothing that all share: breakers, the retry budget, the size of batches."""

from __future__ import annotations

import random
from typing import Any

import orjson
import pytest
from aiohttp import web

from tests.http_client import rpc
from tests.isolation.attack import beside, steady_load
from tests.isolation.test_hostile_calls import hostile_call
from tests.isolation.upstreams import CrashingUpstream, GarbageUpstream, HostileAwareUpstream, StrictUpstream
from tests.rpc_harness import rpc_harness
from tests.rpc_upstreams import value_of
from tests.web.worker import on_uvloop

CALLS = 300
GOOD = {"to": "0x" + "11" * 20}


@pytest.mark.parametrize("kind", [CrashingUpstream, GarbageUpstream])
@on_uvloop
async def test_many_accounts_together_open_no_breaker(kind: type[HostileAwareUpstream]) -> None:
    rng = random.Random(kind.__name__)
    async with rpc_harness(1, kind=kind) as harness:
        accounts = [f"attacker{n}" for n in range(8)]
        for name in accounts:
            harness.worker.add_key(name)

        async def attack() -> None:
            async with await harness.worker.connect() as client:
                for name in accounts:
                    body = hostile_call(rng, well_formed=True)
                    await client.send(harness.worker.post(body, key=name))

        async with beside(attack, at_once=4):
            await steady_load(harness, CALLS)


class FlakyUpstream(CrashingUpstream):
    """Drops every call but those about the head, once it is broken."""

    is_broken = False

    async def _answer(self, request: web.Request) -> web.Response:
        if self.is_broken and b"eth_call" in await request.read():
            return self.reject(request, None)
        return await super()._answer(request)


@on_uvloop
async def test_key_that_spends_the_retry_budget_leaves_the_others_their_retries() -> None:
    async with rpc_harness(2, kind=FlakyUpstream) as harness:
        harness.worker.add_key("attacker")
        async with await harness.worker.connect() as client:
            for _ in range(150):
                await client.send(harness.worker.post(rpc("eth_call", [1]), key="attacker"))
        assert not harness.route.dispatcher.budget.spend()
        harness.upstreams[0].is_broken = True  # type: ignore[attr-defined]
        await steady_load(harness, 10, at_once=1)


class BatchRefusingUpstream(StrictUpstream):
    """Refuses a batch as a whole if one of its calls is invalid."""

    def reject(self, request: web.Request, body: Any) -> web.Response:
        return super().reject(request, body[0] if isinstance(body, list) else body)


@on_uvloop
async def test_refused_batch_of_one_key_leaves_the_batches_of_the_others_as_they_are() -> None:
    async with rpc_harness(1, kind=BatchRefusingUpstream) as harness:
        harness.worker.add_key("attacker")
        upstream = harness.upstreams[0]
        hostile = orjson.dumps([orjson.loads(rpc("eth_call", [n], id=n)) for n in range(20)])
        for _ in range(10):
            await harness.worker.send(hostile, key="attacker")
        before = upstream.requests
        calls = [("eth_call", [{**GOOD, "data": hex(n)}, "latest"]) for n in range(15)]
        reply = await harness.batch(*calls)
        assert [item["result"] for item in reply.json] == [value_of("eth_call", params) for _, params in calls]
        assert upstream.requests == before + 1
