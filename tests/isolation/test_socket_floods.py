"""Floods of WebSocket frames: the socket that sends them is closed, and nobody else waits."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc

import pytest

from proxy.web.websocket import frames
from proxy.web.websocket.client_socket import FRAMES_PER_TURN, ClientSocket
from tests.isolation.attack import beside, steady_load
from tests.rpc_harness import rpc_harness
from tests.service import until
from tests.sockets import bare
from tests.web.worker import TEST, on_uvloop

CALLS = 200
# One masked frame without a payload; 40,000 fill what a transport reads at a time.
FIRST, EMPTY = b"\x01\x80\0\0\0\0", b"\x00\x80\0\0\0\0"
PING, PONG = b"\x89\x80\0\0\0\0", b"\x8a\x80\0\0\0\0"
CALL = b'{"jsonrpc":"2.0","id":1,"method":"net_version","params":[]}'
FLOOD = EMPTY * 40_000


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
def test_control_frames_leave_room_for_others(frame: bytes) -> None:
    """Pings and pongs are frames like others: a connection that sends nothing else gets its share of a turn."""

    @on_uvloop
    async def run() -> None:
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

    run()


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


@on_uvloop
async def test_messages_that_a_fault_plan_delays_are_bounded() -> None:
    async with rpc_harness(1, network=TEST) as harness:
        harness.worker.add_key("test", live=False)
        async with bare(harness.worker, key="test", network=TEST, X_Fault="latency=2s") as client:
            socket = harness.worker.only_connection
            assert isinstance(socket, ClientSocket)
            limit = socket.context.limits.max_message_bytes
            for _ in range(10):
                client.write(b" " * (limit // 2) + CALL)
            await until(lambda: socket.calls.bytes_under_way >= limit)
            assert len(socket.calls) == 2


@on_uvloop
async def test_messages_that_a_fault_plan_delays_leave_with_their_client() -> None:
    async with rpc_harness(1, network=TEST) as harness:
        harness.worker.add_key("test", live=False)
        async with bare(harness.worker, key="test", network=TEST, X_Fault="latency=30s") as client:
            socket = harness.worker.only_connection
            assert isinstance(socket, ClientSocket)
            client.write(CALL)
            await until(lambda: socket.calls.bytes_under_way)
        await until(lambda: not len(socket.calls), within_s=20.0)
        assert not socket.calls.bytes_under_way


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
