"""More calls than an upstream can take: it stays busy with calls that are answered, and no account crowds out another."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import pytest

from proxy.wire.upstream import CROWDED
from tests.http_client import HttpClient, Reply, rpc
from tests.isolation.limited_upstream import CAPACITY, LimitedSocket, LimitedUpstream
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.service import until
from tests.web.worker import NO_CACHE, on_uvloop

# All clients together send four times as many calls as the upstream can answer.
CLIENTS = 16 * CAPACITY
EVERY_S = 0.8

_serial = itertools.count()


class Flood:
    """Calls at a steady rate, and their replies."""

    def __init__(self, harness: RpcHarness, key: str) -> None:
        self._harness = harness
        self._key = key
        self.replies: list[Reply] = []
        self.ended = asyncio.Event()

    @property
    def counts(self) -> Counter[int]:
        return Counter(reply.status for reply in self.replies)

    async def send(self, offset_s: float) -> None:
        await asyncio.sleep(offset_s)
        async with await self._harness.worker.connect() as client:
            while not self.ended.is_set():
                due = time.monotonic() + EVERY_S
                self.replies.append(await send_call(self._harness, client, self._key))
                await asyncio.sleep(max(0.0, due - time.monotonic()))


@asynccontextmanager
async def flood_of(harness: RpcHarness, key: str = "main", *, clients: int = CLIENTS) -> AsyncIterator[Flood]:
    flood = Flood(harness, key)
    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(flood.send(EVERY_S * number / clients))
        yield flood
        flood.ended.set()


async def send_call(harness: RpcHarness, client: HttpClient, key: str = "main", method: str = "eth_call") -> Reply:
    """Ask something that was never asked before."""
    params = [{"to": "0x" + "11" * 20, "data": hex(next(_serial))}, "latest"]
    return await client.send(harness.worker.post(rpc(method, params), key=key, network=harness.network))


# How the upstream is reached. Pipelined calls wait at the upstream for those before them on their connection.
OVER_HTTP = (LimitedUpstream, 1)
PIPELINED = (LimitedUpstream, 4)
OVER_A_SOCKET = (LimitedSocket, 1)
Reached = tuple[type[LimitedUpstream], int]
EVERY_WAY = pytest.mark.parametrize("way", [OVER_HTTP, PIPELINED, OVER_A_SOCKET], ids=["http", "pipelined", "socket"])


def limited(
    connections: int = CAPACITY, *, call_timeout_s: float = 5.0, way: Reached = OVER_HTTP
) -> AbstractAsyncContextManager[RpcHarness]:
    kind, depth = way
    return rpc_harness(
        1,
        kind=kind,
        options=[{"connections": connections, "depth": depth}],
        rpc={"call_timeout_s": call_timeout_s},
        **NO_CACHE,
    )


def upstream_of(harness: RpcHarness) -> LimitedUpstream:
    upstream = harness.upstreams[0]
    assert isinstance(upstream, LimitedUpstream)
    return upstream


def probes_at(upstream: LimitedUpstream) -> int:
    """Answered questions for the head."""
    return upstream.count("eth_blockNumber") + upstream.count("eth_getBlockByNumber")


@on_uvloop
async def test_overloaded_upstream_stays_busy_with_calls_that_are_answered() -> None:
    async with limited() as harness:
        upstream, health = upstream_of(harness), harness.route.upstreams[0].health
        probes = probes_at(upstream)
        async with flood_of(harness) as flood:
            for _ in range(6):
                await asyncio.sleep(0.5)
                await harness.look()
                assert not health.silent
                assert not health.pause_s, "no breaker opens on an upstream that answers"
        # How busy it stays is measured by the case `overload` of the bench.
        assert upstream.worked > CAPACITY
        assert set(flood.counts) == {200, 503}
        refusal = next(reply for reply in flood.replies if reply.status == 503)
        assert refusal.headers["retry-after"] == "1"
        assert upstream.worked == flood.counts[200], (upstream.worked, flood.counts)
        assert probes_at(upstream) - probes >= 6
        assert not health.bad


@EVERY_WAY
@on_uvloop
async def test_upstream_that_takes_fewer_calls_than_its_limit_is_given_fewer(way: Reached) -> None:
    """The operator allows four times what it can work on at a time."""
    async with limited(4 * CAPACITY, way=way) as harness:
        upstream = harness.route.upstreams[0]
        async with flood_of(harness) as flood:
            await until(lambda: len(upstream.in_flight()) > 2 * CAPACITY)
            await until(lambda: len(upstream.in_flight()) <= 2 * CAPACITY, within_s=20.0)
        assert set(flood.counts) <= {200, 503}
        assert not harness.route.upstreams[0].health.pause_s


@EVERY_WAY
@on_uvloop
async def test_flood_of_one_account_fails_no_call_of_another(way: Reached) -> None:
    async with limited(way=way) as harness, await harness.worker.connect() as client:
        harness.worker.add_key("flooding")
        async with flood_of(harness, "flooding") as flood:
            await until(lambda: flood.counts[503] > 0)
            for _ in range(15):
                reply = await send_call(harness, client)
                assert reply.status == 200, reply.body


@pytest.mark.parametrize("way", [OVER_HTTP, OVER_A_SOCKET], ids=["http", "socket"])
@on_uvloop
async def test_account_whose_calls_hang_leaves_connections_to_others(way: Reached) -> None:
    async with AsyncExitStack() as stack:
        harness = await stack.enter_async_context(limited(call_timeout_s=20.0, way=way))
        upstream, health = upstream_of(harness), harness.route.upstreams[0].health
        upstream.held = {"eth_estimateGas"}
        harness.worker.add_key("hanging")
        hanging = [await stack.enter_async_context(await harness.worker.connect()) for _ in range(2 * CAPACITY)]
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(send_call(harness, each, "hanging", "eth_estimateGas")) for each in hanging]
            await until(lambda: health.inflight + sum(each.done() for each in asked) == len(asked))
            async with await harness.worker.connect() as client:
                for _ in range(10):
                    reply = await send_call(harness, client)
                    assert reply.status == 200, reply.body
            await harness.look()
            assert not health.silent
            upstream.gate.set()


@on_uvloop
async def test_calls_whose_client_left_count_against_the_limit() -> None:
    async with limited(4, call_timeout_s=10.0) as harness:
        upstream = upstream_of(harness)
        async with await harness.worker.connect() as client:
            for _ in range(20):  # enough for the usual latency to be known
                assert (await send_call(harness, client)).status == 200

        async def leave() -> None:
            async with await harness.worker.connect() as client:
                params = [{"to": "0x" + "22" * 20, "data": hex(next(_serial))}, "latest"]
                await client.write(harness.worker.post(rpc("eth_call", params), network=harness.network))
                await asyncio.sleep(0.01)

        for _ in range(5):
            await asyncio.gather(*[leave() for _ in range(10)])
        assert upstream.most_in_flight <= 4
        await until(lambda: not upstream.in_flight)
        async with await harness.worker.connect() as client:
            assert (await send_call(harness, client)).status == 200


@pytest.mark.parametrize("way", [OVER_HTTP, OVER_A_SOCKET], ids=["http", "socket"])
@on_uvloop
async def test_upstream_that_answers_others_is_slow_and_not_broken(way: Reached) -> None:
    """Calls of several accounts time out, each beside calls that are answered."""
    async with limited(64, call_timeout_s=0.3, way=way) as harness, await harness.worker.connect() as client:
        upstream = upstream_of(harness)
        upstream.held = {"eth_estimateGas"}
        upstream.service_s = 0.01
        for name in map(str, range(8)):
            harness.worker.add_key(name)
            async with await harness.worker.connect() as slow, asyncio.TaskGroup() as group:
                asked = group.create_task(send_call(harness, slow, name, "eth_estimateGas"))
                while not asked.done():
                    assert (await send_call(harness, client)).status == 200
            assert asked.result().status == 504
        assert not harness.route.upstreams[0].health.pause_s


@on_uvloop
async def test_account_that_joined_a_refused_call_waits_for_it_in_its_own_turn() -> None:
    """Equal calls of two accounts share a flight, and the account that made the call has too many of them."""
    async with rpc_harness(1) as harness:
        harness.upstreams[0].held = {"eth_call"}
        harness.worker.add_key("other")
        upstream, flights = harness.route.upstreams[0], harness.route.state.flights
        params = [{"to": "0x" + "11" * 20}, "latest"]
        async with asyncio.TaskGroup() as group:
            made = group.create_task(harness.call("eth_call", params))
            await until(lambda: harness.upstreams[0].count("eth_call") == 1)
            (flight,) = flights.values()
            joined = group.create_task(harness.call("eth_call", params, key="other"))
            await until(lambda: len(flight.waiters) == 2)
            maker = flight.client
            upstream.leave(flight)
            flight.on_fail(upstream, CROWDED, sent=False)
            assert flight.client != maker
            await until(lambda: harness.upstreams[0].count("eth_call") == 2)
            harness.upstreams[0].gate.set()
        assert [each.result().status for each in (made, joined)] == [200, 200]
