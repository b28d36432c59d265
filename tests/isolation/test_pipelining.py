"""Many requests sent ahead on one connection: they are answered in order, and nobody else pays for them."""

from __future__ import annotations

import asyncio

import pytest

from proxy.core.access import Limits
from proxy.web.front.front_connection import MAX_AHEAD, FrontConnection
from tests.http_client import rpc
from tests.isolation.attack import beside, steady_load
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.web.worker import on_uvloop

CALLS = 200
REQUESTS = 20_000
# The bytes that a transport reads at once.
ONE_READ = 262_144
BODIES = {
    "limited": rpc("eth_chainId"),
    "unknown method": rpc("eth_nope"),
    "malformed": b'{"jsonrpc":"2.0","id":1,"method":"eth_chainId","params":{}}',
    "cached": rpc("eth_getBlockByNumber", ["0x1", False]),
}


def bytes_ahead(harness: RpcHarness) -> int:
    fronts = [each for each in harness.worker.app.limiter.connections if isinstance(each, FrontConnection)]
    return max([front.bytes_ahead for front in fronts], default=0)


@pytest.mark.parametrize("kind", BODIES)
@on_uvloop
async def test_requests_with_immediate_replies_are_read_no_further_ahead_than_others(kind: str) -> None:
    most = 0
    async with rpc_harness(1) as harness:
        harness.worker.add_key("attacker", limits=Limits(1, 10, 0))
        request = harness.worker.post(BODIES[kind], key="attacker")

        async def attack() -> None:
            nonlocal most
            async with await harness.worker.connect() as client, asyncio.TaskGroup() as group:
                sending = group.create_task(client.write(request * REQUESTS))
                while await client.reader.read(1 << 20) and not sending.done():
                    most = max(most, bytes_ahead(harness))

        async with beside(attack):
            await steady_load(harness, CALLS)
    assert 0 < most <= MAX_AHEAD + ONE_READ


@on_uvloop
async def test_one_turn_serves_few_requests_of_a_connection() -> None:
    """However often the transport delivers: the chains of turns that serve them do not multiply."""
    async with rpc_harness(1) as harness, await harness.worker.connect() as client:
        await client.send(harness.worker.post(rpc("eth_nope")))
        front = harness.worker.only_connection
        assert isinstance(front, FrontConnection)
        request = harness.worker.post(rpc("eth_nope"))
        for _ in range(20):
            front.data_received(request * 10)
        assert repr(harness.worker.app.limiter.turns) == "<TurnQueue 1 steps of 1 clients>"
        for _ in range(200):
            assert (await client.reply()).json["error"]["code"] == -32601
        assert not front.bytes_ahead
