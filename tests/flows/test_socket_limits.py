"""Limits of a socket and of a key: all that waits for a client is bounded, and well-behaved clients are not closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Literal

from proxy.chains.evm.log_filter import LogFilter
from proxy.errors import Unavailable
from proxy.services.feed.topics import Topic
from proxy.web.websocket.client_socket import ClientSocket
from proxy.web.websocket.subscriptions import MOST_EARLY, Subscription
from tests.flows.test_socket_events import poor, served, shrink_send_buffers
from tests.http_client import rpc
from tests.service import until
from tests.sockets import HEADS, RawSocket, bare, connected, head, heads
from tests.web.worker import Worker, on_uvloop


def socket_of(running: Worker) -> ClientSocket:
    """The only open socket."""
    (found,) = running.app.limiter.connections
    assert isinstance(found, ClientSocket)
    return found


# Messages


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def timed() -> AsyncIterator[tuple[Clock, ClientSocket, RawSocket]]:
    """A socket whose clock the test controls. The sweep uses another clock and closes nothing."""
    async with served(server={"body_timeout_s": 600.0}) as (running, _, __):
        clock = Clock()
        running.app.sockets.context.now = clock
        async with bare(running) as client:
            yield clock, socket_of(running), client


async def write_cut(client: RawSocket, number: int) -> None:
    """Send the end of one message and the start of the next in one write."""
    text = rpc("eth_chainId", id=number)
    client.writer.write(frame_of(text)[9:] + frame_of(text)[:9])
    await client.writer.drain()


def frame_of(text: bytes) -> bytes:
    return bytes((0x81, 0x80 | len(text), 0, 0, 0, 0)) + text


@on_uvloop
async def test_client_whose_writes_always_end_inside_a_message_is_not_closed() -> None:
    async with timed() as (clock, socket, client):
        client.writer.write(frame_of(rpc("eth_chainId", id=1))[:9])
        for _ in range(5):
            await write_cut(client, 1)
            assert "result" in await client.json()
            clock.now_s += 400
            socket.check(clock.now_s)
            assert socket.is_open
        clock.now_s += 400  # No more of the incomplete message has arrived since.
        socket.check(clock.now_s)
        assert await client.close_code() == 1008


class Turnstile(asyncio.Event):
    """A gate that lets calls through one by one."""

    def __init__(self) -> None:
        super().__init__()
        self._passes = asyncio.Semaphore(0)

    async def wait(self) -> Literal[True]:
        if not self.is_set():
            await self._passes.acquire()
        return True

    def let_one_pass(self) -> None:
        self._passes.release()

    def set(self) -> None:
        super().set()
        for _ in range(1000):
            self._passes.release()


@on_uvloop
async def test_client_that_reads_no_replies_is_closed_at_the_byte_limit() -> None:
    limit, size = 65_536 * 4, 20_000
    async with (
        served(sockets={"max_unread_bytes": limit}) as (running, _, upstream),
        bare(running, small_buffer=True) as client,
    ):
        shrink_send_buffers(running)
        upstream.answers["eth_getCode"] = lambda params: params[0] + "ab" * (size // 2)
        upstream.held.add("eth_getCode")
        upstream.gate = turnstile = Turnstile()
        socket = socket_of(running)
        for n in range(100):
            client.write(rpc("eth_getCode", [f"0x{n:040x}", "latest"], id=n))
        await until(lambda: len(socket.calls) == 100)
        while socket.is_open:
            under_way = len(socket.calls)
            turnstile.let_one_pass()
            await until(lambda left=under_way: len(socket.calls) < left)
        assert socket.waiting_bytes < limit + 200  # and the close frame
        # When it reads again, it gets complete replies, and a close frame with the reason.
        assert await client.close_code() == 1013


# Subscriptions


@on_uvloop
async def test_subscriptions_of_an_account_are_limited_over_its_sockets() -> None:
    async with served() as (running, feed, _), AsyncExitStack() as stack:
        first = running.add_key("small")
        first.account.plan = "free"
        running.add_key("second", beside=first)
        keys = ["small"] * 6 + ["second"] * 5
        clients = [await stack.enter_async_context(connected(running, key=key)) for key in keys]
        ids = [[await client.result("eth_subscribe", "newHeads") for _ in range(100)] for client in clients[:10]]
        error = await clients[10].error("eth_subscribe", "newHeads")
        assert error["code"] == -32005
        assert "1000" in error["message"]
        await clients[9].result("eth_unsubscribe", ids[9][0])
        assert await clients[10].result("eth_subscribe", "newHeads")
        await clients[0].ws.close()
        await until(lambda: feed.count == 900)
        assert await clients[10].result("eth_subscribe", "newHeads")


@on_uvloop
async def test_subscription_ended_by_its_feed_reports_the_reason() -> None:
    async with served() as (running, feed, _), connected(running) as client:
        id_ = await client.result("eth_subscribe", "newHeads")
        (listener,) = feed.listeners[HEADS]
        listener.on_end(Unavailable("no upstream has it"))
        message = await client.message()
        assert (message["id"], message["error"]["code"]) == (None, -32603)
        assert message["error"]["data"] == {"subscription": id_, "ended": True}
        assert feed.count == 0
        assert (await client.error("eth_unsubscribe", id_))["code"] == -32000


# Replays


def call(id_: int, method: str, *params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id_, "method": method, "params": params}


@on_uvloop
async def test_replay_requested_in_a_batch_waits_for_the_reply_to_it() -> None:
    async with served() as (running, feed, upstream), connected(running) as client:
        feed.past = [heads(range(MOST_EARLY + 1)), [head(MOST_EARLY + 1)]]
        upstream.held.add("eth_estimateGas")
        await client.send([call(1, "eth_subscribe", "newHeads", {"fromBlock": "0x0"}), call(2, "eth_estimateGas", {})])
        await until(lambda: upstream.count("eth_estimateGas"))
        assert await client.result("eth_chainId")
        upstream.gate.set()
        replies = await client.message()
        id_ = replies[0]["result"]
        for number in range(MOST_EARLY + 2):
            assert await client.event() == {"subscription": id_, "result": {"number": hex(number)}}
        await until(lambda: feed.count == 1)


@on_uvloop
async def test_replay_does_not_start_if_its_socket_leaves_before_the_reply_to_its_batch() -> None:
    async with served() as (running, feed, upstream):
        async with connected(running) as client:
            upstream.held.add("eth_estimateGas")
            asked = [call(1, "eth_subscribe", "newHeads", {"fromBlock": "0x0"}), call(2, "eth_estimateGas", {})]
            await client.send(asked)
            await until(lambda: upstream.count("eth_estimateGas"))
        await until(lambda: len(running.app.sockets) == 0)
        await until(lambda: not subscribing())
        assert (feed.replays, feed.count) == ([], 0)


def subscribing() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_name().startswith("subscription")]


@on_uvloop
async def test_replay_loses_nothing_while_another_subscription_misses_events() -> None:
    async with (
        poor(20, sockets={"max_queue_bytes": 20_000}) as (running, feed, _),
        connected(running, key="poor") as client,
    ):
        other = Topic("logs", LogFilter())
        await client.result("eth_subscribe", "newHeads")
        replayed = await client.result("eth_subscribe", "logs", {"fromBlock": "0x1"})
        await until(lambda: other in feed.listeners)
        (listener,) = feed.listeners[other]
        assert isinstance(listener, Subscription)
        listener.replays = True  # As in the middle of a replay.
        feed.emit(HEADS, *heads(range(100), size=500))
        feed.emit(other, *heads(range(10)))
        found: list[str] = []
        while len(found) < 10:
            message = await client.message()
            if "params" in message and message["params"]["subscription"] == replayed:
                found.append(message["params"]["result"]["number"])
        assert found == [hex(n) for n in range(10)]
        assert running.app.sockets.context.kinds["newHeads"].dropped > 0
        assert running.app.sockets.context.kinds["logs"].dropped == 0
