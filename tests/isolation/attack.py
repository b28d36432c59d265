"""One attacker beside one good client: the good client's traffic is steady, checked reply by reply, and must not notice.

The bounds are on failures, bytes and memory. Speed belongs to `bench/`: the only bound on time is one that a stalled worker
breaks and a busy machine does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson

from tests.http_client import HttpClient, request
from tests.rpc_harness import Load, RpcHarness
from tests.rpc_upstreams import value_of
from tests.sockets import RawSocket, bare
from tests.web.worker import LIVE, Worker

# A reply that takes this process more CPU time has waited for a worker that served someone else only.
STALL_S = 2.5


@asynccontextmanager
async def beside(attack: Callable[[], Awaitable[None]], *, at_once: int = 1) -> AsyncIterator[None]:
    """Run the attack again and again, over so many connections, until the block ends. The last round runs to its end."""
    ended = False

    async def repeat() -> None:
        while not ended:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await attack()
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(repeat())
        try:
            yield
        finally:
            ended = True


async def steady_load(harness: RpcHarness, calls: int, *, at_once: int = 4) -> Load:
    """The good client's traffic; it fails where one call fails, is wrong or stalls."""
    load = await harness.load(calls, at_once=at_once)
    assert not load.failed, (load, load.failed[0].status, load.failed[0].body)
    assert not load.wrong, load
    assert max(load.cpu_s) < STALL_S, load
    return load


# A call of the good client that was never made before, and its result.
GoodCall = tuple[dict[str, Any], Any]
_serial = itertools.count(1 << 40)
BATCH = 5


def good_call() -> GoodCall:
    params = [{"to": "0x" + "11" * 20, "data": hex(next(_serial))}, "latest"]
    return {"method": "eth_call", "params": params}, value_of("eth_call", params)


async def good_traffic(
    running: Worker, calls: int, *, make: Callable[[], GoodCall] = good_call, path: str = f"/v1/rpc/{LIVE}"
) -> None:
    """Calls of the good client over HTTP and, where there is one, a socket; single and in batches. None may fail."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(await running.connect()) for _ in range(4)]
        ways = [_over_http(running, client, path) for client in clients]
        if "/rpc/" in path:
            network = path.removeprefix("/v1/rpc/")
            ways += [_over_socket(await stack.enter_async_context(bare(running, network=network))) for _ in range(4)]
        async with asyncio.TaskGroup() as group:
            for number, way in enumerate(ways):
                share = calls // len(ways)
                group.create_task(_send_all(way, [make() for _ in range(share)], size=BATCH if number % 2 else 1))


def _over_http(running: Worker, client: HttpClient, path: str) -> Callable[[bytes], Awaitable[Any]]:
    async def send(body: bytes) -> Any:
        reply = await client.send(request("POST", path, body, key=running.keys["main"]))
        assert reply.status == 200, (reply.status, reply.body)
        return reply.json

    return send


def _over_socket(socket: RawSocket) -> Callable[[bytes], Awaitable[Any]]:
    async def send(body: bytes) -> Any:
        socket.write(body)
        return await socket.json()

    return send


async def _send_all(way: Callable[[bytes], Awaitable[Any]], calls: list[GoodCall], *, size: int) -> None:
    for start in range(0, len(calls), size):
        some = calls[start : start + size]
        bodies = [{"jsonrpc": "2.0", "id": number, **call} for number, (call, _) in enumerate(some)]
        began = time.process_time()
        reply = await way(orjson.dumps(bodies if size > 1 else bodies[0]))
        assert time.process_time() - began < STALL_S, began
        expected = [{"jsonrpc": "2.0", "id": number, "result": result} for number, (_, result) in enumerate(some)]
        assert reply == (expected if size > 1 else expected[0]), (reply, expected)
