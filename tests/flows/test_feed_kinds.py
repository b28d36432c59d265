"""The other subscriptions: pending transactions, syncing, and Solana's own, each from one source for all who listen."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from aiohttp import web

from proxy.errors import Unavailable
from proxy.services.feed import pending, svm_feed
from proxy.services.feed.topics import Topic
from proxy.services.rpc.calls import RpcError
from proxy.web.websocket.frames import frame
from proxy.wire.upstream_stream import UpstreamStream
from tests.feed_upstreams import FeedScene, FeedUpstream, feed_scene
from tests.rpc_upstreams import Refused
from tests.service import until
from tests.svm_upstreams import SvmChain, SvmUpstream
from tests.web.worker import on_uvloop

HASHES, WHOLE = Topic("newPendingTransactions", False), Topic("newPendingTransactions", True)
SYNCING = Topic("syncing")
SOLANA = "solana/mainnet"


def tx(number: int) -> dict[str, Any]:
    return {"hash": f"0x{number:064x}", "nonce": hex(number)}


class PoolUpstream(FeedUpstream):
    """With a pool of pending transactions."""

    def __init__(self, chain: Any) -> None:
        super().__init__(chain)
        self.pool: list[dict[str, Any]] = []
        self.knows_flag = True
        self.polled = 0

    async def send(self, number: int) -> None:
        sent = tx(number)
        self.pool.append(sent)
        await self.tell(lambda _, params: params == ["newPendingTransactions"], sent["hash"])
        result = sent if self.knows_flag else sent["hash"]
        await self.tell(lambda _, params: params == ["newPendingTransactions", True], result)

    def _eth_newPendingTransactionFilter(self, params: list[Any]) -> str:
        self.polled = len(self.pool)
        return "0xf1"

    def _eth_getFilterChanges(self, params: list[Any]) -> list[str]:
        if params != ["0xf1"]:
            raise Refused(-32000, "filter not found")
        new, self.polled = self.pool[self.polled :], len(self.pool)
        return [each["hash"] for each in new]

    def _eth_getTransactionByHash(self, params: list[Any]) -> Any:
        return next((each for each in self.pool if each["hash"] == params[0]), None)


@asynccontextmanager
async def pool_scene(*kinds: str) -> AsyncIterator[tuple[FeedScene, list[Any]]]:
    async with feed_scene(kinds, kind=PoolUpstream) as found:
        yield found, found.upstreams


@on_uvloop
async def test_pending_transactions_by_hash_and_whole_from_one_stream() -> None:
    async with pool_scene("ws", "http") as (found, (first, second)):
        hashes = [await found.listen(HASHES) for _ in range(3)]
        whole = await found.listen(WHOLE)
        for number in range(5):
            await first.send(number)
        for ear in hashes:
            await until(lambda ear=ear: ear.results == [tx(number)["hash"] for number in range(5)])
        await until(lambda: whole.results == [tx(number) for number in range(5)])
        assert len(first.subscriptions) == 2
        assert second.calls == []
        for ear in hashes:
            found.feed.unsubscribe(HASHES, ear)
        found.feed.unsubscribe(WHOLE, whole)
        await until(lambda: not first.subscriptions)


@on_uvloop
async def test_whole_transactions_are_asked_for_where_the_stream_tells_only_hashes() -> None:
    async with pool_scene("ws") as (found, (first,)):
        first.knows_flag = False
        whole = await found.listen(WHOLE)
        await first.send(7)
        await until(lambda: whole.results == [tx(7)])


@on_uvloop
async def test_upstream_that_refuses_the_flag_for_whole_transactions_is_asked_for_hashes() -> None:
    async with pool_scene("ws") as (found, (first,)):

        def refuse_flag(params: list[Any]) -> str:
            if params[1:]:
                raise Refused(-32602, "too many arguments, want at most 1")
            return "0x1"

        first.answers["eth_subscribe"] = refuse_flag
        hashes, whole = await found.listen(HASHES), await found.listen(WHOLE)
        await first.send(7)
        await until(lambda: whole.results == [tx(7)])
        assert hashes.results == [tx(7)["hash"]]
        assert first.count("eth_newPendingTransactionFilter") == 0


@pytest.mark.parametrize("kinds", [("http",), ("ws",)])
def test_pending_transactions_are_polled_where_no_stream_tells_of_them(kinds: tuple[str, ...]) -> None:
    @on_uvloop
    async def run() -> None:
        def refuse(_: Any) -> Any:
            raise Refused(-32601, "no such subscription")

        async with pool_scene(*kinds) as (found, (first,)):
            first.answers["eth_subscribe"] = refuse
            hashes, whole = await found.listen(HASHES), await found.listen(WHOLE)
            await first.send(1)
            await first.send(2)
            await until(lambda: hashes.results == [tx(1)["hash"], tx(2)["hash"]])
            await until(lambda: sorted(each["nonce"] for each in whole.results) == ["0x1", "0x2"])

    run()


@on_uvloop
async def test_pending_transaction_is_told_once_although_two_sources_tell_of_it() -> None:
    async with pool_scene("ws", "ws") as (found, (first, second)):
        ear = await found.listen(HASHES)
        await first.send(1)
        await until(lambda: len(ear.events) == 1)
        await first.kill()
        await until(lambda: second.subscriptions)
        await second.send(1)
        await second.send(2)
        await until(lambda: len(ear.events) == 2)
        assert ear.results == [tx(1)["hash"], tx(2)["hash"]]


@on_uvloop
async def test_network_that_tells_of_no_pending_transactions_says_so() -> None:
    limit, pending.READY_S = pending.READY_S, 0.5
    try:
        async with pool_scene("http") as (found, (first,)):

            def refuse(_: Any) -> Any:
                raise Refused(-32601, "no such method")

            first.answers["eth_newPendingTransactionFilter"] = refuse
            with pytest.raises(Unavailable, match="pending transactions"):
                await found.listen(HASHES)
    finally:
        pending.READY_S = limit


@on_uvloop
async def test_syncing_is_told_when_it_changes_in_geths_words() -> None:
    async with feed_scene(["http"]) as found:
        found.evm.syncing._every_s = 0.02
        ear = await found.listen(SYNCING)
        upstream = found.upstreams[0]
        await until(lambda: found.count("eth_syncing") > 2)
        progress = iter(range(1, 10_000))
        upstream.answers["eth_syncing"] = lambda _: {"currentBlock": hex(next(progress))}
        await until(lambda: ear.events)
        asked = found.count("eth_syncing")
        await until(lambda: found.count("eth_syncing") > asked + 2)
        upstream.answers.clear()
        await until(lambda: len(ear.events) == 2)
        assert ear.results[0]["syncing"] is True
        assert ear.results[0]["status"]["currentBlock"].startswith("0x")
        assert ear.results[1] is False


# Solana


class SvmFeedUpstream(FeedUpstream, SvmUpstream):
    """`landed`: a signature's notice is sent in one piece with its confirmation. `waiting`: calls that the test answers."""

    landed = False
    waiting: list[tuple[web.WebSocketResponse, dict[str, Any]]] | None = None

    async def _answer_on(self, socket: web.WebSocketResponse, call: dict[str, Any]) -> None:
        if self.waiting is not None:
            self.waiting.append((socket, call))
            return
        if not self.landed:
            await super()._answer_on(socket, call)
            return
        self.subscribed += 1
        params = {
            "subscription": self.name_of(self.subscribed),
            "result": {"context": {"slot": 5}, "value": {"err": None}},
        }
        reply = {"jsonrpc": "2.0", "id": call["id"], "result": params["subscription"]}
        notice = {"jsonrpc": "2.0", "method": "signatureNotification", "params": params}
        transport = self._sockets[socket].transport
        assert transport is not None
        transport.write(frame(orjson.dumps(reply)) + frame(orjson.dumps(notice)))

    async def answer_all(self) -> None:
        waiting, self.waiting = self.waiting or [], None
        for socket, call in waiting:
            await self._answer_on(socket, call)

    def name_of(self, serial: int) -> int:
        return 100 + serial

    def notices_of(self, method: str) -> str:
        return method.replace("Subscribe", "Notification")

    async def slot(self, number: int) -> None:
        await self.tell(
            lambda method, _: method == "slotSubscribe", {"parent": number - 1, "root": number - 32, "slot": number}
        )

    async def change(self, kind: str, params: list[Any], value: Any, slot: int = 5) -> None:
        result = {"context": {"slot": slot}, "value": value}
        await self.tell(lambda method, given: (method, given) == (kind, params), result)


@asynccontextmanager
async def solana(*kinds: str) -> AsyncIterator[tuple[FeedScene, list[Any]]]:
    async with feed_scene(kinds, kind=SvmFeedUpstream, chain=SvmChain(), network=SOLANA) as found:
        yield found, found.upstreams


def svm_topic(kind: str, *params: Any) -> Topic:
    return Topic(kind, orjson.dumps(params))


SLOTS = svm_topic("slotSubscribe")
ACCOUNT = svm_topic("accountSubscribe", "abc", {"encoding": "base64"})
SIGNATURE = svm_topic("signatureSubscribe", "sig")


@on_uvloop
async def test_solanas_subscriptions_are_made_once_and_shared() -> None:
    async with solana("ws", "http") as (found, (first, _)):
        slots = [await found.listen(SLOTS) for _ in range(4)]
        account, other = await found.listen(ACCOUNT), await found.listen(svm_topic("accountSubscribe", "def"))
        assert first.subscribed == 3
        await first.slot(40)
        await first.slot(41)
        await first.change("accountSubscribe", ["abc", {"encoding": "base64"}], {"lamports": 1})
        for ear in slots:
            await until(lambda ear=ear: [each["slot"] for each in ear.results] == [40, 41])
            assert [event.block for event in ear.events] == [40, 41]
        await until(lambda: account.results == [{"context": {"slot": 5}, "value": {"lamports": 1}}])
        assert other.events == []
        found.feed.unsubscribe(ACCOUNT, account)
        await until(lambda: len(first.subscriptions) == 2)
        for ear in slots:
            found.feed.unsubscribe(SLOTS, ear)
        await until(lambda: len(first.subscriptions) == 1)


@on_uvloop
async def test_solanas_subscriptions_are_made_again_when_the_upstream_dies() -> None:
    async with solana("ws", "ws") as (found, (first, second)):
        slots, account = await found.listen(SLOTS), await found.listen(ACCOUNT)
        await first.slot(40)
        await first.slot(41)
        await until(lambda: len(slots.events) == 2)
        await first.kill()
        await until(lambda: len(second.subscriptions) == 2)
        for number in (40, 41, 42):  # It is behind.
            await second.slot(number)
        await second.change("accountSubscribe", ["abc", {"encoding": "base64"}], {"lamports": 2})
        await until(lambda: account.events)
        await until(lambda: [each["slot"] for each in slots.results] == [40, 41, 42])


@on_uvloop
async def test_signature_subscription_ends_with_its_notice() -> None:
    async with solana("ws") as (found, (first,)):
        ears = [await found.listen(SIGNATURE) for _ in range(2)]
        await first.change("signatureSubscribe", ["sig"], "receivedSignature", slot=6)
        await first.change("signatureSubscribe", ["sig"], {"err": None}, slot=7)
        for ear in ears:
            await until(lambda ear=ear: len(ear.events) == 2)
            assert [(event.block, event.last) for event in ear.events] == [(6, False), (7, True)]
        again = await found.listen(SIGNATURE)
        assert first.subscribed == 2
        found.feed.unsubscribe(SIGNATURE, ears[0])  # It is over: nothing happens.
        await first.change("signatureSubscribe", ["sig"], {"err": None}, slot=8)
        await until(lambda: again.events)


@on_uvloop
async def test_signature_that_has_landed_before_its_confirmation_leaves_nothing_behind() -> None:
    async with solana("ws") as (found, (first,)):
        await found.listen(SLOTS)
        first.landed = True
        for n in range(5):
            ear = await found.listen(svm_topic("signatureSubscribe", f"sig{n}"))
            await until(lambda ear=ear: [event.last for event in ear.events] == [True])
        assert streams() == ["<Stream solana/mainnet#1 open, 1 subscriptions>"]


def streams() -> list[str]:
    gc.collect()
    return [repr(found) for found in gc.get_objects() if isinstance(found, UpstreamStream) and found.is_open]


@on_uvloop
async def test_solanas_subscriptions_are_made_again_many_at_a_time() -> None:
    async with solana("ws", "ws") as (found, (first, second)):
        ears = [await found.listen(svm_topic("accountSubscribe", f"acc{n}")) for n in range(svm_feed.AT_ONCE + 8)]
        second.waiting = []
        await first.kill()
        await until(lambda: len(second.waiting) == svm_feed.AT_ONCE)
        await second.answer_all()
        await until(lambda: len(second.subscriptions) == len(ears))
        for n, ear in enumerate(ears):
            await second.change("accountSubscribe", [f"acc{n}"], n)
            await until(lambda ear=ear: ear.events)


@on_uvloop
async def test_slots_of_a_network_that_was_started_anew_are_told() -> None:
    async with solana("ws") as (found, (first,)):
        ear = await found.listen(SLOTS)
        for slot in (10_000, 9_999, 5, 4, 6):
            await first.slot(slot)
        await until(lambda: [each["slot"] for each in ear.results] == [10_000, 5, 6])


@on_uvloop
async def test_solanas_upstream_without_a_socket_is_named_in_the_error() -> None:
    async with solana("http") as (found, _):
        with pytest.raises(RpcError, match=r"-32601.*solana/mainnet has no upstream with a WebSocket"):
            await found.listen(SLOTS)


@on_uvloop
async def test_solanas_refusal_is_passed_on_and_the_next_one_is_tried_anew() -> None:
    async with solana("ws") as (found, (first,)):

        def refuse(_: Any) -> Any:
            raise Refused(-32602, "Invalid Request: Invalid pubkey provided")

        first.answers["accountSubscribe"] = refuse
        async with asyncio.TaskGroup() as group:
            tries = [group.create_task(_error_of(found, ACCOUNT)) for _ in range(3)]
        assert all(b"Invalid pubkey" in each.result() for each in tries)
        first.answers.clear()
        ear = await found.listen(ACCOUNT)
        await first.change("accountSubscribe", ["abc", {"encoding": "base64"}], 1)
        await until(lambda: ear.events)


async def _error_of(found: FeedScene, topic: Topic) -> bytes:
    with pytest.raises(RpcError) as refused:
        await found.listen(topic)
    return refused.value.error


@on_uvloop
async def test_solanas_subscriptions_have_no_cursor_and_no_other_kinds() -> None:
    async with solana("ws") as (found, _):
        with pytest.raises(RpcError, match="fromBlock"):
            await found.listen(SLOTS, from_block=5)
        with pytest.raises(RpcError, match="voteSubscribe"):
            await found.listen(svm_topic("voteSubscribe"))
