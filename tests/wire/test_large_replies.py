"""Replies too large to be held: in pieces to whoever takes them, whole to whoever does not, and never more than fits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from proxy.wire.http_connection import LARGE
from proxy.wire.upstream import MAX_REPLY_BYTES, UpstreamConnection
from tests.service import until
from tests.web.worker import on_uvloop
from tests.wire import upstreams
from tests.wire.recorded_calls import ask, pool, still_works
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
async def test_large_reply_is_given_in_pieces_to_whoever_takes_them(framing: str, piece: int) -> None:
    async with pool(large(300_000, piece=piece, make=FRAMINGS[framing])) as (upstream, server):
        for _ in range(2):
            asked = ask(upstream, takes_large=True)
            assert await asked.result() == "a" * 300_000
            assert asked.told[0] == "large"
            assert asked.told[-1] == "end"
            assert asked.told.count("large") == 1
        assert server.connections == 1
        await still_works(upstream, server)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("framing", FRAMINGS)
@on_uvloop
async def test_large_reply_is_given_whole_to_whoever_does_not(framing: str, depth: int) -> None:
    async with pool(large(300_000, piece=20_000, make=FRAMINGS[framing]), depth=depth) as (upstream, server):
        asked = ask(upstream, takes_large=depth > 1)
        assert await asked.result() == "a" * 300_000
        assert asked.told == (["large", "reply"] if depth == 1 else ["reply"])
        await still_works(upstream, server)


@on_uvloop
async def test_reply_that_ends_with_its_connection_is_never_given_in_pieces() -> None:
    """Its end cannot be told from a break: whoever has passed on the beginning could not take it back."""
    async with pool(upstreams.until_close(lambda call: answer(call, result="a" * 300_000))) as (upstream, _):
        asked = ask(upstream, takes_large=True)
        assert await asked.result() == "a" * 300_000
        assert asked.told == ["reply"]


@on_uvloop
async def test_reply_around_the_size_of_a_large_one() -> None:
    def sized(call: dict[str, Any], size: int) -> bytes:
        return http(answer(call, result="a" * (size - 36)))

    for size in range(LARGE - 40, LARGE + 3):
        async with pool(replies(partial(sized, size=size))) as (upstream, _):
            asked = ask(upstream, takes_large=True)
            assert await asked.result() == "a" * (size - 36)


@pytest.mark.parametrize("has_length", [True, False])
@on_uvloop
async def test_reply_that_is_too_large_for_whoever_wants_it_whole_fails(has_length: bool) -> None:
    script = upstreams.huge(MAX_REPLY_BYTES + 1, has_length=has_length)
    async with pool(script) as (upstream, server):
        assert "too large" in await ask(upstream).failure()
        assert server.sent <= MAX_REPLY_BYTES
        await still_works(upstream, server)


@pytest.mark.parametrize("has_length", [True, False])
@on_uvloop
async def test_large_reply_that_breaks_off_is_told_as_a_failure(has_length: bool) -> None:
    async with pool(upstreams.huge(1 << 20, has_length=has_length, closes_early=True)) as (upstream, server):
        asked = ask(upstream, takes_large=True)
        assert await asked.failure() == "connection lost"
        assert asked.told[0] == "large"
        await still_works(upstream, server)


@pytest.mark.parametrize("has_length", [True, False])
@on_uvloop
async def test_connection_paused_at_the_end_of_a_reply_serves_the_next_call(has_length: bool) -> None:
    """Its reader may be slow to the last byte; whoever comes next on it is not."""
    async with pool(upstreams.huge(1 << 20, has_length=has_length), limit=1) as (upstream, server):
        asked = ask(upstream, takes_large=True)

        class Slow:
            """Pauses with every piece, and resumes a little later, but for the last."""

            def __init__(self) -> None:
                self.size = 0

            def on_piece(self, connection: UpstreamConnection, piece: bytes | memoryview) -> None:
                self.size += len(piece)
                connection.pause()
                if self.size + len(asked.body) < (1 << 20) - 2:
                    asyncio.get_running_loop().call_later(0.0005, connection.resume)

        slow = Slow()
        asked.on_piece = slow.on_piece  # type: ignore[method-assign]
        async with asyncio.timeout(10):
            await asked.done.wait()
        assert asked.told[-1] == "end"
        await still_works(upstream, server)
        assert server.connections == 1


@on_uvloop
async def test_paused_connection_reads_nothing() -> None:
    async with pool(upstreams.huge(50 << 20)) as (upstream, server):
        asked = ask(upstream, takes_large=True)
        await until(lambda: asked.connection, within_s=2.0)
        assert asked.connection is not None
        asked.connection.pause()
        sent = -1
        while sent != server.sent:  # The kernels take some more.
            sent = server.sent
            await asyncio.sleep(0.1)
        assert sent < 20 << 20
        upstream.leave(asked)
        await until(lambda: not server.writers, within_s=2.0)
        await still_works(upstream, server)
