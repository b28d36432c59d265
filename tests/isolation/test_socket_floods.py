"""Floods of WebSocket frames: the socket that sends them is closed, and nobody else waits."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from proxy.core.access import Limits
from proxy.core.encodings import deflate_message
from proxy.web.websocket import frames, large_messages
from proxy.web.websocket.client_socket import FRAMES_PER_TURN, ClientSocket
from tests.isolation.attack import beside, steady_load
from tests.rpc_harness import rpc_harness
from tests.service import until
from tests.sockets import RawSocket, bare
from tests.web.worker import TEST, on_uvloop

CALLS = 200
# One masked frame without a payload; 40,000 fill what a transport reads at a time.
FIRST, EMPTY = b"\x01\x80\0\0\0\0", b"\x00\x80\0\0\0\0"
PING, PONG = b"\x89\x80\0\0\0\0", b"\x8a\x80\0\0\0\0"
CALL = b'{"jsonrpc":"2.0","id":1,"method":"net_version","params":[]}'
FLOOD = EMPTY * 40_000
# Four empty deflate blocks with dynamic codes (RFC 1951, 3.2.7), and an empty stored one.
TINY_BLOCKS = bytes.fromhex(
    "04c081000000000090ff6b100007020000000040feaf41001c080000000000f9bf060170200000000000e4ff1a000000ffff"
)


@on_uvloop
async def test_empty_fragments_end_the_socket_that_sends_them() -> None:
    async with rpc_harness(1) as harness:
        harness.worker.add_key("attacker")
        closed = []

        async def attack() -> None:
            async with bare(harness.worker, key="attacker") as socket:
                socket.writer.write(FIRST + FLOOD)
                closed.append(await socket.close_code())

        async with beside(attack, at_once=2):
            await steady_load(harness, CALLS)
            await until(lambda: bool(closed))
        assert set(closed) == {frames.POLICY}


@pytest.mark.parametrize("frame", [PING, PONG])
@on_uvloop
async def test_control_frames_leave_room_for_others(frame: bytes) -> None:
    """Pings and pongs are frames like others: a connection that sends nothing else gets its share of a turn."""

    async with rpc_harness(1) as harness:
        harness.worker.add_key("attacker")

        async def attack() -> None:
            async with bare(harness.worker, key="attacker") as socket:

                async def read() -> None:
                    while await socket.reader.read(1 << 16):
                        pass

                async with asyncio.TaskGroup() as group:
                    reading = group.create_task(read())
                    for _ in range(3):
                        socket.writer.write(frame * 40_000)
                        await socket.writer.drain()
                    reading.cancel()

        async with beside(attack, at_once=2):
            await steady_load(harness, CALLS)


@on_uvloop
async def test_one_turn_reads_a_bounded_number_of_frames() -> None:
    async with rpc_harness(1) as harness, bare(harness.worker) as client:
        socket = harness.worker.only_connection
        assert isinstance(socket, ClientSocket)
        mask = b"\0\0\0\0"
        last = bytes((0x80, 0x80 | len(CALL))) + mask + CALL
        socket.data_received(FIRST + EMPTY * (10 * FRAMES_PER_TURN) + last)
        # The call at the end is not read in this turn, and is answered all the same.
        assert not socket.calls
        assert (await client.json())["result"]


@on_uvloop
async def test_messages_under_way_are_bounded_by_their_bytes() -> None:
    """A large batch waits for its turns, and is small while it is compressed."""
    async with rpc_harness(1) as harness, bare(harness.worker) as client:
        socket = harness.worker.only_connection
        assert isinstance(socket, ClientSocket)
        limit, count, most = socket.context.limits.max_message_bytes, 10, 0
        for _ in range(count):
            client.write(b"[" + b" " * (limit // 2) + b"{}" + b",{}" * 500 + b"]")

        async def read() -> None:
            for _ in range(count):
                assert len(await client.json()) == 501

        async with asyncio.TaskGroup() as group:
            reading = group.create_task(read())
            while not reading.done():
                most = max(most, socket.calls.bytes_under_way)
                await asyncio.sleep(0)
        assert limit // 2 < most <= 2 * limit
        await until(lambda: not socket.calls.bytes_under_way)


@asynccontextmanager
async def delayed_socket(latency: str) -> AsyncIterator[tuple[ClientSocket, RawSocket]]:
    """Both ends of a socket whose messages a fault plan delays. The server goes on for a moment after the client has left."""
    async with rpc_harness(1, network=TEST, sockets={"ping_s": 0.5}) as harness:
        harness.worker.add_key("test", live=False)
        async with bare(harness.worker, key="test", network=TEST, X_Fault=f"latency={latency}") as client:
            socket = harness.worker.only_connection
            assert isinstance(socket, ClientSocket)
            yield socket, client
        await until(lambda: not harness.worker.app.limiter.connections, within_s=20.0)
        assert not len(socket.calls)
        assert not socket.calls.bytes_under_way


@on_uvloop
async def test_messages_that_a_fault_plan_delays_are_bounded_and_leave_with_their_client() -> None:
    """While many wait, the socket is not read: it notices all the same that its client has left, behind other messages. Behind
    more of them than the kernels hold, a ping finds out."""
    for behind in (1, 10):
        async with delayed_socket("30s") as (socket, client):
            limit = socket.context.limits.max_message_bytes
            for _ in range(2):
                client.write(b" " * (limit // 2) + CALL)
            await until(lambda: socket.calls.bytes_under_way >= limit)  # noqa: B023
            for _ in range(behind):
                client.write(CALL if behind == 1 else b" " * (limit // 2) + CALL)
            await asyncio.sleep(0.05)
            assert len(socket.calls) == 2
            client.writer.transport.abort()


@on_uvloop
async def test_message_that_a_fault_plan_delays_leaves_with_its_client() -> None:
    async with delayed_socket("30s") as (socket, client):
        client.write(CALL)
        await until(lambda: socket.calls.bytes_under_way)


DEFLATE: dict[str, Any] = {"Sec_WebSocket_Extensions": "permessage-deflate"}
# A kilobyte that becomes a call of a megabyte.
LARGE_CALL = CALL.replace(b"[]", b'["' + b"0" * 1_000_000 + b'"]')


def packed(text: bytes) -> bytes:
    """A compressed message, masked with zeros."""
    message = deflate_message(text, 15)
    return b"\xc1\xfe" + len(message).to_bytes(2, "big") + bytes(4) + message


@on_uvloop
async def test_large_messages_wait_while_their_account_is_at_its_limit() -> None:
    """They are small on the wire, are read before they can be charged, and a refused one costs nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_messages, "PAUSE_S", 3.0)
        async with rpc_harness(1) as harness:
            poor = harness.worker.add_key("poor", limits=Limits(1, 1, 0))
            harness.worker.add_key("neighbour", beside=poor)
            async with (
                bare(harness.worker, key="poor", **DEFLATE) as first,
                bare(harness.worker, key="neighbour", **DEFLATE) as second,
                bare(harness.worker, **DEFLATE) as other,
            ):
                waiting = harness.worker.app.sockets.context.large_messages
                first.writer.write(packed(LARGE_CALL) * 3)
                await until(lambda: repr(waiting) == "<LargeMessages 1 waiting of 1 accounts>")
                # The account's other key waits too, and other accounts do not.
                second.writer.write(packed(LARGE_CALL))
                await until(lambda: repr(waiting) == "<LargeMessages 2 waiting of 1 accounts>")
                other.writer.write(packed(LARGE_CALL))
                assert (await other.json())["id"] == 1
                # Each is answered at last, under its id.
                assert [(await first.json())["id"] for _ in range(3)] == [1, 1, 1]
                assert (await second.json())["id"] == 1


@on_uvloop
async def test_messages_of_tiny_compressed_blocks_leave_room_for_others() -> None:
    """They take long to decompress, and are almost nothing in the end."""
    async with rpc_harness(1) as harness:
        harness.worker.add_key("attacker")

        async def attack() -> None:
            async with bare(harness.worker, key="attacker", **DEFLATE) as socket:
                blocks = TINY_BLOCKS * (1_000_000 // len(TINY_BLOCKS))
                socket.writer.write(b"\xc1\xff" + len(blocks).to_bytes(8, "big") + bytes(4) + blocks)
                assert (await socket.json())["error"]["code"] == -32700

        async with beside(attack):
            await steady_load(harness, CALLS)


@on_uvloop
async def test_refused_batch_gives_its_memory_back_at_once() -> None:
    """The garbage collector runs seldom."""
    async with rpc_harness(1) as harness, bare(harness.worker) as client:
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(20):
                client.write(b"[" * 500_000)
                assert (await client.json())["error"]["code"] == -32700
            assert tracemalloc.get_traced_memory()[0] < 4_000_000
        finally:
            tracemalloc.stop()
            gc.enable()
