"""Large replies that arrive in one piece: forwarded without a flight, with the same checks as others."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.http_client import Reply, rpc
from tests.web.worker import LIVE, NO_CACHE, on_uvloop, running_worker
from tests.wire.upstreams import Scripted, answer, http, replies, stub

SIZE = 90_000


def call(number: int = 1) -> bytes:
    return rpc("net_listening", [number], id=number)


def large(asked: Any) -> bytes:
    return answer(asked, result=f"{asked['params'][0]}" + "a" * SIZE)


def is_large(reply: Reply, number: int = 1) -> bool:
    expected = b'{"jsonrpc":"2.0","id":%d,"result":"%d%b"}' % (number, number, b"a" * SIZE)
    return (reply.status, reply.body) == (200, expected)


@on_uvloop
async def test_large_reply_has_the_callers_id_and_its_connection_serves_the_next_call() -> None:
    one = {LIVE: [{"url": "", "connections": 1}]}
    async with Scripted(replies(lambda asked: http(large(asked)))) as upstream:
        one[LIVE][0]["url"] = upstream.url
        async with running_worker(one, **NO_CACHE) as worker, await worker.connect() as client:
            for number in range(1, 6):
                assert is_large(await client.send(worker.post(call(number))), number)
            (pool,) = worker.app.networks.routes[LIVE].upstreams
            assert (pool.health.inflight, pool.health.bad, len(pool.idle)) == (0, 0, 1)
            assert pool.health.good >= 5
            assert upstream.connections == 1


@on_uvloop
async def test_pipelined_requests_are_answered_in_order_small_and_large() -> None:
    def alternating(asked: Any) -> bytes:
        return http(large(asked) if asked["params"][0] % 2 else answer(asked, result="small"))

    async with (
        Scripted(replies(alternating)) as upstream,
        running_worker(upstream.url, **NO_CACHE) as worker,
        await worker.connect() as client,
    ):
        await client.write(b"".join(worker.post(call(number)) for number in range(1, 9)))
        for number in range(1, 9):
            reply = await client.reply()
            assert is_large(reply, number) if number % 2 else reply.json == {
                    "jsonrpc": "2.0", "id": number, "result": "small",
                }  # fmt: skip


@on_uvloop
async def test_last_reply_of_a_connection_has_close_and_closes_it() -> None:
    async with (
        Scripted(replies(lambda asked: http(large(asked)))) as upstream,
        running_worker(upstream.url, server={"keepalive_requests": 1}, **NO_CACHE) as worker,
        await worker.connect() as client,
    ):
        reply = await client.send(worker.post(call()))
        assert is_large(reply)
        assert reply.headers["connection"] == "close"
        assert await client.reader.read() == b""


@pytest.mark.parametrize(
    "spoil",
    [
        lambda body: http(re.sub(rb'"id":\d+', b'"id":"x"', body)),
        lambda body: http(re.sub(rb'"id":\d+', b'"id":699', body)),
        lambda body: http(body, Content_Encoding="gzip"),
        lambda body: http(body.replace(b'"result":', b'"Result":', 1)),
        lambda body: http(body + b"HTTP/1.1 200 OK\r\n\r\n", length=len(body) - 1),
    ],
    ids=["id of another kind", "another's id", "compressed", "no result", "more than its length"],
)
@on_uvloop
async def test_reply_that_does_not_match_the_call_is_not_forwarded(spoil: Any) -> None:
    async with (
        Scripted(replies(lambda asked: spoil(large(asked)))) as upstream,
        running_worker(upstream.url, **NO_CACHE) as worker,
    ):
        assert not is_large(await worker.send(call()))
        upstream.script = stub()
        assert (await worker.send(call())).json["result"] == {"method": "net_listening", "params": [1]}
