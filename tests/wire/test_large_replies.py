"""Large replies: streamed to sinks that take pieces, buffered for the others, and never above the size limit."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from proxy.memory_budget import MemoryBudget
from proxy.wire.http_connection import LARGE
from proxy.wire.tls_transport import RECORD_BYTES
from proxy.wire.upstream import MAX_REPLY_BYTES, UpstreamConnection
from tests.certificates import Authority
from tests.service import until
from tests.web.worker import on_uvloop
from tests.wire import upstreams
from tests.wire.recorded_calls import pool, send_call, still_works
from tests.wire.upstreams import CHUNKED, Exchange, Script, answer, chunked, http, replies


def large(size: int, *, piece: int, make: Callable[[bytes], bytes]) -> Script:
    async def act(exchange: Exchange) -> None:
        data = make(answer(await exchange.call(), result="a" * size))
        await exchange.send_each(data[at : at + piece] for at in range(0, len(data), piece))

    return act


FRAMINGS: dict[str, Callable[[bytes], bytes]] = {
    "length": http,
    "chunks": lambda body: CHUNKED + chunked(body, 10_000),
    "small chunks": lambda body: CHUNKED + chunked(body, 100),
}


@pytest.mark.parametrize("piece", [1000, 20_000, 1 << 20])
@pytest.mark.parametrize("framing", FRAMINGS)
@on_uvloop
async def test_large_reply_is_streamed_to_a_sink_that_takes_pieces(framing: str, piece: int) -> None:
    async with pool(large(300_000, piece=piece, make=FRAMINGS[framing])) as (upstream, server):
        for _ in range(2):
            call = send_call(upstream, takes_large=True)
            assert await call.result() == "a" * 300_000
            assert call.events[0] == "large"
            assert call.events[-1] == "end"
            assert call.events.count("large") == 1
        assert server.connections == 1
        await still_works(upstream, server)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("framing", FRAMINGS)
@on_uvloop
async def test_large_reply_is_buffered_for_other_sinks(framing: str, depth: int) -> None:
    async with pool(large(300_000, piece=20_000, make=FRAMINGS[framing]), depth=depth) as (upstream, server):
        call = send_call(upstream, takes_large=depth > 1)
        assert await call.result() == "a" * 300_000
        assert call.events == (["large", "reply"] if depth == 1 else ["reply"])
        await still_works(upstream, server)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.mark.parametrize("has_tls", [False, True])
@on_uvloop
async def test_large_reply_is_read_in_slices(authority: Authority, has_tls: bool) -> None:
    """One read may be larger: only then is it known that the reply is."""
    context = authority.server_context(authority.leaf("localhost")) if has_tls else None
    size = 3_000_000

    script = large(size, piece=size, make=http)
    async with pool(script, tls=context, ca=str(authority.file) if has_tls else "") as (upstream, server):
        for _ in range(2):
            call = send_call(upstream, takes_large=True)
            assert await call.result() == "a" * size
            # A record that began in the slice before ends in this one.
            assert sorted(call.pieces)[-2] <= LARGE + RECORD_BYTES
        assert server.connections == 1
        await still_works(upstream, server)


@on_uvloop
async def test_reply_that_ends_with_its_connection_is_never_given_in_pieces() -> None:
    """Its end looks the same as a lost connection, and a beginning that was passed on cannot be taken back."""
    async with pool(upstreams.until_close(lambda call: answer(call, result="a" * 300_000))) as (upstream, _):
        call = send_call(upstream, takes_large=True)
        assert await call.result() == "a" * 300_000
        assert call.events == ["reply"]


@on_uvloop
async def test_reply_around_the_size_of_a_large_one() -> None:
    def sized(call: dict[str, Any], size: int) -> bytes:
        return http(answer(call, result="a" * (size - 36)))

    for size in range(LARGE - 40, LARGE + 3):
        async with pool(replies(partial(sized, size=size))) as (upstream, _):
            call = send_call(upstream, takes_large=True)
            assert await call.result() == "a" * (size - 36)


@pytest.mark.parametrize("has_length", [True, False])
@on_uvloop
async def test_reply_too_large_to_buffer_fails(has_length: bool) -> None:
    script = upstreams.huge(MAX_REPLY_BYTES + 1, has_length=has_length)
    async with pool(script) as (upstream, server):
        assert "too large" in await send_call(upstream).failure()
        assert server.sent <= MAX_REPLY_BYTES
        await still_works(upstream, server)


@pytest.mark.parametrize("has_length", [True, False])
@on_uvloop
async def test_large_reply_that_breaks_off_fails(has_length: bool) -> None:
    async with pool(upstreams.huge(1 << 20, has_length=has_length, closes_early=True)) as (upstream, server):
        call = send_call(upstream, takes_large=True)
        assert await call.failure() == "connection lost"
        assert call.events[0] == "large"
        await still_works(upstream, server)


@pytest.mark.parametrize("has_length", [True, False])
@on_uvloop
async def test_connection_paused_at_the_end_of_a_reply_serves_the_next_call(has_length: bool) -> None:
    """A reader that is slow to the last byte does not slow the next call on the connection."""
    async with pool(upstreams.huge(1 << 20, has_length=has_length), limit=1) as (upstream, server):
        call = send_call(upstream, takes_large=True)

        class Slow:
            """Pauses with every piece, and resumes a little later, but for the last."""

            def __init__(self) -> None:
                self.size = 0

            def on_piece(self, connection: UpstreamConnection, piece: bytes | memoryview) -> None:
                self.size += len(piece)
                connection.pause()
                if self.size + len(call.body) < (1 << 20) - 2:
                    asyncio.get_running_loop().call_later(0.0005, connection.resume)

        slow = Slow()
        call.on_piece = slow.on_piece  # type: ignore[method-assign]
        async with asyncio.timeout(10):
            await call.done.wait()
        assert call.events[-1] == "end"
        await still_works(upstream, server)
        assert server.connections == 1


@on_uvloop
async def test_paused_connection_reads_nothing() -> None:
    async with pool(upstreams.huge(50 << 20)) as (upstream, server):
        call = send_call(upstream, takes_large=True)
        await until(lambda: call.connection)
        assert call.connection is not None
        call.connection.pause()
        sent = -1
        while sent != server.sent:  # The kernels take some more.
            sent = server.sent
            await asyncio.sleep(0.1)
        assert sent < 20 << 20
        upstream.leave(call)
        await until(lambda: not server.writers)
        await still_works(upstream, server)


@on_uvloop
async def test_one_turn_reads_a_bounded_part_of_a_large_reply() -> None:
    """Much of it has arrived already, because its reader paused."""
    one_read, size = 262_144, 8 << 20
    async with pool(upstreams.huge(size)) as (upstream, server):
        call = send_call(upstream, takes_large=True)
        await until(lambda: call.connection is not None)
        assert call.connection is not None
        call.connection.pause()
        sent = -1
        while sent < server.sent:
            sent = server.sent
            await asyncio.sleep(0.1)
        call.connection.resume()
        seen = [len(call.body)]
        while not call.done.is_set():
            await asyncio.sleep(0)
            seen.append(len(call.body))
        assert max(after - before for before, after in itertools.pairwise(seen)) <= one_read
        await still_works(upstream, server)


@on_uvloop
async def test_streamed_reply_leaves_no_memory_counted_for_its_account() -> None:
    """Its length was counted while too little had come to offer it."""

    async def act(exchange: Exchange) -> None:
        data = http(answer(await exchange.call(), result="a" * 2_000_000))
        begun = data.index(b"\r\n\r\n") + 100
        await exchange.send_each([data[:begun], data[begun:]])

    async with pool(act) as (upstream, _):
        upstream.memory = memory = MemoryBudget(64 << 20).of("replies")
        call = send_call(upstream, takes_large=True, client="acct_1")
        assert await call.result() == "a" * 2_000_000
        assert call.events[0] == "large"
        assert memory.total == 0
