"""Large results that several callers wait for count in the memory of their account."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from tests.http_client import HttpClient, Reply, rpc
from tests.service import until
from tests.sockets import bare
from tests.web.test_front_backpressure import MB, slow_client
from tests.web.worker import LIVE, Worker, on_uvloop, running_worker
from tests.wire.upstreams import Exchange, Scripted, head_of, stub

# An account may hold half of what the worker may: two results of SIZE, and not three.
SHARE = 14 * MB
# More than the kernel buffers for a client that does not read.
SIZE = 6_000_000
CALLS = 4
SMALL = stub({"eth_blockNumber": "0x10", "eth_chainId": "0x1"})


class GatedUpstream:
    """Sends half of each large result once its first gate is open, and the rest once the last gate is."""

    def __init__(self, *, has_length: bool) -> None:
        self.has_length = has_length
        # By the number of the call.
        self.first = defaultdict[int, asyncio.Event](asyncio.Event)
        self.last = asyncio.Event()
        self.halves = 0

    async def __call__(self, exchange: Exchange) -> None:
        call = await exchange.call()
        if call["method"] != "eth_getCode":
            await SMALL(exchange)
            return
        await self.first[int(call["params"][0], 16)].wait()
        body = b'{"jsonrpc":"2.0","id":%d,"result":"0x%b"}' % (call["id"], b"a" * SIZE)
        framing = {"Content-Length": str(len(body))} if self.has_length else {"Transfer-Encoding": "chunked"}
        await exchange.send(head_of(200, framing))
        half = len(body) // 2
        await self._part(exchange, body[:half])
        self.halves += 1
        await self.last.wait()
        await self._part(exchange, body[half:])
        if not self.has_length:
            await exchange.send(b"0\r\n\r\n")

    def open(self, *numbers: int) -> None:
        for number in numbers:
            self.first[number].set()

    async def _part(self, exchange: Exchange, part: bytes) -> None:
        await exchange.send(part if self.has_length else b"%x\r\n%b\r\n" % (len(part), part))


def code_call(number: int) -> bytes:
    return rpc("eth_getCode", [f"0x{number:040x}", "latest"])


@asynccontextmanager
async def gated_worker(
    *, has_length: bool = True, held: int = 2 * SHARE, **sections: Any
) -> AsyncIterator[tuple[Worker, GatedUpstream]]:
    upstream = GatedUpstream(has_length=has_length)
    async with (
        Scripted(upstream) as server,
        running_worker({LIVE: [{"url": server.url}]}, server={"max_held_bytes": held}, **sections) as worker,
    ):
        worker.add_key("attacker")
        yield worker, upstream
        await until(lambda: not worker.app.held_replies.total)


async def joined(worker: Worker, waiters: int) -> None:
    """Return when this many callers wait for large results."""
    flights = worker.app.networks.routes[LIVE].state.flights
    await until(lambda: sum(len(flight.waiters) for flight in flights.values()) == waiters)


async def ask(worker: Worker, stack: AsyncExitStack, number: int, key: str = "attacker", **headers: str) -> HttpClient:
    client = await stack.enter_async_context(await worker.connect())
    await client.write(worker.post(code_call(number), key=key, **headers))
    return client


def outcomes(replies: Sequence[Reply]) -> list[int]:
    """The size of each result, or the code of its error."""
    return [len(each.json["result"]) if "result" in each.json else each.json["error"]["code"] for each in replies]


@pytest.mark.parametrize("has_length", [True, False])
def test_results_that_several_callers_wait_for_are_bounded_for_each_account(has_length: bool) -> None:
    @on_uvloop
    async def run() -> None:
        async with gated_worker(has_length=has_length) as (worker, upstream), AsyncExitStack() as stack:
            held = worker.app.held_replies
            pairs = [[await ask(worker, stack, n) for _ in range(2)] for n in range(CALLS)]
            await joined(worker, 2 * CALLS)
            upstream.open(*range(CALLS))
            if has_length:
                await until(lambda: held.total > SIZE * 2)
            await until(lambda: upstream.halves == CALLS)
            assert held.total <= SHARE
            upstream.last.set()
            found = [outcomes([await each.reply() for each in pair]) for pair in pairs]
            whole = SIZE + 2
            assert [whole, whole] in found
            if has_length:
                assert sorted(found) == [[-32005, -32005]] * 2 + [[whole, whole]] * 2
            # Nothing speaks against the upstream, and other accounts have their own room.
            assert worker.app.networks.routes[LIVE].upstreams[0].health.takes_calls(time.monotonic())
            assert outcomes([await worker.send(code_call(0))]) == [whole]

    run()


@on_uvloop
async def test_caller_of_another_account_gets_the_result_although_the_first_has_no_room() -> None:
    async with gated_worker() as (worker, upstream), AsyncExitStack() as stack:
        held = worker.app.held_replies
        full = [await ask(worker, stack, n) for n in (1, 1, 2, 2)]
        await joined(worker, 4)
        upstream.open(1, 2)
        await until(lambda: held.total > SIZE * 2)
        mixed = [await ask(worker, stack, 3), await ask(worker, stack, 3, key="main")]
        await joined(worker, 6)
        upstream.open(3)
        await until(lambda: upstream.halves == 4)
        upstream.last.set()
        assert outcomes([await each.reply() for each in (*full, mixed[1])]) == [SIZE + 2] * 5


@on_uvloop
async def test_third_account_gets_the_result_although_the_two_before_have_no_room() -> None:
    # Two results fill an account's half, and five fit into the whole.
    async with gated_worker(held=32 * MB) as (worker, upstream), AsyncExitStack() as stack:
        worker.add_key("accomplice")
        held = worker.app.held_replies
        pairs = [(key, n) for key, numbers in (("attacker", (1, 2)), ("accomplice", (4, 5))) for n in numbers * 2]
        full = [await ask(worker, stack, n, key) for key, n in pairs]
        await joined(worker, 8)
        upstream.open(1, 2, 4, 5)
        await until(lambda: held.total > SIZE * 4)
        mixed = [await ask(worker, stack, 3, key) for key in ("attacker", "main", "accomplice")]
        await joined(worker, 11)
        upstream.open(3)
        await until(lambda: upstream.halves > 4)
        upstream.last.set()
        assert outcomes([await each.reply() for each in (*full, mixed[1])]) == [SIZE + 2] * 9


@on_uvloop
async def test_result_that_compresses_well_gives_its_memory_back() -> None:
    """The reply is small, and the connection stays open."""
    async with gated_worker() as (worker, upstream), AsyncExitStack() as stack:
        pair = [await ask(worker, stack, 1, "attacker", Accept_Encoding="zstd") for _ in range(2)]
        await joined(worker, 2)
        upstream.open(1)
        upstream.last.set()
        for each in pair:
            reply = await each.reply()
            assert reply.headers["content-encoding"] == "zstd"
            assert len(reply.body) < 4_000
        await until(lambda: not worker.app.held_replies.total)


@pytest.mark.parametrize("client", ["front", "page", "socket"])
def test_large_results_that_are_not_read_are_bounded_although_they_are_shared(client: str) -> None:
    @on_uvloop
    async def run() -> None:
        async with gated_worker() as (worker, upstream), AsyncExitStack() as stack:
            held, loop = worker.app.held_replies, asyncio.get_running_loop()
            for _ in range(8):
                if client == "socket":
                    socket = await stack.enter_async_context(bare(worker, key="attacker", small_buffer=True))
                    socket.write(code_call(7))
                else:
                    plain = stack.enter_context(await slow_client(worker))
                    headers = {"Origin": "https://page.example"} if client == "page" else {}
                    await loop.sock_sendall(plain, worker.post(code_call(7), key="attacker", **headers))
            await joined(worker, 8)
            upstream.last.set()
            upstream.open(7, 8)
            await until(lambda: held.total > SIZE)
            assert held.total <= SHARE
            assert outcomes([await worker.send(code_call(8))]) == [SIZE + 2]

    run()
