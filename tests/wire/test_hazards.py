"""Upstreams that misbehave, as a caller sees it: what is no good reply is never relayed, and the next call goes well."""

from __future__ import annotations

import asyncio
import gzip
import time
from typing import Any

import pytest

from proxy.services.rpc.flights import Flight
from proxy.wire import call_queue
from proxy.wire.http_upstream import HttpUpstream
from tests.http_client import Reply, rpc
from tests.service import until
from tests.web.worker import LIVE, NO_CACHE, Worker, on_uvloop, running_worker
from tests.wire import upstreams
from tests.wire.upstreams import CHUNKED, Exchange, Script, Scripted, answer, chunked, http, replies, stub

CALL = rpc("net_listening", [1])
GOOD = b'{"jsonrpc":"2.0","id":1,"result":{"method":"net_listening","params":[1]}}'
WRITE = rpc("eth_sendRawTransaction", ["0x02"])
WAYS = pytest.mark.parametrize("cache", [{}, NO_CACHE], ids=["cached", "short"])
# Only bad upstreams send this; it must never appear in a reply.
SECRET = "relayed"


def is_good(reply: Reply) -> bool:
    return (reply.status, reply.body) == (200, GOOD)


def says(make: Any) -> Script:
    return replies(lambda call: make(answer(call, result=SECRET), call))


def two_replies(body: bytes, call: Any) -> bytes:
    return http(b'{"jsonrpc":"2.0","id":0,"result":"relayed"}') + http(body)


BAD: dict[str, Script] = {
    "garbage": says(lambda body, _: b"\0\0" + body + b"\r\n\r\n"),
    "wrong id": says(lambda body, call: http(answer({"id": call["id"] + 1}, result=SECRET))),
    "id as text": says(lambda body, call: http(answer({"id": str(call["id"])}, result=SECRET))),
    "no id": says(lambda body, _: http(b'{"jsonrpc":"2.0","result":"relayed"}')),
    "null id": says(lambda body, _: http(b'{"jsonrpc":"2.0","id":null,"result":"relayed"}')),
    "early": upstreams.early,
    "two, the first not ours": says(two_replies),
    "half": upstreams.half(0.9),
    "nothing": upstreams.half(0.0),
    "reset": upstreams.reset,
    "in an unknown encoding": says(lambda body, _: http(gzip.compress(body), Content_Encoding="compress")),
    "says compressed": says(lambda body, _: http(body, Content_Encoding="gzip")),
    "bomb": says(lambda body, _: http(gzip.compress(b"0" * (10 << 20)), Content_Encoding="gzip")),
    "page": says(lambda body, _: http(b"<html>relayed</html>", status=200)),
    "bad gateway": says(lambda body, _: http(b"<html>relayed</html>", status=502)),
    "redirect": says(lambda body, _: http(b"relayed", status=302, Location="http://127.0.0.1:1/")),
    "empty": says(lambda body, _: http(b"")),
    "no content": says(lambda body, _: b"HTTP/1.1 204 No Content\r\n\r\n"),
    "half of JSON": says(lambda body, _: http(body[:-1])),
    "more than JSON": says(lambda body, _: http(body + b"x")),
    "array": says(lambda body, _: http(b"[%b]" % body)),
    "result and error": says(lambda body, call: http(answer(call, result=SECRET, error={"code": 1, "message": "x"}))),
    "neither": says(lambda body, call: http(answer(call))),
    "not UTF-8": says(lambda body, _: http(body.replace(b"relayed", b"relayed\xff"))),
    "deep": says(lambda body, _: http(body.replace(b'"relayed"', b"[" * 60_000))),
    "no length": upstreams.until_close(lambda call: answer(call, result=SECRET)[:-2]),
    "bad chunks": says(lambda body, _: CHUNKED + chunked(body, 5)[:-5] + b"zz\r\n"),
    "two lengths": says(
        lambda body, _: http(body).replace(b"Content-Length", b"Content-Length: 1\r\nContent-Length", 1)
    ),
    "switching": says(lambda body, _: b"HTTP/1.1 101 Switching Protocols\r\n\r\n" + body),
    "endless head": says(lambda body, _: b"HTTP/1.1 200 OK\r\n" + b"X: relayed\r\n" * 10_000),
}


@WAYS
@pytest.mark.parametrize("name", BAD)
@on_uvloop
async def test_bad_reply_is_never_relayed(cache: dict[str, Any], name: str) -> None:
    async with Scripted() as upstream, running_worker(upstream.url, **cache) as worker:
        assert is_good(await worker.send(CALL))
        for body in (CALL, b"[%b]" % CALL):
            upstream.script = BAD[name]
            said = await worker.send(body)
            assert SECRET.encode() not in said.body
            if body is CALL:
                assert "upstream" in said.fault(500)["message"]
                assert "127.0.0.1" not in said.body.decode()
            else:
                assert [item["error"]["code"] for item in said.json] == [-32603]
            assert said.headers["x-ratelimit-remaining"] == "100000", "what we fail is free"
            upstream.script = stub()
            assert is_good(await worker.send(CALL))


async def recovered(worker: Worker) -> None:
    """The breaker may need its moment: then calls go well again."""

    async def is_back() -> bool:
        return is_good(await worker.send(CALL))

    await until(is_back)


@on_uvloop
async def test_bad_upstream_does_not_spoil_a_good_one() -> None:
    async with Scripted() as good, Scripted() as bad, running_worker({LIVE: [bad.url, good.url]}, **NO_CACHE) as worker:
        for script in BAD.values():
            bad.script = script
            for _ in range(3):
                assert is_good(await worker.send(CALL))
        assert good.bodies
        assert bad.bodies


@pytest.mark.parametrize("name", ["garbage", "wrong id", "half", "nothing", "reset", "bad gateway", "no length"])
@pytest.mark.parametrize("depth", [1, 4])
@on_uvloop
async def test_write_is_sent_once_whatever_the_outcome(name: str, depth: int) -> None:
    async with Scripted() as one, Scripted() as two, running_worker({LIVE: [
        {"url": one.url, "depth": depth}, {"url": two.url, "depth": depth},
    ]}) as worker:  # fmt: skip
        for _ in range(4):
            assert is_good(await worker.send(CALL))
        one.script = two.script = BAD[name]
        one.bodies.clear()
        two.bodies.clear()
        (await worker.send(WRITE)).fault(500)
        assert len(one.bodies) + len(two.bodies) == 1


# Connections that end


@WAYS
@pytest.mark.parametrize("depth", [1, 4])
@on_uvloop
async def test_reads_do_not_notice_an_upstream_that_closes_its_idle_connections(
    cache: dict[str, Any], depth: int
) -> None:
    async with (
        Scripted() as upstream,
        running_worker({LIVE: [{"url": upstream.url, "depth": depth}]}, **cache) as worker,
        await worker.connect() as client,
    ):
        for turn in range(100):
            assert is_good(await client.send(worker.post(CALL))), turn
            upstream.drop_all()
            for _ in range(turn % 4):
                await asyncio.sleep(0)


@WAYS
@pytest.mark.parametrize("how", ["close", "reset", "says close"])
@pytest.mark.parametrize("depth", [1, 4])
@on_uvloop
async def test_reads_survive_an_upstream_that_ends_its_connections_now_and_then(
    cache: dict[str, Any], how: str, depth: int
) -> None:
    """Also with several calls in flight on each connection: those without a reply are sent again, and each gets its own."""
    served: dict[int, int] = {}

    async def act(exchange: Exchange) -> None:
        call = await exchange.call()
        place = id(exchange.writer)
        served[place] = served.get(place, 0) + 1
        last = served[place] % 20 == 0
        extra: dict[str, Any] = {"Connection": "close"} if last and how == "says close" else {}
        await exchange.send(http(answer(call, result=call["params"]), **extra))
        if last:
            served.pop(place)
            if how == "reset":
                exchange.reset()
            else:
                exchange.close()

    async with (
        Scripted(act) as upstream,
        running_worker({LIVE: [{"url": upstream.url, "depth": depth, "connections": 8}]}, **cache) as worker,
    ):

        async def client(first: int) -> None:
            async with await worker.connect() as connection:
                for number in range(first, first + 25):
                    said = await connection.send(worker.post(rpc("net_listening", [number], id=number)))
                    assert said.json == {"jsonrpc": "2.0", "id": number, "result": [number]}, said

        async with asyncio.TaskGroup() as group:
            for first in range(0, 800, 100):
                group.create_task(client(first))
        assert upstream.connections >= 200 // 20


@on_uvloop
async def test_upstream_that_never_answers_is_given_up_and_its_connection_dropped() -> None:
    async with (
        Scripted(upstreams.slow(60, stub())) as upstream,
        running_worker(upstream.url, rpc={"call_timeout_s": 0.2}, **NO_CACHE) as worker,
    ):
        for body in (CALL, WRITE):
            (await worker.send(body)).fault(504)
            await until(lambda: not upstream.alive)
        upstream.script = stub()
        assert is_good(await worker.send(CALL))


@on_uvloop
async def test_no_call_is_sent_behind_one_that_was_given_up() -> None:
    """The connection stays open for a call that was sent before. Replies come in order, and this one never gets any."""
    hung: list[Any] = []

    async def act(exchange: Exchange) -> None:
        call = await exchange.call()
        if not hung or hung == [exchange.writer]:
            hung[:] = [exchange.writer]
            await asyncio.sleep(60)
        await exchange.send(http(answer(call, result="0x1")))

    async with (
        Scripted(act) as upstream,
        running_worker({LIVE: [{"url": upstream.url, "depth": 4}]}, rpc={"call_timeout_s": 0.6}, **NO_CACHE) as worker,
        asyncio.TaskGroup() as group,
    ):
        first = group.create_task(worker.send(CALL))
        await asyncio.sleep(0.4)
        second = group.create_task(worker.send(CALL))
        (await first).fault(504)
        assert (await worker.send(CALL)).json["result"] == "0x1"
        assert not second.done()
        (await second).fault(504)


@on_uvloop
async def test_upstream_that_asks_for_a_pause_gets_it_while_another_takes_calls() -> None:
    script = replies(lambda _: http(b"slow down", status=429, Retry_After="2"))
    given = {"tier": 0}, {"tier": 1}
    async with Scripted(script) as paused, Scripted(stub()) as other:
        upstreams_of = [{"url": each.url, **options} for each, options in zip((paused, other), given, strict=True)]
        async with running_worker({LIVE: upstreams_of}, **NO_CACHE) as worker:
            health = worker.app.networks.routes[LIVE].upstreams[0].health
            for number in range(20):
                assert is_good(await worker.send(CALL)), number
            rests_until = health.rests_until
            while time.monotonic() < rests_until - 0.1:
                assert is_good(await worker.send(CALL))
                await asyncio.sleep(0.02)
            assert sum(b"net_listening" in body for body in paused.bodies) == 1


@on_uvloop
async def test_sole_upstream_that_asks_for_a_pause_is_tried_a_few_times_only() -> None:
    """There is no other to ask, and many upstreams ask for a longer pause than they need: see `core/upstream_health.py`."""
    script = replies(lambda _: http(b"slow down", status=429, Retry_After="2"))
    async with Scripted(script) as upstream, running_worker(upstream.url, **NO_CACHE) as worker:
        # The call waits for its turn at the upstream, then it fails.
        (await worker.send(CALL)).fault(503)
        assert 1 <= len(upstream.bodies) <= 10
        upstream.script = stub()
        await recovered(worker)


@WAYS
@on_uvloop
async def test_slow_reply_after_its_caller_left_does_not_reach_the_next(cache: dict[str, Any]) -> None:
    async with (
        Scripted(upstreams.slow(0.05, replies(lambda call: http(answer(call, result=SECRET))))) as upstream,
        running_worker({LIVE: [{"url": upstream.url, "connections": 1}]}, **cache) as worker,
    ):
        for _ in range(5):
            async with await worker.connect() as client:
                await client.write(worker.post(CALL))
                await asyncio.sleep(0.02)
            await until(lambda: not worker.app.limiter.connections)
        upstream.script = stub()
        assert is_good(await worker.send(CALL))


@on_uvloop
async def test_refusal_that_comes_after_the_reply_is_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second upstream has too many calls waiting and refuses one turn later; the first may reply in between."""
    gate = asyncio.Event()
    script = upstreams.held(gate, stub())
    async with (
        Scripted(script) as one,
        Scripted(script) as two,
        running_worker({LIVE: [one.url, two.url]}, **NO_CACHE) as worker,
        await worker.connect() as client,
    ):
        route = worker.app.networks.routes[LIVE]
        await client.write(worker.post(rpc("net_listening", ["first"], id=7)))
        await until(lambda: one.bodies or two.bodies, every_s=0.001)
        (connection,) = (
            each for upstream in route.upstreams if isinstance(upstream, HttpUpstream) for each in upstream._open
        )
        (flight,) = connection.sinks
        assert isinstance(flight, Flight)
        monkeypatch.setattr(call_queue, "MAX_WAITING", 0)
        flight.on_tick(connection, flight.began + 3.0)
        assert flight.tried == 0b11
        connection.data_received(http(answer({"id": int(flight.id)}, result="0x7")))
        assert (await client.reply()).json == {"jsonrpc": "2.0", "id": 7, "result": "0x7"}
        monkeypatch.undo()
        gate.set()
        assert (await client.send(worker.post(rpc("net_listening", ["second"], id=8)))).json["id"] == 8
        assert [upstream.health.inflight for upstream in route.upstreams] == [0, 0]
