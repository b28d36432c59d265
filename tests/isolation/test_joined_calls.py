"""Large results that several callers wait for: they count in the memory of accounts, and each gets the largest by itself."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from proxy.services.rpc.forwarder import MOST_JOINED
from proxy.services.rpc.held_body import SLICE_BYTES
from proxy.services.rpc.waiters import ABSENT_WAITER
from proxy.wire.upstream import MAX_REPLY_BYTES, MOST_SHARED
from tests.http_client import HttpClient, Reply, rpc
from tests.isolation.test_slow_readers import unread
from tests.service import until
from tests.sockets import bare
from tests.web.test_front_backpressure import MB, slow_client
from tests.web.worker import LIVE, Worker, on_uvloop, running_worker
from tests.wire.upstreams import Exchange, Scripted, head_of, stub

# An account may hold half of the room for replies, which is 10/16 of the memory: two results of SIZE, and not three.
SHARE = 9 * MB
# More than the kernel buffers for a client that does not read.
SIZE = 4_000_000
# Larger than one that is shared, and so is its half.
OWN_SIZE = 2 * MOST_SHARED + 1_000_000
CALLS = 4
SMALL = stub({"eth_blockNumber": "0x10", "eth_chainId": "0x1"})


class GatedUpstream:
    """Sends half of each large result once its first gate is open, and the rest once the last gate is."""

    def __init__(self, *, has_length: bool, size: int = SIZE) -> None:
        self.has_length = has_length
        self.size = size
        # By the number of the call.
        self.first = defaultdict[int, asyncio.Event](asyncio.Event)
        self.last = asyncio.Event()
        self.calls = self.halves = 0
        # Whether the next call is not answered, and its connection is closed.
        self.fails = False

    async def __call__(self, exchange: Exchange) -> None:
        call = await exchange.call()
        if call["method"] != "eth_getCode":
            await SMALL(exchange)
            return
        self.calls += 1
        await self.first[int(call["params"][0], 16)].wait()
        if self.fails:
            self.fails = False
            exchange.reset()
            return
        body = b'{"jsonrpc":"2.0","id":%d,"result":"0x%b"}' % (call["id"], b"a" * self.size)
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
    *, has_length: bool = True, held: int = SHARE * 16 // 5, size: int = SIZE, **sections: Any
) -> AsyncIterator[tuple[Worker, GatedUpstream]]:
    upstream = GatedUpstream(has_length=has_length, size=size)
    async with (
        Scripted(upstream) as server,
        running_worker({LIVE: [{"url": server.url}]}, server={"max_held_bytes": held}, **sections) as worker,
    ):
        worker.add_key("attacker")
        yield worker, upstream
        await until(lambda: not worker.held_bytes)


async def joined(worker: Worker, waiters: int) -> None:
    """Return when this many callers wait for large results."""
    flights = worker.app.networks.routes[LIVE].state.flights
    await until(lambda: sum(len(flight.waiters) for flight in flights.values()) == waiters)


async def ask(worker: Worker, stack: AsyncExitStack, number: int, key: str = "attacker", **headers: str) -> HttpClient:
    client = await stack.enter_async_context(await worker.connect())
    await client.write(worker.post(code_call(number), key=key, **headers))
    return client


async def ask_slowly(worker: Worker, stack: AsyncExitStack, client: str, number: int) -> None:
    """A client of this kind that does not read its reply."""
    if client == "socket":
        socket = await stack.enter_async_context(bare(worker, key="attacker", small_buffer=True))
        socket.write(code_call(number))
        return
    plain = stack.enter_context(await slow_client(worker))
    headers = {"Origin": "https://page.example"} if client == "page" else {}
    await asyncio.get_running_loop().sock_sendall(plain, worker.post(code_call(number), key="attacker", **headers))


def outcomes(replies: Sequence[Reply]) -> list[int]:
    """The size of each result, or the code of its error."""
    return [len(each.json["result"]) if "result" in each.json else each.json["error"]["code"] for each in replies]


@pytest.mark.parametrize("has_length", [True, False])
@on_uvloop
async def test_results_that_several_callers_wait_for_are_bounded_for_each_account(has_length: bool) -> None:
    async with gated_worker(has_length=has_length) as (worker, upstream), AsyncExitStack() as stack:
        pairs = [[await ask(worker, stack, n) for _ in range(2)] for n in range(CALLS)]
        await joined(worker, 2 * CALLS)
        upstream.open(*range(CALLS))
        if has_length:
            await until(lambda: worker.held_bytes > SIZE * 2)
        await until(lambda: upstream.halves >= CALLS)
        assert worker.held_bytes <= SHARE
        upstream.last.set()
        whole = SIZE + 2
        replies = await asyncio.gather(*(each.reply() for pair in pairs for each in pair))
        # There is room for two of them. The others are sent to each caller as they come.
        assert outcomes(replies) == [whole] * 2 * CALLS
        # Nothing speaks against the upstream, and other accounts have their own room.
        assert worker.app.networks.routes[LIVE].upstreams[0].health.takes_calls(time.monotonic())
        assert outcomes([await worker.send(code_call(0))]) == [whole]


@on_uvloop
async def test_caller_of_another_account_gets_the_result_although_the_first_has_no_room() -> None:
    async with gated_worker() as (worker, upstream), AsyncExitStack() as stack:
        full = [await ask(worker, stack, n) for n in (1, 1, 2, 2)]
        await joined(worker, 4)
        upstream.open(1, 2)
        await until(lambda: worker.held_bytes > SIZE * 2)
        mixed = [await ask(worker, stack, 3), await ask(worker, stack, 3, key="main")]
        await joined(worker, 6)
        upstream.open(3)
        upstream.last.set()
        # Without room for one that both could have, each gets its own as it comes.
        replies = await asyncio.gather(*(each.reply() for each in (*full, *mixed)))
        assert outcomes(replies) == [SIZE + 2] * 6


@on_uvloop
async def test_third_account_gets_the_result_although_the_two_before_have_no_room() -> None:
    # With two results each, both hold more than stays free for others. A third account finds room for one.
    async with gated_worker(held=44 * MB) as (worker, upstream), AsyncExitStack() as stack:
        worker.add_key("accomplice")
        pairs = [(key, n) for key, numbers in (("attacker", (1, 2)), ("accomplice", (4, 5))) for n in numbers * 2]
        full = [await ask(worker, stack, n, key) for key, n in pairs]
        await joined(worker, 8)
        upstream.open(1, 2, 4, 5)
        await until(lambda: worker.held_bytes > SIZE * 4)
        mixed = [await ask(worker, stack, 3, key) for key in ("attacker", "main", "accomplice")]
        await joined(worker, 11)
        upstream.open(3)
        upstream.last.set()
        replies = await asyncio.gather(*(each.reply() for each in (*full, *mixed)))
        assert outcomes(replies) == [SIZE + 2] * 11


@pytest.mark.parametrize("has_length", [True, False])
@on_uvloop
async def test_result_that_is_too_large_to_be_held_is_sent_to_each_account_that_asked_for_it(has_length: bool) -> None:
    size = MAX_REPLY_BYTES + MB
    async with gated_worker(has_length=has_length, size=size) as (worker, upstream), AsyncExitStack() as stack:
        clients = [await ask(worker, stack, 1, key) for key in ("attacker", "main", "attacker")]
        await joined(worker, 3)
        upstream.open(1)
        upstream.last.set()
        replies = await asyncio.gather(*(each.reply() for each in clients))
        assert outcomes(replies) == [size + 2] * 3
        assert worker.app.networks.routes[LIVE].upstreams[0].health.takes_calls(time.monotonic())


@pytest.mark.parametrize("has_length", [True, False])
@on_uvloop
async def test_result_that_is_too_large_to_be_shared_is_sent_to_each_caller_as_it_comes(has_length: bool) -> None:
    async with gated_worker(has_length=has_length, size=OWN_SIZE) as (worker, upstream), AsyncExitStack() as stack:
        clients = [await ask(worker, stack, 1, key) for key in ("attacker", "main", "attacker")]
        await joined(worker, 3)
        upstream.open(1)
        await until(lambda: upstream.calls == 3)
        assert worker.held_bytes <= MB
        upstream.last.set()
        assert outcomes([await each.reply() for each in clients]) == [OWN_SIZE + 2] * 3


@on_uvloop
async def test_call_is_retried_although_the_account_that_made_it_first_has_no_retries_left() -> None:
    async with gated_worker(size=100) as (worker, upstream), AsyncExitStack() as stack:
        clients = [await ask(worker, stack, 1, key) for key in ("attacker", "main")]
        await joined(worker, 2)
        route = worker.app.networks.routes[LIVE]
        (flight,) = route.state.flights.values()
        while route.dispatcher.budget.spend(time.monotonic(), flight.client):
            pass
        upstream.fails = True
        upstream.open(1)
        upstream.last.set()
        assert outcomes([await each.reply() for each in clients]) == [102, 102]


@on_uvloop
async def test_callers_of_one_flight_are_bounded() -> None:
    """One turn of the loop answers them all."""
    async with gated_worker(size=100) as (worker, upstream), AsyncExitStack() as stack:
        state = worker.app.networks.routes[LIVE].state
        clients = [await ask(worker, stack, 1) for _ in range(MOST_JOINED + 2)]
        await until(lambda: upstream.calls == 2)
        await joined(worker, 2)  # Those beyond the bound share the next flight.
        assert len(state.flights) == 1
        upstream.open(1)
        upstream.last.set()
        assert set(outcomes([await each.reply() for each in clients])) == {102}
        assert upstream.calls == 2


@on_uvloop
async def test_call_that_hangs_is_not_joined() -> None:
    """It would fail the caller after a part of its own time."""
    async with gated_worker(size=100) as (worker, upstream), AsyncExitStack() as stack:
        await ask(worker, stack, 1)
        await until(lambda: upstream.calls == 1)
        route = worker.app.networks.routes[LIVE]
        (flight,) = route.state.flights.values()
        flight.began -= 0.6 * route.dispatcher.call_timeout_s
        late = await ask(worker, stack, 1, "main")
        await until(lambda: upstream.calls == 2)
        upstream.open(1)
        upstream.last.set()
        assert outcomes([await late.reply()]) == [102]


@on_uvloop
async def test_caller_that_left_gets_no_result_of_its_own() -> None:
    size = MAX_REPLY_BYTES + MB
    async with gated_worker(size=size) as (worker, upstream), AsyncExitStack() as stack:
        first, second, third = [await ask(worker, stack, 1, key) for key in ("attacker", "main", "attacker")]
        await joined(worker, 3)
        flights = worker.app.networks.routes[LIVE].state.flights
        (flight,) = flights.values()
        for leaver in (first, third):
            leaver.writer.transport.abort()
        await until(lambda: flight.waiters.count(ABSENT_WAITER) == 2)
        upstream.open(1)
        upstream.last.set()
        assert outcomes([await second.reply()]) == [size + 2]
        assert upstream.calls == 2  # the one that all waited for, and its own


@pytest.mark.parametrize("client", ["front", "socket"])
@on_uvloop
async def test_result_that_several_callers_wait_for_is_written_in_slices(client: str) -> None:
    async with gated_worker() as (worker, upstream), AsyncExitStack() as stack:
        for _ in range(2):
            await ask_slowly(worker, stack, client, 1)
        await joined(worker, 2)
        upstream.open(1)
        upstream.last.set()
        await until(lambda: [size > 0 for size in unread(worker)] == [True, True])
        # One slice more than the transport's limit.
        assert max(unread(worker)) <= 3 * SLICE_BYTES


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
        await until(lambda: not worker.held_bytes)


@pytest.mark.parametrize("client", ["front", "page", "socket"])
@on_uvloop
async def test_large_results_that_are_not_read_are_bounded_although_they_are_shared(client: str) -> None:
    async with gated_worker() as (worker, upstream), AsyncExitStack() as stack:
        for _ in range(8):
            await ask_slowly(worker, stack, client, 7)
        await joined(worker, 8)
        upstream.last.set()
        upstream.open(7, 8)
        await until(lambda: worker.held_bytes > SIZE)
        assert worker.held_bytes <= SHARE
        assert outcomes([await worker.send(code_call(8))]) == [SIZE + 2]
