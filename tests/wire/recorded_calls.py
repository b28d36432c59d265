"""A pool of connections to a scripted server, and a sink that records every event of its call."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

from proxy.core.upstream_health import UpstreamHealth
from proxy.settings import LinkSettings
from proxy.turn_queue import TurnQueue
from proxy.wire.address import UpstreamAddress
from proxy.wire.http1 import ReplyHeaders
from proxy.wire.http_upstream import HttpUpstream, PoolTerms
from proxy.wire.upstream import Piece, Upstream, UpstreamConnection
from proxy.wire.write_buffer import WriteBuffer
from tests.wire.upstreams import Script, Scripted, stub

GOOD = stub({"ask": "0x1"})


@dataclass(eq=False)
class RecordedCall:
    """The sink of one call, with the events it received in order."""

    takes_large: bool = False
    client: str = ""
    events: list[str] = field(default_factory=list)
    status: int = 0
    body: bytes = b""
    # The size of each piece of a large reply.
    pieces: list[int] = field(default_factory=list)
    reason: str = ""
    sent: bool | None = None
    connection: UpstreamConnection | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def on_reply(self, connection: UpstreamConnection, headers: ReplyHeaders, body: bytes) -> None:
        self._end("reply")
        self.status, self.body = headers.status, body

    def on_large(self, connection: UpstreamConnection, headers: ReplyHeaders, beginning: Piece) -> bool:
        self.events.append("large")
        if self.takes_large:
            self.connection, self.body = connection, bytes(beginning)
        return self.takes_large

    def on_piece(self, connection: UpstreamConnection, piece: Piece) -> None:
        self.events.append("piece")
        self.pieces.append(len(piece))
        self.body += piece

    def on_end(self, connection: UpstreamConnection) -> None:
        self._end("end")

    def on_fail(self, upstream: Upstream, reason: str, *, sent: bool) -> None:
        self._end("fail")
        self.reason, self.sent = reason, sent

    def on_tick(self, connection: UpstreamConnection | None, now: float) -> None:
        self.connection = connection

    def on_late(self, upstream: Upstream, headers: ReplyHeaders, body: bytes) -> None:
        self.events.append("late")

    def _end(self, how: str) -> None:
        assert not self.done.is_set(), f"ended twice: {self.events}, {how}"
        self.events.append(how)
        self.done.set()

    async def result(self) -> Any:
        async with asyncio.timeout(10):
            await self.done.wait()
        assert self.events[-1] in ("reply", "end"), self
        return orjson.loads(self.body)["result"]

    async def failure(self) -> str:
        async with asyncio.timeout(10):
            await self.done.wait()
        assert self.events[-1] == "fail", self
        return self.reason


def send_call(
    upstream: Upstream, number: int = 1, *, once: bool = False, takes_large: bool = False, client: str = ""
) -> RecordedCall:
    call = RecordedCall(takes_large, client)
    body = b'{"jsonrpc":"2.0","id":%d,"method":"ask","params":[%d]}' % (number, number)
    upstream.submit(call, body, once=once)
    return call


@asynccontextmanager
async def pool(
    script: Script = GOOD,
    *,
    limit: int = 4,
    depth: int = 1,
    turn: WriteBuffer | None = None,
    tls: ssl.SSLContext | None = None,
    ca: str = "",
) -> AsyncIterator[tuple[HttpUpstream, Scripted]]:
    """`tls`: that of the server, whose certificate is for localhost."""
    async with Scripted(script, tls) as server:
        loop = asyncio.get_running_loop()
        turn = turn or WriteBuffer(loop)
        address = UpstreamAddress.of(LinkSettings(url=server.url, ca=ca))
        upstream = HttpUpstream(UpstreamHealth("test#1"), PoolTerms(address, turn, TurnQueue(loop), limit, depth))
        try:
            yield upstream, server
        finally:
            await upstream.close()


async def still_works(upstream: Upstream, server: Scripted) -> None:
    """Whatever happened before, the next call goes well."""
    server.script = GOOD
    assert await send_call(upstream, 99).result() == "0x1"
