"""Large results in batches and on sockets: streamed in order, held within bounds, and refused beyond them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from tests.http_client import HttpClient, rpc
from tests.service import until
from tests.sockets import bare
from tests.web.test_front_backpressure import MB, resident_bytes, settled, slow_client
from tests.web.worker import LIVE, NO_CACHE, Worker, on_uvloop, running_worker
from tests.wire.upstreams import PIECE, Exchange, Scripted, head_of

# 40 × 20 MB: what the worker may hold of it, and what the rest of this process may need besides.
BOUND = 64 * MB
SLACK = 80 * MB
# An account may hold 4 MB of replies.
HELD = 4 * MB * 16 // 5
SHORT: dict[str, Any] = {"rpc": {"max_batch_reply_bytes": 8 * MB}, "server": {"max_held_bytes": HELD}}
# A method that is passed on as it is, and is neither cached nor about a block.
METHOD = "net_listening"
_serial = itertools.count()


class SizedUpstream:
    """The result of a call is a string as long as its first param; after its second param, in milliseconds."""

    def __init__(self, *, has_length: bool = True, breaks_at: int = 0) -> None:
        self.has_length = has_length
        self.breaks_at = breaks_at

    async def __call__(self, exchange: Exchange) -> None:
        body = await exchange.call()
        calls = body if isinstance(body, list) else [body]
        await asyncio.sleep(max(_number(call, 1) for call in calls) / 1000)
        ends = b"[]" if isinstance(body, list) else b""
        starts = [b'{"jsonrpc":"2.0","id":%d,"result":"' % call["id"] for call in calls]
        sizes = [_number(call, 0) for call in calls]
        total = (
            sum(len(start) + size + 2 for start, size in zip(starts, sizes, strict=True)) + len(calls) - 1 + len(ends)
        )
        framing = {"Content-Length": str(total)} if self.has_length else {"Transfer-Encoding": "chunked"}
        await exchange.send(head_of(200, framing))
        await self._part(exchange, ends[:1])
        for index, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            await self._part(exchange, (b"," if index else b"") + start)
            await self._result(exchange, size)
            await self._part(exchange, b'"}')
        await self._part(exchange, ends[1:])
        if not self.has_length:
            await exchange.send(b"0\r\n\r\n")

    async def _result(self, exchange: Exchange, size: int) -> None:
        for at in range(0, size, PIECE):
            if self.breaks_at and at > self.breaks_at:
                exchange.close()
                raise ConnectionResetError
            await self._part(exchange, b"a" * min(PIECE, size - at))

    async def _part(self, exchange: Exchange, part: bytes) -> None:
        exchange.server.sent += len(part)
        if part:
            await exchange.send(part if self.has_length else b"%x\r\n%b\r\n" % (len(part), part))


def _number(call: dict[str, Any], index: int) -> int:
    params = call["params"]
    return params[index] if len(params) > index else 0


def sized(size: int, after_ms: int = 0, **members: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": next(_serial), "method": METHOD, "params": [size, after_ms], **members}


@asynccontextmanager
async def large_harness(
    upstream: SizedUpstream | None = None, *, batch: int = 20, **sections: Any
) -> AsyncIterator[tuple[Worker, Scripted]]:
    async with Scripted(upstream or SizedUpstream()) as server:
        given = {"url": server.url, "batch": batch}
        async with running_worker({LIVE: [given]}, **NO_CACHE, **sections) as worker:
            worker.add_key("attacker")
            yield worker, server
            await until(lambda: not worker.held_bytes)


async def squeezed_reply(client: HttpClient) -> Any:
    """The reply as JSON with long results left out of memory: of a run of letters only the last few are kept."""
    head = (await client.reader.readuntil(b"\r\n\r\n")).lower()
    assert b" 200 " in head.partition(b"\r\n")[0], head
    assert b"transfer-encoding: chunked" in head
    kept, size = b"", 0
    while length := int(await client.reader.readuntil(b"\r\n"), 16):
        size += length
        kept += (await client.reader.readexactly(length)).replace(b"a" * 1000, b"")
        assert await client.reader.readexactly(2) == b"\r\n"
    await client.reader.readexactly(2)
    return orjson.loads(kept), size


async def good_calls(worker: Worker, ended: asyncio.Event) -> int:
    count = 0
    async with await worker.connect() as client:
        while not ended.is_set():
            # The upstream, which sends 800 MB, shares the loop with the worker.
            reply = await client.send(worker.post(rpc("net_listening", [3])), within_s=30.0)
            assert reply.json["result"] == "aaa", reply
            count += 1
            await asyncio.sleep(0.002)
    return count


@pytest.mark.parametrize("batch", [1, 20])
@pytest.mark.parametrize("has_length", [True, False])
@on_uvloop
async def test_huge_batch_is_answered_within_its_bounds_beside_other_calls(has_length: bool, batch: int) -> None:
    async with large_harness(SizedUpstream(has_length=has_length), batch=batch) as (worker, _):
        calls = [sized(20_000_000) for _ in range(40)]
        ended = asyncio.Event()
        before, most = resident_bytes(), 0
        async with asyncio.TaskGroup() as group, await worker.connect() as client:
            good = group.create_task(good_calls(worker, ended))
            reply = group.create_task(squeezed_reply(client))
            await client.write(worker.post(orjson.dumps(calls), key="attacker"))
            while not reply.done():
                await asyncio.sleep(0.01)
                most = max(most, resident_bytes() - before)
            ended.set()
        items, size = reply.result()
        assert [item["id"] for item in items] == [call["id"] for call in calls]
        codes = [item["error"]["code"] for item in items if "error" in item]
        assert set(codes) == {-32005}
        assert 1 <= len(items) - len(codes) <= 4
        assert "error" not in items[0]
        assert size < BOUND + 20_000_000 + 100_000
        assert most < BOUND + SLACK, most / MB
        assert good.result() > 0


@pytest.mark.parametrize("batch", [1, 20])
@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize("seed", range(4))
@on_uvloop
async def test_items_of_a_large_batch_come_in_order_and_whole(seed: int, has_length: bool, batch: int) -> None:
    rng = random.Random(seed)
    async with large_harness(SizedUpstream(has_length=has_length), batch=batch) as (worker, _):
        for _ in range(3):
            sizes = [rng.choice((0, 1, 100, 70_000, 300_000, 1_500_000)) for _ in range(rng.randrange(1, 25))]
            calls: list[Any] = [sized(size, rng.choice((0, 0, 5, 30))) for size in sizes]
            expected: list[Any] = [("a" * call["params"][0]) for call in calls]
            calls.insert(rng.randrange(len(calls) + 1), 7)
            expected.insert(calls.index(7), None)
            if rng.random() < 0.5:
                calls.append({"jsonrpc": "2.0", "method": METHOD, "params": [1_200_000]})
            reply = await worker.send(orjson.dumps(calls), key="attacker")
            assert [item.get("result") for item in reply.json] == expected
            async with bare(worker, key="attacker") as socket:
                socket.write(orjson.dumps(calls))
                assert [item.get("result") for item in await socket.json()] == expected


@on_uvloop
async def test_client_that_reads_slowly_gets_all_and_costs_no_more_memory() -> None:
    async with large_harness() as (worker, upstream):
        client = await slow_client(worker)
        loop = asyncio.get_running_loop()
        calls = [sized(4_000_000) for _ in range(12)]
        before = resident_bytes()
        await loop.sock_sendall(client, worker.post(orjson.dumps(calls), key="attacker"))
        await settled(upstream)
        assert resident_bytes() - before < BOUND + SLACK
        kept, letters = b"", 0
        while not kept.endswith(b"]\r\n0\r\n\r\n"):
            part = await loop.sock_recv(client, MB)
            assert part
            letters += part.count(b"a")
            kept = kept[-100:] + part
        assert letters > 12 * 4_000_000
        client.close()


@pytest.mark.parametrize("has_length", [True, False])
@on_uvloop
async def test_results_beyond_what_an_account_may_hold_wait_if_their_length_is_known(has_length: bool) -> None:
    async with large_harness(SizedUpstream(has_length=has_length), batch=1, **SHORT) as (worker, _):
        # The first is slow, so the others wait for it: 4 MB of them fit, and the batch's own bound comes later.
        calls = [sized(10, 300), *(sized(1_500_000) for _ in range(4))]
        items = (await worker.send(orjson.dumps(calls), key="attacker")).json
        sizes = [len(item["result"]) for item in items if "result" in item]
        assert sizes == [10, *[1_500_000] * (4 if has_length else len(sizes) - 1)]
        assert {item["error"]["code"] for item in items if "error" in item} == (set() if has_length else {-32005})
        assert len(sizes) > 1


@on_uvloop
async def test_result_waits_unread_until_its_turn_if_it_is_larger_than_all_room() -> None:
    async with large_harness(batch=1, **SHORT) as (worker, upstream), await worker.connect() as client:
        calls = [sized(10, 1500), sized(6_000_000), sized(1_500_000)]
        await client.write(worker.post(orjson.dumps(calls), key="attacker"))
        await until(lambda: "0 waiting" not in repr(worker.app.budget))
        await settled(upstream)
        assert worker.held_bytes < 2 * MB
        items, _size = await squeezed_reply(client)
        assert ["result" in item for item in items] == [True, True, True]
        assert "0 waiting" in repr(worker.app.budget)


@on_uvloop
async def test_result_that_waits_for_room_gives_its_connection_to_others() -> None:
    """The only reader does not read, so no room comes free while other calls need the upstream's connections."""
    async with (
        Scripted(SizedUpstream()) as server,
        running_worker({LIVE: [{"url": server.url, "connections": 2}]}, **NO_CACHE, **SHORT) as worker,
    ):
        worker.add_key("attacker")
        held = worker.app.budget
        calls = [sized(3_000_000), *(sized(1_600_000) for _ in range(3))]
        with contextlib.closing(await slow_client(worker)) as client:
            request = worker.post(orjson.dumps(calls), key="attacker")
            await asyncio.get_running_loop().sock_sendall(client, request)
            await until(lambda: "1 waiting" in repr(held))

            async def served() -> bool:
                return (await worker.send(orjson.dumps(sized(10)))).status == 200

            await until(served)
        await until(lambda: not worker.held_bytes and "0 waiting" in repr(held))


@on_uvloop
async def test_results_beyond_what_a_batch_may_have_are_refused() -> None:
    async with large_harness(batch=1, **SHORT) as (worker, _):
        calls = [sized(10, 300), *(sized(1_500_000) for _ in range(4))]
        # Another key has its own share.
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(worker.send(orjson.dumps(calls[:3]), key=key)) for key in ("main", "attacker")]
        assert all("result" in item for each in asked for item in each.result().json)
        # The bound of the batch.
        items = (await worker.send(orjson.dumps([sized(3_500_000, n * 20) for n in range(4)]))).json
        assert ["result" in item for item in items] == [True, True, False, False]
        assert "8 MiB" in items[2]["error"]["message"]


@pytest.mark.parametrize("together", [False, True])
@on_uvloop
async def test_large_results_on_a_socket_are_bounded(together: bool) -> None:
    async with large_harness(batch=1, **SHORT) as (worker, _), bare(worker, key="attacker") as socket:
        calls = [sized(1_500_000) for _ in range(6)]
        if together:
            socket.write(orjson.dumps(calls))
            replies = await socket.json()
        else:
            for call in calls:
                socket.write(orjson.dumps(call))
            replies = [await socket.json() for _ in calls]
        results = [reply["result"] for reply in replies if "result" in reply]
        # Single results wait for each other. A batch is one message, so its results cannot.
        assert 2 <= len(results) < 6 if together else len(results) == 6
        assert {len(result) for result in results} == {1_500_000}
        assert {reply["error"]["code"] for reply in replies if "error" in reply} == ({-32005} if together else set())


@pytest.mark.parametrize("has_left", [False, True])
@on_uvloop
async def test_memory_of_a_client_that_does_not_read_its_socket_stays_bounded(has_left: bool) -> None:
    async with large_harness(batch=1, **SHORT) as (worker, upstream), contextlib.AsyncExitStack() as stack:
        sockets = [await stack.enter_async_context(bare(worker, key="attacker", small_buffer=True)) for _ in range(8)]
        for socket in sockets:
            socket.write(orjson.dumps([sized(3_500_000), sized(10)]))
        await settled(upstream)
        await until(lambda: worker.held_bytes > 2 * MB)
        assert worker.held_bytes <= 4 * MB
        if not has_left:
            for socket in sockets:
                assert len(await socket.json()) == 2
            await until(lambda: not worker.held_bytes)


@on_uvloop
async def test_large_batch_that_aiohttp_serves_is_bounded_too() -> None:
    async with large_harness(batch=1, **SHORT) as (worker, _), await worker.connect() as client:
        for calls in ([sized(10, 300), *(sized(1_500_000) for _ in range(4))], sized(5_000_000), sized(3_000_000)):
            body = orjson.dumps(calls)
            head = f"POST /v1/rpc/{LIVE} HTTP/1.1\r\nHost: p\r\nX-API-Key: {worker.keys['attacker']}\r\n".encode()
            reply = await client.send(
                head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            )
            items = reply.json if isinstance(reply.json, list) else [reply.json]
            assert {item["error"]["code"] for item in items if "error" in item} <= {-32005}
            sizes = [len(item["result"]) for item in items if "result" in item]
            assert sizes == ([10, 1_500_000, 1_500_000] if isinstance(calls, list) else [3_000_000] if sizes else [])


@pytest.mark.parametrize("first_ms", [0, 200])
@on_uvloop
async def test_result_that_breaks_off_is_an_error_or_ends_the_connection(first_ms: int) -> None:
    async with (
        large_harness(SizedUpstream(breaks_at=3_000_000), batch=1) as (worker, _),
        await worker.connect() as client,
    ):
        calls = [sized(10, first_ms), sized(5_000_000), sized(10)]
        await client.write(worker.post(orjson.dumps(calls), key="attacker"))
        if first_ms:
            items, _size = await squeezed_reply(client)
            assert ["result" in item for item in items] == [True, False, True]
        else:
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await squeezed_reply(client)


@on_uvloop
async def test_client_that_leaves_a_large_batch_leaves_nothing_behind() -> None:
    async with large_harness(batch=1) as (worker, _):
        async with await worker.connect() as client:
            await client.write(
                worker.post(orjson.dumps([sized(10, 5000), *(sized(5_000_000) for _ in range(5))]), key="attacker")
            )
            await until(lambda: worker.held_bytes > 20 * MB)
            client.writer.transport.abort()
        await until(lambda: not worker.held_bytes)
        assert worker.app.networks.routes[LIVE].upstreams[0].health.inflight == 0


@on_uvloop
async def test_client_that_leaves_while_its_result_waits_for_room_leaves_nothing_behind() -> None:
    async with large_harness(batch=1, **SHORT) as (worker, _), await worker.connect() as first:
        await first.write(worker.post(orjson.dumps([sized(10, 1500), sized(3_000_000)]), key="attacker"))
        await until(lambda: worker.held_bytes > 2 * MB)
        async with await worker.connect() as second:
            # aiohttp serves chunked requests.
            body = orjson.dumps(sized(1_600_000))
            head = f"POST /v1/rpc/{LIVE} HTTP/1.1\r\nHost: p\r\nX-API-Key: {worker.keys['attacker']}\r\n".encode()
            await second.write(head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
            await until(lambda: "1 waiting" in repr(worker.app.budget), every_s=0.01)
            second.writer.transport.abort()
        await until(lambda: "0 waiting" in repr(worker.app.budget), every_s=0.01)
        items, _size = await squeezed_reply(first)
        assert ["result" in item for item in items] == [True, True]


@pytest.mark.parametrize("size", [0, 1, 50_000])
@on_uvloop
async def test_batch_of_small_results_is_one_reply_with_a_length(size: int) -> None:
    async with large_harness() as (worker, upstream):
        calls: Sequence[Any] = [sized(size) for _ in range(5)]
        reply = await worker.send(orjson.dumps(calls))
        assert "content-length" in reply.headers
        assert [len(item["result"]) for item in reply.json] == [size] * 5
        assert len(upstream.bodies) == 1
