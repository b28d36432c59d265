"""Subscriptions on a socket: events, their order and their price; slow readers, and keys that change."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from socket import SO_SNDBUF, SOL_SOCKET
from typing import Any

import orjson
import pytest

from proxy.chains.evm.log_filter import parse
from proxy.core.access import Key, Limits
from proxy.core.limits import BucketRates
from proxy.core.pricing import size_units
from proxy.errors import Unavailable
from proxy.services.feed.topics import FeedEvent, Topic, refusal
from proxy.web.websocket import frames
from proxy.web.websocket.client_socket import ClientSocket
from proxy.web.websocket.subscriptions import BYTES_PER_UNIT
from tests.http_client import rpc
from tests.rpc_upstreams import Chain, ScriptedUpstream, scripted
from tests.service import SOON_S, until
from tests.sockets import HEADS, RawSocket, ScriptedFeed, bare, connected, head, heads, replace_feed
from tests.web.worker import LIVE, PLENTY, Worker, on_uvloop, running_worker

SUBSCRIBE = rpc("eth_subscribe", ["newHeads"])


@asynccontextmanager
async def served(network: str = LIVE, **sections: Any) -> AsyncIterator[tuple[Worker, ScriptedFeed, ScriptedUpstream]]:
    async with scripted(1, Chain()) as (upstream,), running_worker({network: [upstream.url]}, **sections) as running:
        yield running, replace_feed(running, network), upstream


# Start and end


@on_uvloop
async def test_subscription_is_confirmed_then_gets_events_and_ends() -> None:
    async with served() as (running, feed, _), connected(running) as client:
        id_ = await client.result("eth_subscribe", "newHeads")
        assert id_.startswith("0x")
        int(id_, 16)
        feed.emit(HEADS, *heads([1, 2]))
        feed.emit(HEADS, head(3))
        for number in (1, 2, 3):
            assert await client.event() == {"subscription": id_, "result": {"number": hex(number)}}
        assert await client.result("eth_unsubscribe", id_) is True
        assert feed.count == 0
        feed.emit(HEADS, head(4))
        assert (await client.error("eth_unsubscribe", id_))["message"] == "subscription not found"
        assert not client.events


@on_uvloop
async def test_notification_has_the_documented_form() -> None:
    async with served() as (running, feed, _), bare(running) as client:
        client.write(SUBSCRIBE)
        id_ = (await client.json())["result"]
        feed.emit(HEADS, head(1))
        wanted = {"subscription": id_, "result": {"number": "0x1"}}
        assert await client.json() == {"jsonrpc": "2.0", "method": "eth_subscription", "params": wanted}


@on_uvloop
async def test_ids_are_unique_on_a_socket_and_equal_across_sockets() -> None:
    async with served() as (running, feed, _), connected(running) as one, connected(running) as other:
        filters = [{}, {"address": "0x" + "ab" * 20}, {"topics": [None, "0x" + "00" * 32]}]
        ids = [await one.result("eth_subscribe", "newHeads") for _ in range(3)]
        ids += [await one.result("eth_subscribe", "logs", each) for each in filters for _ in range(2)]
        ids.append(await one.result("eth_subscribe", "newPendingTransactions"))
        ids.append(await one.result("eth_subscribe", "newPendingTransactions", True))
        ids.append(await one.result("eth_subscribe", "syncing"))
        assert len(set(ids)) == len(ids) == 12
        assert await other.result("eth_subscribe", "syncing") == ids[-1]
        assert await other.result("eth_subscribe", "newHeads") == ids[0]
        await one.result("eth_unsubscribe", ids[0])
        assert await one.result("eth_subscribe", "newHeads") not in ids
        event = head(1)
        feed.emit(HEADS, event)
        assert (await other.event())["subscription"] == ids[0]
        assert len(event.frames) == 4


@on_uvloop
async def test_ids_stay_unique_when_counts_are_dropped() -> None:
    async with served() as (running, _, __), connected(running) as client:
        seen = set()
        for n in range(1100):
            at = f"0x{n % 1050:040x}"
            id_ = await client.result("eth_subscribe", "logs", {"address": at})
            assert id_ not in seen
            seen.add(id_)
            await client.result("eth_unsubscribe", id_)


@on_uvloop
async def test_equal_filters_share_a_topic_and_others_do_not() -> None:
    async with served() as (running, feed, _), connected(running) as client:
        a, b = "0x" + "ab" * 20, "0x" + "cd" * 20
        first = await client.result("eth_subscribe", "logs", {"address": [a, b], "topics": []})
        second = await client.result("eth_subscribe", "logs", {"address": [b.upper().replace("X", "x"), a]})
        await client.result("eth_subscribe", "logs", {"address": a})
        topic = Topic("logs", parse({"address": [a, b]}))
        assert {found: len(listeners) for found, listeners in feed.listeners.items()} == {
            topic: 2,
            Topic("logs", parse({"address": a})): 1,
        }
        feed.emit(topic, FeedEvent(b'{"logIndex":"0x0"}', 1))
        assert {(await client.event())["subscription"] for _ in range(2)} == {first, second}


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ([], "newHeads, logs, newPendingTransactions, syncing"),
        (["newHead"], "newHeads, logs"),
        ([["newHeads"]], "newHeads, logs"),
        (["newHeads", {"address": "0x"}], "fromBlock"),
        (["newHeads", {"fromBlock": 7}], "fromBlock"),
        (["newHeads", {}, {}], "one option"),
        (["logs", []], "object"),
        (["logs", {"address": "0x12"}], "address"),
        (["logs", {"topics": "0x12"}], "topics"),
        (["logs", {"topics": [None] * 5}], "topics"),
        (["logs", {"adress": "0x12"}], "adress"),
        (["logs", {"fromBlock": "soon"}], "fromBlock"),
        (["newPendingTransactions", 1], "must be a boolean"),
        (["syncing", {}], "syncing"),
    ],
)
def test_error_of_a_bad_subscription_names_the_problem(params: list[Any], word: str) -> None:
    @on_uvloop
    async def check() -> None:
        async with served() as (running, feed, _), connected(running) as client:
            error = await client.error("eth_subscribe", *params)
            assert error["code"] == -32602
            assert word in error["message"]
            assert feed.count == 0
            assert await client.result("eth_chainId")

    check()


@on_uvloop
async def test_refused_subscription_is_an_error_and_leaves_nothing() -> None:
    async with served() as (running, feed, _), connected(running) as client:
        feed.refusal = refusal("not on this network", -32601)
        assert await client.error("eth_subscribe", "syncing") == {"code": -32601, "message": "not on this network"}
        feed.refusal = Unavailable("in a moment")
        assert (await client.error("eth_subscribe", "syncing"))["code"] == -32603
        feed.refusal = None
        assert await client.result("eth_subscribe", "syncing")
        assert feed.count == 1


@on_uvloop
async def test_subscriptions_of_a_socket_are_limited_by_its_plan() -> None:
    async with served() as (running, feed, _):
        running.add_key("small").account.plan = "free"
        async with connected(running, key="small") as client:
            ids = [await client.result("eth_subscribe", "newHeads") for _ in range(100)]
            error = await client.error("eth_subscribe", "newHeads")
            assert error["code"] == -32005
            assert "100" in error["message"]
            await client.result("eth_unsubscribe", ids[0])
            assert await client.result("eth_subscribe", "newHeads")
        await until(lambda: feed.count == 0)


@on_uvloop
async def test_subscription_needs_a_socket() -> None:
    async with served() as (running, _, __):
        reply = await running.send(SUBSCRIBE)
        assert "WebSocket" in reply.json["error"]["message"]


@on_uvloop
async def test_events_of_a_subscription_in_a_batch_follow_its_reply() -> None:
    async with served() as (running, feed, upstream), connected(running) as client:
        upstream.held.add("eth_estimateGas")
        await client.send(
            [
                {"jsonrpc": "2.0", "id": 1, "method": "eth_subscribe", "params": ["newHeads"]},
                {"jsonrpc": "2.0", "id": 2, "method": "eth_estimateGas", "params": [{}]},
                {"jsonrpc": "2.0", "id": 3, "method": "eth_subscribe", "params": ["nothing"]},
                {"jsonrpc": "2.0", "id": 4, "method": "eth_unsubscribe", "params": ["0x1"]},
            ]
        )
        await until(lambda: feed.count == 1)
        feed.emit(HEADS, head(1))
        upstream.gate.set()
        replies = await client.message()
        assert [reply["id"] for reply in replies] == [1, 2, 3, 4]
        assert [reply["error"]["code"] for reply in replies[2:]] == [-32602, -32000]
        feed.emit(HEADS, head(2))
        assert await client.event() == {"subscription": replies[0]["result"], "result": {"number": "0x1"}}
        assert (await client.event())["result"] == {"number": "0x2"}


# Replays


@on_uvloop
async def test_replay_comes_after_the_confirmation_and_goes_live() -> None:
    async with served() as (running, feed, _), connected(running) as client:
        feed.past = [heads(range(5, 8)), heads(range(8, 10))]
        id_ = await client.result("eth_subscribe", "newHeads", {"fromBlock": "0x5"})
        assert feed.replays == [(HEADS, 5)]
        await until(lambda: feed.count == 1)
        feed.emit(HEADS, head(10))
        assert [await client.event() for _ in range(6)] == [
            {"subscription": id_, "result": {"number": hex(n)}} for n in range(5, 11)
        ]
        await client.result("eth_subscribe", "logs", {"address": "0x" + "ab" * 20, "fromBlock": "0x7"})
        assert feed.replays[1] == (Topic("logs", parse({"address": "0x" + "ab" * 20})), 7)


@on_uvloop
async def test_long_replay_waits_for_its_reader_and_loses_nothing() -> None:
    """Far more than the queue holds: the replay pauses while the client does not read, and the socket stays open."""
    async with (
        served(sockets={"max_queue_bytes": 65536}) as (running, feed, _),
        bare(running, small_buffer=True) as client,
    ):
        feed.past = [heads(range(n, n + 50), size=2000) for n in range(0, 1000, 50)]
        shrink_send_buffers(running)
        client.write(rpc("eth_subscribe", ["newHeads", {"fromBlock": "0x0"}]))
        await until(lambda: backlogs_of(running))
        assert feed.count == 0
        assert "result" in await client.json()
        for number in range(1000):
            assert (await client.json())["params"]["result"]["number"] == hex(number)
        await until(lambda: feed.count == 1)


@on_uvloop
async def test_replay_that_fails_in_the_middle_ends_its_subscription_with_an_error() -> None:
    async with served() as (running, feed, _), connected(running) as client:
        feed.past = [heads([1])]
        feed.refusal = Unavailable("no upstream has it")
        id_ = await client.result("eth_subscribe", "newHeads", {"fromBlock": "0x1"})
        assert (await client.event())["result"] == {"number": "0x1"}
        message = await client.message()
        assert message["id"] is None
        assert message["error"]["code"] == -32603
        assert message["error"]["data"] == {"subscription": id_, "ended": True}
        assert (await client.error("eth_unsubscribe", id_))["code"] == -32000


# Solana


@on_uvloop
async def test_solana_subscriptions_have_their_own_form() -> None:
    async with served("solana/mainnet") as (running, feed, _), connected(running, network="solana/mainnet") as client:
        account = "SysvarC1ock11111111111111111111111111111111"
        assert await client.result("slotSubscribe") == 1
        assert await client.result("accountSubscribe", account, {"encoding": "base64"}) == 2
        assert await client.result("signatureSubscribe", "5" * 88) == 3
        kinds = {topic.kind: topic for topic in feed.listeners}
        assert kinds["slotSubscribe"] == Topic("slotSubscribe", b"[]")
        assert orjson.loads(kinds["accountSubscribe"].detail) == [account, {"encoding": "base64"}]  # type: ignore[arg-type]
        feed.emit(kinds["slotSubscribe"], FeedEvent(b'{"slot":9}'))
        feed.emit(kinds["signatureSubscribe"], FeedEvent(b'{"value":{"err":null}}', last=True))
        assert await client.message() == {
            "jsonrpc": "2.0",
            "method": "slotNotification",
            "params": {"subscription": 1, "result": {"slot": 9}},
        }
        assert (await client.message())["method"] == "signatureNotification"
        assert kinds["signatureSubscribe"] not in feed.listeners
        assert (await client.error("signatureUnsubscribe", 3))["message"] == "subscription not found"
        assert await client.result("accountUnsubscribe", 2) is True
        assert await client.result("slotUnsubscribe", 1) is True
        assert (await client.error("eth_subscribe", "newHeads"))["code"] == -32601
        assert feed.count == 0


# Slow readers


def backlogs_of(running: Worker) -> list[str]:
    sockets = [each for each in running.app.limiter.connections if isinstance(each, ClientSocket)]
    return [repr(socket.subscriptions.backlog) for socket in sockets if socket.subscriptions.backlog is not None]


async def subscribed(client: RawSocket) -> str:
    client.write(SUBSCRIBE)
    return str((await client.json())["result"])


@on_uvloop
async def test_one_stalled_client_among_a_thousand_is_closed_with_1013_and_others_are_not_affected() -> None:
    """Memory stays bounded by the queue and the transport's buffer."""
    async with AsyncExitStack() as stack:
        queue, size = 65536, 4000
        sections: dict[str, Any] = {
            "sockets": {"max_queue_bytes": queue},
            "server": {"connections_per_address": 20_000},
        }
        running, feed, _ = await stack.enter_async_context(served(**sections))
        stopped = await stack.enter_async_context(bare(running, small_buffer=True))
        await subscribed(stopped)
        shrink_send_buffers(running)
        others = [await stack.enter_async_context(bare(running)) for _ in range(999)]
        for client in others:
            await subscribed(client)
        sockets = [connection for connection in running.app.limiter.connections if isinstance(connection, ClientSocket)]
        (slow,) = (socket for socket in sockets if socket.transport and has_small_send_buffer(socket.transport))
        assert slow.transport is not None
        most = queue + slow.transport.get_write_buffer_limits()[1] + 2 * size
        number = 0
        while feed.count == 1000:
            number += 1
            assert number < 1000, "the stalled client was not closed"
            feed.emit(HEADS, head(number, size=size))
            await all_received(others, number)
            waiting = [socket.waiting_bytes for socket in sockets]
            assert sum(waiting) == slow.waiting_bytes <= most
        assert feed.count == 999
        feed.emit(HEADS, head(number + 1))
        await all_received(others, number + 1)
        # When it reads again, it gets all sent events in order, and a close frame with the reason.
        before, code = await everything(stopped)
        assert before == [hex(n) for n in range(1, len(before) + 1)]
        assert len(before) < number
        assert code == 1013


def shrink_send_buffers(running: Worker) -> None:
    """Shrink the kernel's send buffers of the open connections, which otherwise hold megabytes for a stalled client."""
    for connection in running.app.limiter.connections:
        assert connection.transport is not None
        connection.transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_SNDBUF, 4096)


def has_small_send_buffer(transport: asyncio.Transport) -> bool:
    return int(transport.get_extra_info("socket").getsockopt(SOL_SOCKET, SO_SNDBUF)) < 16_384


async def all_received(clients: list[RawSocket], number: int) -> None:
    wanted = b'"number":"%b"' % hex(number).encode()
    for client in clients:
        while (found := await client.frame())[0] == frames.PING:
            pass
        assert wanted in found[1]


async def everything(client: RawSocket) -> tuple[list[str], int]:
    """The numbers of all further heads, and the close code."""
    numbers = []
    while (found := await client.frame())[0] != frames.CLOSE:
        if found[0] == frames.TEXT:
            numbers.append(orjson.loads(found[1])["params"]["result"]["number"])
    return numbers, int.from_bytes(found[1][:2], "big")


@on_uvloop
async def test_slow_reader_gets_every_event() -> None:
    async with (
        served(sockets={"max_queue_bytes": 1 << 20}) as (running, feed, _),
        bare(running, small_buffer=True) as client,
    ):
        await subscribed(client)
        shrink_send_buffers(running)
        number = 0
        while not backlogs_of(running):
            number += 1
            feed.emit(HEADS, head(number, size=4000))
            await asyncio.sleep(0)
        for _ in range(100):
            number += 1
            feed.emit(HEADS, head(number, size=4000))
        for wanted in range(1, number + 1):
            assert (await client.json())["params"]["result"]["number"] == hex(wanted)
        await until(lambda: not backlogs_of(running))
        feed.emit(HEADS, head(number + 1))
        assert (await client.json())["params"]["result"]["number"] == hex(number + 1)


@on_uvloop
async def test_client_that_calls_without_reading_is_not_read() -> None:
    async with served() as (running, _, upstream), bare(running, small_buffer=True) as client:
        shrink_send_buffers(running)
        upstream.answers["eth_getCode"] = lambda params: params[0] + "ab" * 5000
        for n in range(600):
            client.write(rpc("eth_getCode", [f"0x{n:040x}", "latest"], id=n))
        await until(lambda: backlogs_of(running))
        # Calls in flight are answered, and then no further ones are sent upstream.
        await until(lambda: not any(connection.calls for connection in running.app.limiter.connections))  # type: ignore[attr-defined]
        asked = upstream.count("eth_getCode")
        assert asked < 400
        ids = [(await client.json())["id"] for _ in range(600)]
        assert sorted(ids) == [*range(600)]


# Units


@asynccontextmanager
async def poor(units: int, **sections: Any) -> AsyncIterator[tuple[Worker, ScriptedFeed, Key]]:
    """A key with this many units per second, and a scripted feed."""
    async with served(**sections) as (running, feed, _):
        yield running, feed, running.add_key("poor", limits=Limits(1000, units, 0))


@on_uvloop
async def test_key_without_units_gets_one_error_and_its_events_later() -> None:
    async with poor(20) as (running, feed, _), connected(running, key="poor") as client:
        id_ = await client.result("eth_subscribe", "newHeads")
        feed.emit(HEADS, *heads(range(1, 31)))
        feed.emit(HEADS, head(31))
        found = [await client.message() for _ in range(32)]
        errors = [each["error"] for each in found if "error" in each]
        assert [each["code"] for each in errors] == [-32005]
        assert errors[0]["data"]["subscription"] == id_
        assert errors[0]["data"]["retryAfter"] >= 1
        numbers = [each["params"]["result"]["number"] for each in found if "params" in each]
        assert numbers == [hex(n) for n in range(1, 32)]

        async def pays() -> bool:
            return "result" in await client.call("eth_gasPrice")

        await until(pays, every_s=0.1)


@on_uvloop
async def test_dropped_events_are_reported_with_their_blocks() -> None:
    async with (
        poor(20, sockets={"max_queue_bytes": 4096}) as (running, feed, _),
        connected(running, key="poor") as client,
    ):
        id_ = await client.result("eth_subscribe", "newHeads")
        feed.emit(HEADS, *heads(range(1, 101), size=500))
        found: list[dict[str, Any]] = []
        while not (found and "error" in found[-1] and "missed" in found[-1]["error"]["data"]):
            found.append(await client.message())
        numbers = [int(each["params"]["result"]["number"], 16) for each in found if "params" in each]
        assert numbers == [*range(1, len(numbers) + 1)]
        missed = found[-1]["error"]["data"]
        wanted = {"events": 100 - len(numbers), "fromBlock": hex(len(numbers) + 1), "toBlock": hex(100)}
        assert missed == {"subscription": id_, "missed": wanted}
        assert running.app.sockets.context.kinds["newHeads"].dropped == 100 - len(numbers)

        async def is_sent_again() -> bool:
            feed.emit(HEADS, head(101))
            return bool((await client.message())["params"]["result"]["number"] == hex(101))

        await until(is_sent_again)


@on_uvloop
async def test_events_cost_their_units() -> None:
    async with poor(50) as (running, feed, _), connected(running, key="poor") as client:
        await client.result("eth_subscribe", "newHeads")
        feed.emit(HEADS, *heads(range(45)))
        for _ in range(45):
            await client.event()
        error = (await client.call("eth_getLogs", {"fromBlock": "0x1", "toBlock": "0x1"})).get("error", {})
        assert error.get("code") == -32005


@on_uvloop
async def test_large_filter_costs_units_by_its_size() -> None:
    """Or its readers would take far more of our time than they pay for."""
    topics = [[f"0x{number:064x}" for number in range(index * 1000, index * 1000 + 1000)] for index in range(3)]
    async with poor(150) as (running, feed, _), connected(running, key="poor") as client:
        await client.result("eth_subscribe", "logs", {"topics": topics})
        error = await client.error("eth_subscribe", "logs", {"topics": topics[:2]})
        assert error["code"] == -32005
        assert feed.count == 1
        assert (await client.result("eth_subscribe", "logs", {"topics": [topics[0][:20]]})).startswith("0x")
        running.app.usage.gather()
        size, refused = (len(orjson.dumps(["logs", {"topics": topics[:count]}])) for count in (3, 2))
        units = 3 + size // BYTES_PER_UNIT + size_units(refused)
        assert running.app.tallies.of(LIVE, "eth_subscribe").units == units


@on_uvloop
async def test_free_events_are_sent_to_a_key_without_units() -> None:
    async with poor(20) as (running, feed, _), connected(running, key="poor") as client:
        await client.result("eth_subscribe", "syncing")
        await client.result("eth_subscribe", "newHeads")
        syncing = Topic("syncing")
        feed.emit(syncing, *(FeedEvent(b"%d" % n) for n in range(100)))
        for n in range(100):
            assert (await client.event())["result"] == n


@on_uvloop
async def test_unspent_units_are_refunded_when_the_last_socket_closes() -> None:
    async with poor(1000) as (running, feed, key):
        async with connected(running, key="poor") as client:
            await client.result("eth_subscribe", "newHeads")
            feed.emit(HEADS, head(1))
            await client.event()
            assert running.app.sockets.allowance_of(key).left == 20
        await until(lambda: len(running.app.sockets) == 0)
        assert "20" not in repr(running.app.sockets)


# Keys


async def close_code_of(client: RawSocket) -> int:
    async with asyncio.timeout(SOON_S):
        return await client.close_code()


@on_uvloop
async def test_only_a_revoked_keys_sockets_close_within_a_second() -> None:
    async with served() as (running, feed, _):
        key = running.add_key("leaving")
        async with bare(running, key="leaving") as one, bare(running, key="leaving") as two, bare(running) as other:
            for client in (one, two, other):
                await subscribed(client)
            running.app.keyring.remove(key)
            assert [await close_code_of(client) for client in (one, two)] == [1008, 1008]
            assert feed.count == 1
            feed.emit(HEADS, head(1))
            assert (await other.json())["params"]["result"]["number"] == "0x1"


@on_uvloop
async def test_expired_keys_sockets_close_within_a_second() -> None:
    async with served() as (running, _, __):
        running.add_key("short", lives_s=0.3)
        async with bare(running, key="short") as client:
            assert await close_code_of(client) == 1008


@on_uvloop
async def test_changed_key_keeps_its_sockets_and_gets_its_new_limits() -> None:
    async with served() as (running, feed, _):
        old = running.add_key("changing", limits=Limits(1000, 20, 0))
        async with connected(running, key="changing") as client:
            await client.result("eth_subscribe", "newHeads")
            change(running, old, limits=Limits(1000, 10_000, 0))
            await asyncio.sleep(0)
            feed.emit(HEADS, *heads(range(200)))
            for n in range(200):
                assert (await client.event())["result"] == {"number": hex(n)}


@on_uvloop
async def test_disabled_key_loses_its_sockets() -> None:
    async with served() as (running, _, __):
        old = running.add_key("disabled")
        async with bare(running, key="disabled") as client:
            change(running, old, disabled=True)
            assert await close_code_of(client) == 1008


def change(running: Worker, old: Key, *, limits: Limits = PLENTY, disabled: bool = False) -> None:
    """Replace a key as the keyring does when its row has changed."""
    new = Key(
        id=old.id,
        lineage=old.lineage,
        digest=old.digest,
        live=old.live,
        scopes=old.scopes,
        account=old.account,
        rate=BucketRates(old.rate.bucket_index, limits.requests_per_second, limits.units_per_second),
        disabled=disabled,
        expires_at=old.expires_at,
    )
    running.app.keyring.remove(old)
    running.app.keyring.add(new)


# The drain


@on_uvloop
async def test_drain_closes_with_1012_after_queued_events_and_calls_in_flight() -> None:
    async with (
        served(server={"drain_s": 20.0}) as (running, feed, upstream),
        bare(running) as idle,
        bare(running) as busy,
    ):
        await subscribed(idle)
        upstream.held.add("eth_estimateGas")
        busy.write(rpc("eth_estimateGas", [{}], id=7))
        await until(lambda: upstream.count("eth_estimateGas"))
        feed.emit(HEADS, *heads(range(3)))
        async with asyncio.TaskGroup() as group:
            group.create_task(running.app.stop())
            assert [(await idle.json())["params"]["result"]["number"] for _ in range(3)] == ["0x0", "0x1", "0x2"]
            assert await idle.close_code() == 1012
            idle.write((1012).to_bytes(2, "big"), frames.CLOSE)
            assert await idle.ended()
            upstream.gate.set()
            assert (await busy.json())["id"] == 7
            assert await busy.close_code() == 1012
            busy.write((1012).to_bytes(2, "big"), frames.CLOSE)
        assert not running.app.limiter.connections


# Many sockets


@on_uvloop
async def test_many_sockets_get_every_event_in_order_and_leave_nothing_behind() -> None:
    async with served(server={"connections_per_address": 20_000}) as (running, feed, _):
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(bare(running)) for _ in range(500)]
            for client in clients:
                await subscribed(client)
            events = heads(range(20))
            for event in events:
                feed.emit(HEADS, event)
            for client in clients:
                for number in range(20):
                    assert (await client.json())["params"]["result"]["number"] == hex(number)
            assert [len(event.frames) for event in events] == [1] * 20
        await until(lambda: len(running.app.sockets) == 0)
        assert feed.count == 0
        assert not running.app.limiter.connections
        await until(lambda: not in_memory(running))


def in_memory(running: Worker) -> list[ClientSocket]:
    gc.collect()
    return [
        found
        for found in gc.get_objects()
        if isinstance(found, ClientSocket) and found.context is running.app.sockets.context
    ]
