"""Connections to upstreams that do all that an upstream may do, and much that none should."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from proxy.settings import LinkSettings
from proxy.wire.address import UpstreamAddress
from proxy.wire.call_queue import LONGEST_ABANDONED_S
from proxy.wire.upstream import STALE, UNCHECKED, Upstream, UpstreamConnection
from proxy.wire.write_buffer import WriteBuffer
from tests.service import until
from tests.web.worker import on_uvloop
from tests.wire import upstreams
from tests.wire.recorded_calls import GOOD, RecordedCall, pool, send_call, still_works
from tests.wire.upstreams import CHUNKED, Exchange, Script, answer, chunked, http, replies, stub

# Replies, however they come


@on_uvloop
async def test_reply_cut_at_every_byte() -> None:
    whole = http(answer({"id": 1}, result="0x1"))
    cut = 0

    async def act(exchange: Exchange) -> None:
        await exchange.body()
        await exchange.send(whole[:cut])
        for _ in range(3):
            await asyncio.sleep(0)
        await exchange.send(whole[cut:])

    async with pool(act) as (upstream, server):
        for cut in range(1, len(whole)):
            assert await send_call(upstream).result() == "0x1", cut
        assert server.connections == 1


BODY = answer({"id": 1}, result="0x1")
WAYS: dict[str, tuple[bytes, bool]] = {
    "chunks": (CHUNKED + chunked(BODY, 7), True),
    "chunks of one byte": (CHUNKED + chunked(BODY, 1), True),
    "chunks with trailers": (CHUNKED + chunked(BODY, 50)[:-2] + b"X-Sum: 1\r\n\r\n", True),
    "continue first": (b"HTTP/1.1 100 Continue\r\n\r\n" + http(BODY), True),
    "hints first": (b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" * 3 + http(BODY), True),
    "hints before chunks": (b"HTTP/1.1 103 E\r\n\r\n" + CHUNKED + chunked(BODY, 9), True),
    "close": (http(BODY, Connection="close"), False),
    "old version": (http(BODY).replace(b"HTTP/1.1", b"HTTP/1.0"), False),
    "cookies": (http(BODY).replace(b"\r\n\r\n", b"\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\n\r\n", 1), True),
}


@pytest.mark.parametrize("name", WAYS)
@on_uvloop
async def test_reply_in_another_form_is_read_and_the_connection_used_again_if_it_may_be(name: str) -> None:
    data, stays = WAYS[name]
    async with pool(replies(lambda _: data)) as (upstream, server):
        for _ in range(3):
            assert await send_call(upstream).result() == "0x1"
        assert server.connections == (1 if stays else 3)
        cuts = iter(range(1, len(data)))

        async def act(exchange: Exchange) -> None:
            await exchange.body()
            cut = next(cuts)
            await exchange.send_each((data[:cut], data[cut:]))

        server.script = act
        for _ in range(1, len(data)):
            assert await send_call(upstream).result() == "0x1"


@on_uvloop
async def test_reply_without_a_length_ends_with_the_connection() -> None:
    async with pool(upstreams.until_close(lambda call: answer(call, result="0x1"))) as (upstream, server):
        for _ in range(2):
            assert await send_call(upstream).result() == "0x1"
        assert server.connections == 2
        await still_works(upstream, server)


@on_uvloop
async def test_reply_without_a_body_has_an_empty_body() -> None:
    async with pool(replies(lambda _: b"HTTP/1.1 204 No Content\r\n\r\n")) as (upstream, server):
        for _ in range(2):
            call = send_call(upstream)
            await call.done.wait()
            assert (call.events, call.status, call.body) == (["reply"], 204, b"")
        assert server.connections == 1


# Replies that are none

BAD: dict[str, bytes] = {
    "garbage": b"\x00\xff garbage \r\n\r\n",
    "page": b"<html>502</html>\r\n\r\n",
    "two lengths": http(BODY).replace(b"Content-Length", b"Content-Length: 3\r\nContent-Length", 1),
    "length and chunks": http(BODY).replace(b"Content-Length", b"Transfer-Encoding: chunked\r\nContent-Length", 1),
    "bad length": http(BODY).replace(b"Content-Length: ", b"Content-Length: -", 1),
    "bad chunk": CHUNKED + b"zz\r\n",
    "bad chunk end": CHUNKED + b"2\r\nabc\r\n",
    "endless head": b"HTTP/1.1 200 OK\r\n" + b"X-Wide: %b\r\n" % (b"a" * 1000) * 100,
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n",
    "tunnelled": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
}


@pytest.mark.parametrize("name", BAD)
@on_uvloop
async def test_malformed_reply_fails_the_call_and_ends_the_connection(name: str) -> None:
    async with pool(replies(lambda _: BAD[name])) as (upstream, server):
        call = send_call(upstream)
        assert "malformed" in await call.failure()
        assert (call.events, call.sent) == (["fail"], True)
        await until(lambda: not server.writers)
        await still_works(upstream, server)
        assert server.connections == 2


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.99])
@on_uvloop
async def test_half_a_reply_fails_the_call(share: float) -> None:
    async with pool(upstreams.half(share)) as (upstream, server):
        call = send_call(upstream)
        assert await call.failure() == "connection lost"
        assert call.sent
        await still_works(upstream, server)


@pytest.mark.parametrize("script", [upstreams.reset, upstreams.close_unread])
@on_uvloop
async def test_connection_that_breaks_fails_the_call(script: Script) -> None:
    async with pool(script) as (upstream, server):
        call = send_call(upstream)
        assert await call.failure()
        assert call.sent
        await still_works(upstream, server)


@pytest.mark.parametrize("apart", [False, True])
@on_uvloop
async def test_second_reply_to_one_call_is_dropped(apart: bool) -> None:
    async def act(exchange: Exchange) -> None:
        call = await exchange.call()
        good, stray = http(answer(call, result="0x1")), http(answer(call, result="stray"))
        await exchange.send_each((good, stray) if apart else (good + stray,))

    async with pool(act, limit=1) as (upstream, server):
        for number in range(1, 5):
            call = send_call(upstream, number)
            await call.done.wait()
            assert call.events == ["reply"]
            assert b"stray" not in call.body
            await until(lambda: not server.writers)
        await still_works(upstream, server)


@on_uvloop
async def test_early_reply_is_taken_and_the_next_call_is_not_mistaken() -> None:
    async with pool(upstreams.early, limit=1) as (upstream, server):
        for _ in range(3):
            assert await send_call(upstream).result() == "early"
        assert server.connections == 1
        await still_works(upstream, server)


@on_uvloop
async def test_bytes_on_an_idle_connection_end_it_before_it_is_used_again() -> None:
    async with pool() as (upstream, server):
        await still_works(upstream, server)
        (writer,) = server.writers
        writer.write(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
        await until(lambda: not upstream.idle)
        await still_works(upstream, server)
        assert server.connections == 2


# Connections that end between calls


@on_uvloop
async def test_idle_connections_that_the_upstream_closes_are_noticed() -> None:
    async with pool() as (upstream, server):
        gate = asyncio.Event()
        server.script = upstreams.held(gate, GOOD)
        several = [send_call(upstream, number) for number in range(4)]
        await until(lambda: len(server.bodies) == 4)
        gate.set()
        for call in several:
            assert await call.result() == "0x1"
        assert len(upstream.idle) == 4
        server.drop_all()
        await until(lambda: not upstream.idle)
        assert await send_call(upstream).result() == "0x1"
        assert server.connections == 5


@on_uvloop
async def test_call_sent_into_a_closing_connection_fails_as_retryable() -> None:
    """The race of every keep-alive: the upstream has closed, and the close has not arrived yet."""
    async with pool() as (upstream, server):
        for _ in range(20):
            assert await send_call(upstream).result() == "0x1"
            server.drop_all()
            call = send_call(upstream)
            await call.done.wait()
            assert call.events in (["reply"], ["fail"])
            if call.events == ["fail"]:
                assert call.reason == STALE
            await until(lambda: not server.writers or upstream.idle)
        await still_works(upstream, server)


@on_uvloop
async def test_call_that_may_go_out_once_takes_no_connection_that_has_been_idle_for_long() -> None:
    async with pool() as (upstream, server):
        assert await send_call(upstream, once=True).result() == "0x1"
        assert await send_call(upstream, once=True).result() == "0x1"
        assert server.connections == 1
        upstream.tick(time.monotonic() + 60)
        assert await send_call(upstream, once=True).result() == "0x1"
        assert server.connections == 2


@pytest.mark.parametrize("depth", [1, 4])
@on_uvloop
async def test_call_that_may_go_out_once_goes_out_once(depth: int) -> None:
    async with pool(depth=depth) as (upstream, server):
        for script in (upstreams.close_unread, upstreams.reset, upstreams.half(0.3), replies(lambda _: BAD["garbage"])):
            await still_works(upstream, server)
            server.bodies.clear()
            server.script = script
            call = send_call(upstream, 7, once=True)
            await call.failure()
            assert call.sent
            assert len(server.bodies) == 1


@on_uvloop
async def test_call_that_never_left_is_reported_as_unsent() -> None:
    async with pool() as (upstream, server):
        await server.close()
        several = [send_call(upstream, number, once=number > 2) for number in range(6)]
        for call in several:
            assert await call.failure() == "connection refused"
            assert call.sent is False


@on_uvloop
async def test_call_whose_connection_is_refused_waits_for_one_that_answers() -> None:
    gate = asyncio.Event()

    async def act(exchange: Exchange) -> None:
        body = await exchange.body()
        if b'"id":1,' in body:
            await gate.wait()
        await exchange.send(http(answer({"id": 1}, result="0x1")))

    async with pool(act) as (upstream, server):
        assert await send_call(upstream, 99).result() == "0x1"
        held = send_call(upstream, 1)
        server.stop_accepting()
        waiting = send_call(upstream, 2)
        await until(lambda: upstream.health.bad or waiting.done.is_set())
        assert not waiting.done.is_set()
        gate.set()
        assert await held.result() == await waiting.result() == "0x1"
        assert server.connections == 1


@on_uvloop
async def test_upstream_that_closes_what_it_accepts_leaves_no_dead_connection_behind() -> None:
    async with pool() as (upstream, server):
        serve = server.on_connect
        for _ in range(30):
            server.on_connect = lambda writer: writer.transport.abort()
            call = send_call(upstream)
            assert await call.failure()
            server.on_connect = serve
        await still_works(upstream, server)


# Abandoned calls


@pytest.mark.parametrize("depth", [1, 4])
@on_uvloop
async def test_reply_to_an_abandoned_call_is_dropped(depth: int) -> None:
    gate = asyncio.Event()
    async with pool(limit=1, depth=depth) as (upstream, server):
        await still_works(upstream, server)
        server.script = upstreams.held(gate, stub({"ask": "not for you"}))
        left = send_call(upstream, 1)
        await until(lambda: len(server.bodies) == 2)
        upstream.leave(left)
        gate.set()
        server.script = GOOD
        next_call = send_call(upstream, 2)
        # With one call on each connection, the call that was left counts until the upstream has probably finished it.
        upstream.tick(time.monotonic() + LONGEST_ABANDONED_S)
        assert await next_call.result() == "0x1"
        assert left.events == []
        assert server.connections == 2


@on_uvloop
async def test_waiting_call_that_is_left_is_never_sent() -> None:
    gate = asyncio.Event()
    async with pool(upstreams.held(gate, GOOD), limit=1) as (upstream, server):
        first, left, last = (send_call(upstream, number) for number in range(3))
        await until(lambda: len(server.bodies) == 1)
        upstream.leave(left)
        gate.set()
        assert await first.result() == await last.result() == "0x1"
        assert [call["id"] for call in server.calls] == [0, 2]
        assert left.events == []


# Several under way on one connection


def echo_slowly(seconds: float) -> Script:
    async def act(exchange: Exchange) -> None:
        call = await exchange.call()
        await asyncio.sleep(seconds)
        await exchange.send(http(answer(call, result=call["params"])))

    return act


@pytest.mark.parametrize(("limit", "depth"), [(1, 1), (1, 2), (1, 8), (3, 4), (2, 16)])
@on_uvloop
async def test_every_call_gets_its_own_reply(limit: int, depth: int) -> None:
    """More calls than fit, sent in bursts while replies come in: the order on the wire is the order of the sinks."""
    async with pool(echo_slowly(0.0005), limit=limit, depth=depth) as (upstream, server):
        calls: list[RecordedCall] = []

        async def burst(first: int) -> None:
            for number in range(first, first + 40):
                calls.append(send_call(upstream, number, once=number % 7 == 0))
                if number % 3 == 0:
                    await asyncio.sleep(0)
                if number % 10 == 0:
                    await calls[-1].done.wait()

        async with asyncio.TaskGroup() as group:
            for first in range(0, 400, 40):
                group.create_task(burst(first))
        for one in calls:
            await one.result()
            assert (reply := orjson.loads(one.body))["result"] == [reply["id"]]
        assert len({orjson.loads(one.body)["id"] for one in calls}) == 400
        assert server.connections <= upstream._queue.limit.most // depth
        assert sorted(call["id"] for call in server.calls) == list(range(400))


@on_uvloop
async def test_calls_leave_in_the_order_of_their_sinks_whichever_way_they_come() -> None:
    """Within one turn of the loop some calls are corked, some waited, and another write has scheduled the flush."""

    async def act(exchange: Exchange) -> None:
        call = await exchange.call()
        if call["id"] >= 10:
            await exchange.send(http(answer(call, result=call["params"])))

    def reply(number: int) -> bytes:
        return http(answer({"id": number}, result="0x1"))

    turn = WriteBuffer(asyncio.get_running_loop())
    async with pool(act, depth=2, turn=turn) as (upstream, server):
        several = [send_call(upstream, number) for number in range(upstream._queue.limit.most)]
        await until(lambda: len(server.bodies) == len(several))
        upstream.tick(time.monotonic())
        connection = several[0].connection
        assert connection is not None
        first, second = (number for sink in connection.sinks for number, each in enumerate(several) if each is sink)
        turn.write(SimpleNamespace(transport=None), b"")
        connection.data_received(reply(first))
        corked, waited = send_call(upstream, 10), send_call(upstream, 11)
        connection.data_received(reply(second))
        assert await corked.result() == [10]
        assert await waited.result() == [11]


@on_uvloop
async def test_several_replies_in_one_segment_and_a_segment_in_several_replies() -> None:
    for size in (1, 50, 137, 1000, 100_000):
        gate = asyncio.Event()
        out = bytearray()

        async def act(exchange: Exchange, out: bytearray = out, size: int = size, gate: asyncio.Event = gate) -> None:
            call = await exchange.call()
            reply = answer(call, result=call["params"])
            out.extend(http(reply) if call["id"] % 2 else CHUNKED + chunked(reply, 30))
            if len(exchange.server.bodies) % 9 == 0:
                await exchange.send_each(bytes(out[at : at + size]) for at in range(0, len(out), size))
                out.clear()

        async with pool(act, limit=1, depth=9) as (upstream, server):
            server.script = GOOD
            await still_works(upstream, server)
            server.script = act
            server.bodies.clear()
            several = [send_call(upstream, number) for number in range(9)]
            for number, call in enumerate(several):
                assert await call.result() == [number]
            assert server.connections == 1


@pytest.mark.parametrize("how", ["close", "reset", "garbage", "says close"])
@on_uvloop
async def test_lost_connection_fails_every_call_behind_it(how: str) -> None:
    async with pool(limit=1, depth=8) as (upstream, server):
        await still_works(upstream, server)
        count = 0

        async def act(exchange: Exchange) -> None:
            nonlocal count
            count += 1
            call = await exchange.call()
            if count <= 2:
                extra: dict[str, Any] = {"Connection": "close"} if how == "says close" and count == 2 else {}
                await exchange.send(http(answer(call, result="0x1"), **extra))
            elif how == "close":
                exchange.close()
            elif how == "reset":
                await asyncio.sleep(0.01)
                exchange.reset()
            elif how == "garbage":
                await exchange.send(b"\r\n\r\n")
            else:
                await asyncio.sleep(0.01)

        server.script = act
        several = [send_call(upstream, number) for number in range(8)]
        assert [await call.result() for call in several[:2]] == ["0x1"] * 2
        for call in several[2:]:
            assert await call.failure()
            assert call.sent
        await still_works(upstream, server)


@pytest.mark.parametrize("depth", [1, 4])
@on_uvloop
async def test_connection_that_ends_takes_no_call_of_the_same_turn(depth: int) -> None:
    async with pool(depth=depth) as (upstream, server):
        for once in (False, True):
            await still_works(upstream, server)
            left = send_call(upstream)
            upstream.leave(left)
            assert await send_call(upstream, once=once).result() == "0x1"
            assert not left.events
            call = RecordedCall()
            connection = upstream.submit(call, b'{"jsonrpc":"2.0","id":1,"method":"ask","params":[]}')
            assert connection is not None
            assert await call.result() == "0x1"
            # As the transport does when the upstream has closed.
            connection.eof_received()
            assert connection.transport is not None
            connection.transport.close()
            assert await send_call(upstream, once=once).result() == "0x1"


@on_uvloop
async def test_call_that_is_asked_again_when_it_fails_is_not_asked_on_the_same_connection() -> None:
    again: list[RecordedCall] = []

    class Stubborn(RecordedCall):
        def on_fail(self, upstream: Upstream, reason: str, *, sent: bool) -> None:
            super().on_fail(upstream, reason, sent=sent)
            again.append(send_call(upstream))

    async with pool(depth=4) as (upstream, server):
        await still_works(upstream, server)
        server.script = upstreams.first(replies(lambda _: BAD["garbage"]), GOOD)
        for _ in range(3):
            upstream.submit(Stubborn(), b'{"jsonrpc":"2.0","id":1,"method":"ask","params":[]}')
        await until(lambda: len(again) == 3)
        assert [await call.result() for call in again] == ["0x1"] * 3


@on_uvloop
async def test_lost_connection_takes_no_more_calls_of_the_same_turn() -> None:
    async with pool(limit=2, depth=8) as (upstream, server):
        await still_works(upstream, server)
        for _ in range(10):
            several = [send_call(upstream, 1)]
            server.drop_all()
            for _ in range(6):
                several.append(send_call(upstream, 1))
                await asyncio.sleep(0)
            for call in several:
                async with asyncio.timeout(30):
                    await call.done.wait()
        await still_works(upstream, server)


@on_uvloop
async def test_call_that_may_go_out_once_shares_no_connection_that_it_can_have_alone() -> None:
    gate = asyncio.Event()
    async with pool(limit=1, depth=4) as (upstream, server):
        assert await send_call(upstream).result() == await send_call(upstream, once=True).result() == "0x1"
        assert server.connections == 1
        server.script = upstreams.first(upstreams.held(gate, GOOD), GOOD)
        slow = send_call(upstream)
        assert await send_call(upstream, once=True).result() == "0x1"
        assert server.connections == 2
        assert not slow.events
        gate.set()
        assert await slow.result() == "0x1"
        upstream.tick(time.monotonic() + 60)
        assert await send_call(upstream, once=True).result() == "0x1"
        assert server.connections == 3


class BrokenCall(RecordedCall):
    """A call whose deadlines cannot be checked."""

    def on_tick(self, connection: UpstreamConnection | None, now: float) -> None:
        raise ValueError("broken")


class EndingCall(RecordedCall):
    """A call whose check ends another one."""

    other: RecordedCall
    upstream: Upstream

    def on_tick(self, connection: UpstreamConnection | None, now: float) -> None:
        self.upstream.leave(self.other)


@pytest.mark.parametrize("depth", [1, 4])
@on_uvloop
async def test_call_whose_check_fails_is_given_up_alone(depth: int) -> None:
    gate = asyncio.Event()
    async with pool(upstreams.held(gate, GOOD), limit=2, depth=depth) as (upstream, server):
        body = b'{"jsonrpc":"2.0","id":1,"method":"ask","params":[1]}'
        # The first ones are sent, the others wait.
        broken, good = [BrokenCall() for _ in range(4)], [RecordedCall() for _ in range(4)]
        for pair in zip(broken, good, strict=True):
            for call in pair:
                upstream.submit(call, body)
        await until(lambda: server.bodies)
        upstream.tick(time.monotonic())
        assert [call.events for call in broken] == [["fail"]] * 4
        assert {call.reason for call in broken} == {UNCHECKED}
        upstream.tick(time.monotonic())
        gate.set()
        for call in good:
            assert await call.result() == "0x1"
        await still_works(upstream, server)


@on_uvloop
async def test_call_that_the_check_of_another_has_ended_is_not_checked() -> None:
    gate = asyncio.Event()
    async with pool(upstreams.held(gate, GOOD), limit=4, depth=4) as (upstream, _):
        first, other = EndingCall(), BrokenCall()
        first.other, first.upstream = other, upstream
        for call in (first, other):
            upstream.submit(call, b'{"jsonrpc":"2.0","id":1,"method":"ask","params":[1]}')
        await until(lambda: len(upstream.in_flight()) == 2)
        upstream.tick(time.monotonic())
        assert other.events == []
        gate.set()
        assert await first.result() == "0x1"


def test_head_of_a_request_holds_no_secret_in_its_repr() -> None:
    address = UpstreamAddress.of(
        LinkSettings(url="http://user:secret@127.0.0.1:1/secret", headers={"X-Secret": "secret"})
    )
    assert "secret" not in repr(address)
    assert b"secret" in address.request_start


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://[::1]:8545/", b"[::1]:8545"),
        ("https://[fd00::12]/key", b"[fd00::12]"),
        ("http://127.0.0.1:8545/", b"127.0.0.1:8545"),
        ("https://node.example/", b"node.example"),
    ],
)
def test_upstream_is_named_as_a_host_is_written(url: str, host: bytes) -> None:
    assert b"\r\nHost: " + host + b"\r\n" in UpstreamAddress.of(LinkSettings(url=url)).request_start
