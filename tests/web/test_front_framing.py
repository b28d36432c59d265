"""Unusual messages, clients that leave or do not read, and the end of a connection."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.services.rpc.flights import Flight
from proxy.web.front.front_connection import FrontConnection
from proxy.wire.http_upstream import HttpUpstream
from tests.http_client import Reply, rpc
from tests.service import holds, until
from tests.web.worker import LIVE, NO_CACHE, Worker, on_uvloop, running_worker
from tests.wire import upstreams
from tests.wire.upstreams import Exchange, Scripted, answer, chunked, http, huge, stub

CALL = rpc("net_listening", [1])
GOOD = b'{"jsonrpc":"2.0","id":1,"result":{"method":"net_listening","params":[1]}}'
WRITE = rpc("eth_sendRawTransaction", ["0x02"])
WAYS = pytest.mark.parametrize("cache", [{}, NO_CACHE], ids=["cached", "short"])


def protocols_of(worker: Worker) -> list[str]:
    return [type(connection).__name__ for connection in worker.app.limiter.connections]


def is_good(reply: Reply) -> bool:
    return (reply.status, reply.body) == (200, GOOD)


# Messages that are handed over to aiohttp


@pytest.mark.parametrize("first", [b"", b"hot"])
@on_uvloop
async def test_client_that_expects_continue_gets_it_and_then_its_reply(first: bytes) -> None:
    async with Scripted() as upstream, running_worker(upstream.url) as worker, await worker.connect() as client:
        if first:
            assert is_good(await client.send(worker.post(CALL)))
        data = worker.post(CALL, Expect="100-continue")
        await client.write(data[: -len(CALL)])
        async with asyncio.timeout(30):
            assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.write(CALL)
        assert is_good(await client.reply())
        assert is_good(await client.send(worker.post(CALL)))
        assert protocols_of(worker) == ["HandlerConnection"]


@pytest.mark.parametrize("size", [1, 7, 1000])
@on_uvloop
async def test_chunked_request_is_answered_like_any_other(size: int) -> None:
    async with Scripted() as upstream, running_worker(upstream.url) as worker, await worker.connect() as client:
        head = worker.post(b"", Transfer_Encoding="chunked").replace(b"Content-Length: 0\r\n", b"")
        data = head + chunked(CALL, size)
        assert is_good(await client.send(data))
        await client.write(worker.post(CALL) + data + worker.post(CALL))
        assert [is_good(await client.reply()) for _ in range(3)] == [True] * 3


@on_uvloop
async def test_chunked_request_over_the_cap_is_refused() -> None:
    async with Scripted() as upstream, running_worker(upstream.url, server={"max_body_bytes": 4096}) as worker:
        head = worker.post(b"", Transfer_Encoding="chunked").replace(b"Content-Length: 0\r\n", b"")
        for size in (4097, 1_000_000):
            async with await worker.connect() as client:
                (await client.send(head + chunked(b" " * size, 1000))).fault(413)
        assert not upstream.bodies


@on_uvloop
async def test_length_together_with_chunks_is_refused() -> None:
    async with Scripted() as upstream, running_worker(upstream.url) as worker:
        for lines in (
            {"Content_Length": "5", "Transfer_Encoding": "chunked"},
            {"Transfer_Encoding": "chunked, identity"},
        ):
            async with await worker.connect() as client:
                (await client.send(worker.post(b"", **lines) + chunked(CALL, 10))).fault(400)
                assert await client.is_closed()
        assert not upstream.bodies


@on_uvloop
async def test_http_1_0_request_is_answered_and_closed() -> None:
    async with Scripted() as upstream, running_worker(upstream.url) as worker, await worker.connect() as client:
        await client.write(worker.post(CALL).replace(b"HTTP/1.1", b"HTTP/1.0"))
        async with asyncio.timeout(30):
            reply = await client.reader.read()
        assert reply.startswith(b"HTTP/1.0 200 OK\r\n")
        assert reply.endswith(b"\r\n\r\n" + GOOD)


@on_uvloop
async def test_client_that_sends_close_is_answered_and_closed() -> None:
    async with Scripted() as upstream, running_worker(upstream.url) as worker, await worker.connect() as client:
        await client.write(worker.post(CALL) * 2 + worker.post(CALL, Connection="close"))
        assert [is_good(await client.reply()) for _ in range(3)] == [True] * 3
        assert await client.is_closed()
        assert len(upstream.bodies) == 3


@on_uvloop
async def test_bytes_beyond_the_length_are_the_next_message() -> None:
    async with Scripted() as upstream, running_worker(upstream.url) as worker:
        for rest in (b"}", b"garbage\r\n\r\n", b"\0" * 300, CALL + b"\r\n\r\n"):
            async with await worker.connect() as client:
                await client.write(worker.post(CALL) + rest)
                assert is_good(await client.reply())
                if b"\r\n\r\n" not in rest:
                    client.writer.write_eof()
                    assert await client.is_closed()
                else:
                    (await client.reply()).fault(400)
                    assert await client.is_closed()
        assert len(upstream.bodies) == 4


@pytest.mark.parametrize("empty", [b"\r\n", b"\r\n\r\n"])
@on_uvloop
async def test_empty_line_before_a_request_is_ignored(empty: bytes) -> None:
    """RFC 9112, 2.2: old clients send one after a body."""
    async with Scripted() as upstream, running_worker(upstream.url) as worker:
        for apart in (False, True):
            async with await worker.connect() as client:
                for _ in range(2):
                    await client.write(worker.post(CALL) + empty)
                    if apart:
                        await asyncio.sleep(0.01)
                    await client.write(worker.post(CALL))
                    assert is_good(await client.reply())
                    assert is_good(await client.reply())


@WAYS
@on_uvloop
async def test_rest_of_a_body_is_never_parsed_as_a_request(cache: dict[str, Any]) -> None:
    """Even if it equals a request that the connection has sent before."""
    async with (
        Scripted() as upstream,
        running_worker(upstream.url, **cache) as worker,
        await worker.connect() as client,
    ):
        known = worker.post(CALL)
        for _ in range(3):
            assert is_good(await client.send(known))
        whole = worker.post(b" " * 10 + known)
        for cut in (len(whole) - len(known), 20):
            await client.write(whole[:cut])
            await asyncio.sleep(0.02)
            await client.write(whole[cut:])
            assert (await client.reply()).fault(400)["details"]["rpc_code"] == -32700
        assert is_good(await client.send(known))
        assert len(upstream.bodies) == 4


@on_uvloop
async def test_queued_reply_is_written_before_the_connection_is_handed_over() -> None:
    async with Scripted() as upstream, running_worker(upstream.url) as worker, await worker.connect() as client:
        assert is_good(await client.send(worker.post(CALL)))
        front = worker.only_connection
        # Two segments in one turn of the loop, as the transport may deliver them.
        front.data_received(worker.post(b"{}"))
        front.data_received(worker.post(CALL, TE="trailers"))
        (await client.reply()).fault(400)
        assert is_good(await client.reply())


@on_uvloop
async def test_incomplete_body_is_waited_for() -> None:
    async with Scripted() as upstream, running_worker(upstream.url) as worker, await worker.connect() as client:
        data = worker.post(CALL)
        await client.write(data[:-1])
        await holds(lambda: not upstream.bodies, for_s=0.05)
        await client.write(data[-1:] + data[:-1])
        assert is_good(await client.reply())
        assert len(upstream.bodies) == 1


@pytest.mark.parametrize("ended", [True, False])
@on_uvloop
async def test_head_over_the_limit_is_refused(ended: bool) -> None:
    async with Scripted() as upstream, running_worker(upstream.url) as worker:
        wide = worker.post(CALL, **{f"X-{at}": "a" * 1000 for at in range(30)})
        async with await worker.connect() as client:
            reply = await client.send(wide if ended else wide[:25_000] * 2)
            assert reply.status in (400, 431)
            reply.fault(reply.status)
        assert not upstream.bodies


NO_MESSAGES = (
    b"\0", b"\0" * 1000, b"\r\n\r\n", b"\r\n\r\n\r\n", b"X: y\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"POST /v1/rpc/x HTTP/9.9\r\n\r\n", b"\xff\xfe\r\n\r\n", b" POST / HTTP/1.1\r\n\r\n",
)  # fmt: skip


@pytest.mark.parametrize("data", NO_MESSAGES)
@on_uvloop
async def test_garbage_does_not_affect_other_connections(data: bytes) -> None:
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    async with Scripted() as upstream, running_worker(upstream.url) as worker, await worker.connect() as other:
        for before in (b"", worker.post(CALL)):
            async with await worker.connect() as client:
                await client.write(before + data)
                if before:
                    assert is_good(await client.reply())
                client.writer.write_eof()
                assert await client.is_closed()
            assert is_good(await other.send(worker.post(CALL)))
    assert not problems


# Clients that leave


@WAYS
@pytest.mark.parametrize("way", ["single", "batch", "convoy", "aiohttp", "aiohttp batch", "aiohttp convoy"])
@on_uvloop
async def test_read_of_a_client_that_left_is_cancelled(cache: dict[str, Any], way: str) -> None:
    gate = asyncio.Event()
    async with Scripted(upstreams.held(gate, stub())) as upstream, running_worker(upstream.url, **cache) as worker:
        async with await worker.connect() as client:
            body = CALL
            if "batch" in way or "convoy" in way:
                body = b"[%b]" % b",".join([CALL] * (3 if "convoy" in way else 1))
            await client.write(worker.post(body, **({"TE": "trailers"} if "aiohttp" in way else {})))
            await until(lambda: upstream.bodies)
        await until(lambda: not upstream.alive)
        gate.set()
        assert is_good(await worker.send(CALL))
        assert upstream.connections == 2


@pytest.mark.parametrize("way", ["single", "batch", "aiohttp", "aiohttp batch"])
@on_uvloop
async def test_write_of_a_client_that_left_is_completed(way: str) -> None:
    gate = asyncio.Event()
    async with Scripted(upstreams.held(gate, stub())) as upstream, running_worker(upstream.url) as worker:
        async with await worker.connect() as client:
            body = b"[%b]" % WRITE if "batch" in way else WRITE
            await client.write(worker.post(body, **({"TE": "trailers"} if "aiohttp" in way else {})))
            await until(lambda: upstream.bodies)
        await until(lambda: not worker.app.limiter.connections)
        await holds(lambda: upstream.alive == 1, for_s=0.05)
        gate.set()
        assert is_good(await worker.send(CALL))
        assert upstream.methods == ["eth_sendRawTransaction", "net_listening"]
        assert upstream.connections == 1


@pytest.mark.parametrize("way", [{}, {"TE": "trailers"}, {"Expect": "100-continue"}])
def test_client_that_leaves_in_the_middle_of_its_request_logs_no_error(
    way: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    @on_uvloop
    async def leave() -> None:
        async with Scripted() as upstream, running_worker(upstream.url) as worker:
            data = worker.post(CALL, **way)
            for cut in (1, 20, len(data) - len(CALL), len(data) - 1):
                async with await worker.connect() as client:
                    await client.write(data[:cut])
                    await asyncio.sleep(0.01)
                await until(lambda: not worker.app.limiter.connections)
            assert not upstream.bodies

    leave()
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


@WAYS
@on_uvloop
async def test_reply_never_reaches_another_client(cache: dict[str, Any]) -> None:
    """Clients come and go while replies are on their way; those that stay get their own."""

    async def act(exchange: Exchange) -> None:
        call = await exchange.call()
        await asyncio.sleep(0.002 * (call["params"][0] % 3))
        await exchange.send(upstreams.http(upstreams.answer(call, result=call["params"])))

    block = {"connections": 3}
    async with Scripted(act) as upstream, running_worker({LIVE: [{"url": upstream.url, **block}]}, **cache) as worker:

        async def stay(first: int) -> None:
            async with await worker.connect() as client:
                for number in range(first, first + 30):
                    reply = await client.send(worker.post(rpc("net_listening", [number], id=number)))
                    assert reply.json == {"jsonrpc": "2.0", "id": number, "result": [number]}

        async def leave(first: int) -> None:
            for number in range(first, first + 30):
                async with await worker.connect() as client:
                    await client.write(worker.post(rpc("net_listening", [number], id=number)))
                    await asyncio.sleep(0.001 * (number % 4))

        async with asyncio.TaskGroup() as group:
            for first in range(0, 500, 100):
                group.create_task(stay(first))
                group.create_task(leave(first + 50))


@on_uvloop
async def test_one_of_two_clients_of_a_coalesced_call_may_leave() -> None:
    gate = asyncio.Event()
    script = upstreams.held(gate, stub({"eth_gasPrice": "0x5"}))
    async with Scripted(script) as upstream, running_worker(upstream.url) as worker, await worker.connect() as stays:
        async with await worker.connect() as leaves:
            await leaves.write(worker.post(rpc("eth_gasPrice", id="leaves")))
            await until(lambda: upstream.bodies)
            await stays.write(worker.post(rpc("eth_gasPrice", id="stays")))
            (flight,) = worker.app.networks.routes[LIVE].state.flights.values()
            await until(lambda: len(flight.waiters) == 2)
        await until(lambda: len(worker.app.limiter.connections) == 1)
        gate.set()
        reply = await stays.reply()
        assert reply.json == {"jsonrpc": "2.0", "id": "stays", "result": "0x5"}
        assert reply.headers["x-cache"] == "join"
        assert len(upstream.bodies) == 1


# The end of a connection


@WAYS
@pytest.mark.parametrize("body", [CALL, rpc("eth_nope"), b"{}", b"[%b]" % CALL, rpc("eth_chainId")])
@on_uvloop
async def test_reply_to_the_last_request_of_a_connection_has_close(cache: dict[str, Any], body: bytes) -> None:
    async with (
        Scripted() as upstream,
        running_worker(upstream.url, **cache, server={"keepalive_requests": 5}) as worker,
    ):
        async with await worker.connect() as client:
            replies = [await client.send(worker.post(body)) for _ in range(5)]
            assert [each.closes for each in replies] == [False] * 4 + [True]
            assert await client.is_closed()
        async with await worker.connect() as client:
            await client.write(worker.post(body) * 8)
            replies = [await client.reply() for _ in range(5)]
            assert [each.closes for each in replies] == [False] * 4 + [True]
            assert await client.is_closed()


@on_uvloop
async def test_requests_behind_the_last_one_of_a_connection_are_not_served() -> None:
    """Even if it arrives in the turn in which the last but one is answered. RFC 9112, 9.6: a client that reads `close` assumes
    that later requests were not served."""
    gate = asyncio.Event()
    async with (
        Scripted(upstreams.held(gate, stub())) as upstream,
        running_worker(upstream.url, server={"keepalive_requests": 2}, **NO_CACHE) as worker,
        await worker.connect() as client,
    ):
        (front,) = await until(lambda: worker.app.limiter.connections)
        await client.write(worker.post(CALL))
        await until(lambda: upstream.bodies, every_s=0.001)
        await client.write(worker.post(rpc("eth_nope")))
        assert isinstance(front, FrontConnection)
        await until(lambda: front._reader.ahead, every_s=0.001)
        asked = worker.app.networks.routes[LIVE].upstreams[0]
        assert isinstance(asked, HttpUpstream)
        (connection,) = asked._open
        (flight,) = connection.sinks
        assert isinstance(flight, Flight)
        connection.data_received(http(answer({"id": int(flight.id)}, result="0x1")))
        front.data_received(worker.post(WRITE))
        assert (await client.reply()).json["result"] == "0x1"
        assert (await client.reply()).headers["connection"] == "close"
        assert await client.is_closed()
        assert asked.health.inflight == 0
        gate.set()


@WAYS
@on_uvloop
async def test_large_reply_can_be_the_last_of_its_connection(cache: dict[str, Any]) -> None:
    async with (
        Scripted(huge(3 << 20)) as upstream,
        running_worker(upstream.url, **cache, server={"keepalive_requests": 1}) as worker,
        await worker.connect() as client,
    ):
        reply = await client.send(worker.post(CALL))
        assert reply.closes
        assert set(reply.json["result"]) == {"a"}
        assert await client.is_closed()


@WAYS
@on_uvloop
async def test_draining_worker_answers_requests_under_way_and_closes(cache: dict[str, Any]) -> None:
    gate = asyncio.Event()
    server = {"drain_s": 5.0}
    async with (
        Scripted(upstreams.held(gate, stub())) as upstream,
        running_worker(upstream.url, **cache, server=server) as worker,
    ):
        clients = [await worker.connect() for _ in range(4)]
        ways: list[dict[str, str]] = [{}, {}, {"TE": "trailers"}, {}]
        bodies = [CALL, b"[%b]" % CALL, CALL, WRITE]
        for client, way, body in zip(clients, ways, bodies, strict=True):
            await client.write(worker.post(body, **way))
        idle = await worker.connect()
        await until(lambda: len(upstream.bodies) == 4)
        stopping = asyncio.get_running_loop().create_task(worker.app.stop())
        await until(lambda: worker.app.front.draining)
        await holds(lambda: not stopping.done(), for_s=0.05)
        gate.set()
        for client in clients:
            reply = await client.reply()
            assert reply.status == 200
            assert reply.closes
            assert await client.is_closed()
        assert await idle.is_closed()
        await stopping
        for client in (*clients, idle):
            await client.close()


@on_uvloop
async def test_leaving_worker_is_not_ready_and_still_serves() -> None:
    async with Scripted() as upstream, running_worker(upstream.url, **NO_CACHE) as worker:
        worker.app.leave()
        probe, client = await worker.connect(), await worker.connect()
        assert (await probe.send(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")).status == 503
        for _ in range(2):
            reply = await client.send(worker.post(CALL))
            assert is_good(reply)
            assert not reply.closes
        for each in (probe, client):
            await each.close()


@on_uvloop
async def test_request_during_a_drain_is_answered_and_closed() -> None:
    async with Scripted() as upstream, running_worker(upstream.url, **NO_CACHE, server={"drain_s": 5.0}) as worker:
        clients = [await worker.connect() for _ in range(3)]
        for client in clients:
            assert is_good(await client.send(worker.post(CALL)))
        stopping = asyncio.get_running_loop().create_task(worker.app.stop())
        await until(lambda: worker.app.front.draining)
        for client in clients:
            reply = await client.send(worker.post(CALL))
            assert is_good(reply)
            assert reply.closes
            assert await client.is_closed()
            await client.close()
        await stopping


# Deadlines


@on_uvloop
async def test_deadline_of_a_message_starts_with_its_first_byte() -> None:
    """A client that always sends the rest of one message with the start of the next must not time out."""
    limits = {"header_timeout_s": 0.5, "body_timeout_s": 0.5}
    async with (
        Scripted() as upstream,
        running_worker(upstream.url, server=limits) as worker,
        await worker.connect() as client,
    ):
        data = worker.post(CALL)
        for cut in (20, len(data) - 10):
            end = asyncio.get_running_loop().time() + 1.2
            await client.write(data[:cut])
            while asyncio.get_running_loop().time() < end:
                await asyncio.sleep(0.005)
                # The rest of one message and the start of the next: one message is always incomplete.
                await client.write(data[cut:] + data[:cut])
                assert is_good(await client.reply())
            await client.write(data[cut:])
            assert is_good(await client.reply())


@on_uvloop
async def test_body_in_very_small_pieces_costs_no_more_memory_than_its_size() -> None:
    async with Scripted() as upstream, running_worker(upstream.url) as worker, await worker.connect() as client:
        body = rpc("net_listening", ["x" * 20_000])
        data = worker.post(body)
        for at in range(0, len(data), 7):
            await client.write(data[at : at + 7])
            if not at % 70:
                await asyncio.sleep(0)
        assert (await client.reply()).json["result"]["params"] == ["x" * 20_000]
