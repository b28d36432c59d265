"""Many connections that send at the same moment: one turn of the loop serves few of them, and all are answered."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

from proxy.core.access import Limits
from proxy.web.front.front_connection import FrontConnection
from proxy.web.front.handler_connection import HandlerConnection
from tests.http_client import HttpClient, rpc
from tests.rpc_harness import rpc_harness
from tests.service import until
from tests.web.worker import Worker, on_uvloop, running_worker

CONNECTIONS = 40
GET = b"GET /healthz HTTP/1.1\r\nHost: penstock\r\n\r\n"


async def clients(found: Worker, stack: contextlib.AsyncExitStack) -> list[HttpClient]:
    return [await stack.enter_async_context(await found.connect()) for _ in range(CONNECTIONS)]


@on_uvloop
async def test_one_turn_starts_one_request_for_aiohttp() -> None:
    async with running_worker("http://127.0.0.1:1/") as worker, contextlib.AsyncExitStack() as stack:
        many = await clients(worker, stack)
        for client in many:
            assert (await client.send(GET)).status == 200
        connections = [each for each in worker.app.limiter.connections if isinstance(each, HandlerConnection)]
        assert len(connections) == CONNECTIONS
        for connection in connections:
            connection.data_received(GET)

        def left() -> int:
            return sum(connection._left for connection in connections)

        seen = [left()]
        while seen[-1] > seen[0] - CONNECTIONS:
            await asyncio.sleep(0)
            seen.append(left())
        assert max(before - after for before, after in itertools.pairwise(seen)) == 1
        for client in many:
            assert (await client.reply()).status == 200


@on_uvloop
async def test_requests_after_refused_ones_wait_for_their_turn() -> None:
    async with rpc_harness(1) as harness, contextlib.AsyncExitStack() as stack:
        harness.worker.add_key("attacker", limits=Limits(1, 1, 0))
        request = harness.worker.post(rpc("eth_chainId"), key="attacker")
        many = await clients(harness.worker, stack)
        statuses = [(await client.send(request)).status for client in many]
        refused = [client for client, status in zip(many, statuses, strict=True) if status == 429]
        assert len(refused) > CONNECTIONS // 2
        waiting = [each for each in harness.worker.app.limiter.connections if isinstance(each, FrontConnection)]
        for connection in waiting:
            connection.data_received(request)
        # They wait. None is served at once, except for those that were served before.
        turns = repr(harness.worker.app.limiter.turns)
        assert turns == f"<TurnQueue {len(refused)} steps of 1 clients>"
        for client in many:
            assert (await client.reply()).status in (200, 429)


@on_uvloop
async def test_clients_behind_a_trusted_proxy_have_a_place_each() -> None:
    server = {"trusted_proxies": ["127.0.0.1/32"]}
    async with running_worker("http://127.0.0.1:1/", server=server) as worker, contextlib.AsyncExitStack() as stack:
        many = await clients(worker, stack)
        requests = [
            GET.replace(b"Host:", b"X-Forwarded-For: 203.0.113.%d\r\nHost:" % (n % 2)) for n in range(CONNECTIONS)
        ]
        for _ in range(2):  # A connection starts on the hot path, and stays with aiohttp.
            await until(lambda: len(worker.app.limiter.connections) == CONNECTIONS)
            for connection, request in zip(tuple(worker.app.limiter.connections), requests, strict=True):
                assert isinstance(connection, FrontConnection | HandlerConnection)
                connection.data_received(request)
            assert repr(worker.app.turns) == f"<TurnQueue {CONNECTIONS} steps of 2 clients>"
            for client in many:
                assert (await client.reply()).status == 200
