"""Writes that are queued until the end of a turn of the loop."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace

import pytest

from proxy.wire.write_buffer import MOST_QUEUED, WriteBuffer
from tests.web.worker import on_uvloop


@pytest.mark.parametrize("count", [2, MOST_QUEUED - 1, MOST_QUEUED, MOST_QUEUED + 1, 5 * MOST_QUEUED + 3])
@on_uvloop
async def test_writes_keep_their_order_and_a_busy_turn_sends_some_before_its_end(count: int) -> None:
    loop = asyncio.get_running_loop()
    ours, peer = socket.socketpair()
    transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
    buffer = WriteBuffer(loop)
    owner = SimpleNamespace(transport=transport)
    for number in range(count):
        buffer.write(owner, b"%03d," % number)
    assert repr(buffer) == f"<WriteBuffer {count % MOST_QUEUED} writes queued>"
    peer.setblocking(False)
    expected = b"".join(b"%03d," % number for number in range(count))
    seen = b""
    while len(seen) < len(expected):
        seen += await loop.sock_recv(peer, 65536)
    assert seen == expected
    transport.close()
    peer.close()
