"""Pending transactions, syncing and Solana's subscriptions, each served to all listeners from one source."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from proxy.core.usage import Tally
from proxy.errors import Unavailable
from proxy.services.feed import pending, svm_feed
from proxy.services.feed.topics import Topic
from proxy.services.rpc.calls import RpcError
from proxy.wire.upstream_stream import UpstreamStream
from tests.feed_upstreams import FeedHarness, FeedUpstream, RecordingListener, feed_harness
from tests.rpc_upstreams import Refused
from tests.service import until
from tests.svm_upstreams import SvmChain, SvmFeedUpstream
from tests.web.worker import on_uvloop

HASHES, FULL = Topic("newPendingTransactions", False), Topic("newPendingTransactions", True)
SYNCING = Topic("syncing")
SOLANA = "solana/mainnet"


def tx(number: int) -> dict[str, Any]:
    return {"hash": f"0x{number:064x}", "nonce": hex(number)}


class PoolUpstream(FeedUpstream):
    """An upstream with a pool of pending transactions."""

    def __init__(self, chain: Any) -> None:
        super().__init__(chain)
        self.pool: list[dict[str, Any]] = []
        self.supports_flag = True
        self.polled = 0

    async def send(self, number: int) -> None:
        sent = tx(number)
        self.pool.append(sent)
        await self.notify(lambda _, params: params == ["newPendingTransactions"], sent["hash"])
        result = sent if self.supports_flag else sent["hash"]
        await self.notify(lambda _, params: params == ["newPendingTransactions", True], result)

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
async def pool_harness(*kinds: str) -> AsyncIterator[tuple[FeedHarness, list[Any]]]:
    async with feed_harness(kinds, kind=PoolUpstream) as harness:
        yield harness, harness.upstreams


@on_uvloop
async def test_pending_transactions_by_hash_and_in_full_from_one_stream() -> None:
    async with pool_harness("ws", "http") as (harness, (first, second)):
        hashes = [await harness.listen(HASHES) for _ in range(3)]
        full = await harness.listen(FULL)
        for number in range(5):
            await first.send(number)
        for listener in hashes:
            await until(lambda listener=listener: listener.results == [tx(number)["hash"] for number in range(5)])
        await until(lambda: full.results == [tx(number) for number in range(5)])
        assert len(first.subscriptions) == 2
        assert second.calls == []
        for listener in hashes:
            harness.feed.unsubscribe(HASHES, listener)
        harness.feed.unsubscribe(FULL, full)
        await until(lambda: not first.subscriptions)


@on_uvloop
async def test_full_transactions_are_fetched_if_the_stream_sends_only_hashes() -> None:
    async with pool_harness("ws") as (harness, (first,)):
        first.supports_flag = False
        full = await harness.listen(FULL)
        await first.send(7)
        await until(lambda: full.results == [tx(7)])


class PayingListener(RecordingListener):
    """A listener of an account with this many units."""

    def __init__(self, account: str, units: int) -> None:
        super().__init__()
        self.account = account
        self.units = units

    def charge(self, units: int, tally: Tally) -> bool:
        if units > self.units:
            return False
        assert tally.labels[1] == "eth_getTransactionByHash"
        self.units -= units
        return True


@on_uvloop
async def test_accounts_pay_in_turn_for_full_transactions_that_are_fetched() -> None:
    async with pool_harness("ws") as (harness, (first,)):
        first.supports_flag = False
        route = harness.worker.app.networks.routes[harness.network]
        price = route.state.price(route.policies["eth_getTransactionByHash"], b'["0x"]')
        listeners = [PayingListener(f"acct_{n}", 2 * price) for n in range(2)]
        for listener in listeners:
            await harness.feed.subscribe(FULL, listener)
        for number in range(4):
            await first.send(number)
            await until(lambda number=number: all(len(each.events) == number + 1 for each in listeners))
            assert sum(each.units for each in listeners) == (3 - number) * price
            assert abs(listeners[0].units - listeners[1].units) <= price
        # No account has units for another call, so none is made; hashes cost no call.
        hashes = await harness.listen(HASHES)
        calls = harness.count("eth_getTransactionByHash")
        await first.send(4)
        await until(lambda: hashes.results == [tx(4)["hash"]])
        listeners[0].units = price
        await first.send(5)
        await until(lambda: len(listeners[1].events) == 5)
        assert listeners[1].results[-1] == tx(5)
        assert harness.count("eth_getTransactionByHash") == calls + 1


@on_uvloop
async def test_upstream_that_refuses_the_flag_for_full_transactions_is_subscribed_for_hashes() -> None:
    async with pool_harness("ws") as (harness, (first,)):

        def refuse_flag(params: list[Any]) -> str:
            if params[1:]:
                raise Refused(-32602, "too many arguments, want at most 1")
            return "0x1"

        first.answers["eth_subscribe"] = refuse_flag
        hashes, full = await harness.listen(HASHES), await harness.listen(FULL)
        await first.send(7)
        await until(lambda: full.results == [tx(7)])
        assert hashes.results == [tx(7)["hash"]]
        assert first.count("eth_newPendingTransactionFilter") == 0


@pytest.mark.parametrize("kinds", [("http",), ("ws",)])
@on_uvloop
async def test_pending_transactions_are_polled_if_no_stream_reports_them(kinds: tuple[str, ...]) -> None:
    def refuse(_: Any) -> Any:
        raise Refused(-32601, "no such subscription")

    async with pool_harness(*kinds) as (harness, (first,)):
        first.answers["eth_subscribe"] = refuse
        hashes, full = await harness.listen(HASHES), await harness.listen(FULL)
        await first.send(1)
        await first.send(2)
        await until(lambda: hashes.results == [tx(1)["hash"], tx(2)["hash"]])
        await until(lambda: sorted(each["nonce"] for each in full.results) == ["0x1", "0x2"])


@on_uvloop
async def test_pending_transaction_is_sent_once_although_two_sources_report_it() -> None:
    async with pool_harness("ws", "ws") as (harness, (first, second)):
        listener = await harness.listen(HASHES)
        await first.send(1)
        await until(lambda: len(listener.events) == 1)
        await first.kill()
        await until(lambda: second.subscriptions)
        await second.send(1)
        await second.send(2)
        await until(lambda: len(listener.events) == 2)
        assert listener.results == [tx(1)["hash"], tx(2)["hash"]]


@on_uvloop
async def test_network_without_pending_transactions_fails_with_a_reason() -> None:
    limit, pending.READY_S = pending.READY_S, 0.5
    try:
        async with pool_harness("http") as (harness, (first,)):

            def refuse(_: Any) -> Any:
                raise Refused(-32601, "no such method")

            first.answers["eth_newPendingTransactionFilter"] = refuse
            with pytest.raises(Unavailable, match="pending transactions"):
                await harness.listen(HASHES)
    finally:
        pending.READY_S = limit


@on_uvloop
async def test_syncing_is_sent_on_change_in_geths_format() -> None:
    async with feed_harness(["http"]) as harness:
        harness.evm.syncing._poll_s = 0.02
        listener = await harness.listen(SYNCING)
        upstream = harness.upstreams[0]
        await until(lambda: harness.count("eth_syncing") > 2)
        progress = iter(range(1, 10_000))
        upstream.answers["eth_syncing"] = lambda _: {"currentBlock": hex(next(progress))}
        await until(lambda: listener.events)
        calls = harness.count("eth_syncing")
        await until(lambda: harness.count("eth_syncing") > calls + 2)
        upstream.answers.clear()
        await until(lambda: len(listener.events) == 2)
        assert listener.results[0]["syncing"] is True
        assert listener.results[0]["status"]["currentBlock"].startswith("0x")
        assert listener.results[1] is False


# Solana


@asynccontextmanager
async def solana(*kinds: str) -> AsyncIterator[tuple[FeedHarness, list[Any]]]:
    async with feed_harness(kinds, kind=SvmFeedUpstream, chain=SvmChain(), network=SOLANA) as harness:
        yield harness, harness.upstreams


def svm_topic(kind: str, *params: Any) -> Topic:
    return Topic(kind, orjson.dumps(params))


SLOTS = svm_topic("slotSubscribe")
ACCOUNT = svm_topic("accountSubscribe", "abc", {"encoding": "base64"})
SIGNATURE = svm_topic("signatureSubscribe", "sig")


@on_uvloop
async def test_solanas_subscriptions_are_made_once_and_shared() -> None:
    async with solana("ws", "http") as (harness, (first, _)):
        slots = [await harness.listen(SLOTS) for _ in range(4)]
        account, other = await harness.listen(ACCOUNT), await harness.listen(svm_topic("accountSubscribe", "def"))
        assert first.subscribed == 3
        await first.slot(40)
        await first.slot(41)
        await first.change("accountSubscribe", ["abc", {"encoding": "base64"}], {"lamports": 1})
        for listener in slots:
            await until(lambda listener=listener: [each["slot"] for each in listener.results] == [40, 41])
            assert [event.block for event in listener.events] == [40, 41]
        await until(lambda: account.results == [{"context": {"slot": 5}, "value": {"lamports": 1}}])
        assert other.events == []
        harness.feed.unsubscribe(ACCOUNT, account)
        await until(lambda: len(first.subscriptions) == 2)
        for listener in slots:
            harness.feed.unsubscribe(SLOTS, listener)
        await until(lambda: len(first.subscriptions) == 1)


@on_uvloop
async def test_solanas_subscriptions_are_made_again_when_the_upstream_dies() -> None:
    async with solana("ws", "ws") as (harness, (first, second)):
        slots, account = await harness.listen(SLOTS), await harness.listen(ACCOUNT)
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
async def test_signature_subscription_ends_with_its_notification() -> None:
    async with solana("ws") as (harness, (first,)):
        listeners = [await harness.listen(SIGNATURE) for _ in range(2)]
        await first.change("signatureSubscribe", ["sig"], "receivedSignature", slot=6)
        await first.change("signatureSubscribe", ["sig"], {"err": None}, slot=7)
        for listener in listeners:
            await until(lambda listener=listener: len(listener.events) == 2)
            assert [(event.block, event.last) for event in listener.events] == [(6, False), (7, True)]
        second = await harness.listen(SIGNATURE)
        assert first.subscribed == 2
        harness.feed.unsubscribe(SIGNATURE, listeners[0])  # It has ended already: nothing happens.
        await first.change("signatureSubscribe", ["sig"], {"err": None}, slot=8)
        await until(lambda: second.events)


@on_uvloop
async def test_signature_that_landed_before_its_confirmation_leaves_no_subscription_behind() -> None:
    async with solana("ws") as (harness, (first,)):
        await harness.listen(SLOTS)
        first.landed = True
        for n in range(5):
            listener = await harness.listen(svm_topic("signatureSubscribe", f"sig{n}"))
            await until(lambda listener=listener: [event.last for event in listener.events] == [True])
        assert streams() == ["<UpstreamStream solana/mainnet#1 open, 1 subscriptions>"]


def streams() -> list[str]:
    gc.collect()
    return [repr(each) for each in gc.get_objects() if isinstance(each, UpstreamStream) and each.is_open]


@on_uvloop
async def test_solanas_subscriptions_are_made_again_concurrently() -> None:
    async with solana("ws", "ws") as (harness, (first, second)):
        listeners = [
            await harness.listen(svm_topic("accountSubscribe", f"acc{n}")) for n in range(svm_feed.CONCURRENCY + 8)
        ]
        second.waiting = []
        await first.kill()
        await until(lambda: len(second.waiting) == svm_feed.CONCURRENCY)
        await second.answer_all()
        await until(lambda: len(second.subscriptions) == len(listeners))
        for n, listener in enumerate(listeners):
            await second.change("accountSubscribe", [f"acc{n}"], n)
            await until(lambda listener=listener: listener.events)


@on_uvloop
async def test_working_stream_is_kept_while_a_better_upstream_cannot_be_reached() -> None:
    """Its health may lag behind: each attempt to return would end the subscriptions and lose their notifications."""
    async with solana("ws", "ws") as (harness, (first, second)):
        listener = await harness.listen(ACCOUNT)
        await first.kill()
        await until(lambda: second.subscriptions)
        feed = harness.feed
        assert isinstance(feed, svm_feed.SvmFeed)
        (dead, _) = feed._sources._sources
        for number in range(3):
            failures = dead.backoff_s
            while dead.backoff_s == failures:
                dead.upstream.health.silent = False
                dead.retry_at = 0.0
                await asyncio.sleep(0.02)
            await second.change("accountSubscribe", ["abc", {"encoding": "base64"}], number)
            await until(lambda number=number: len(listener.events) == number + 1)
        assert second.subscribed == 1
        await first.open()
        await until(lambda: len(first.subscriptions) == 1)


@on_uvloop
async def test_slots_of_a_restarted_network_are_sent() -> None:
    async with solana("ws") as (harness, (first,)):
        listener = await harness.listen(SLOTS)
        for slot in (10_000, 9_999, 5, 4, 6):
            await first.slot(slot)
        await until(lambda: [each["slot"] for each in listener.results] == [10_000, 5, 6])


@on_uvloop
async def test_solana_network_without_a_websocket_is_named_in_the_error() -> None:
    async with solana("http") as (harness, _):
        with pytest.raises(RpcError, match=r"-32601.*solana/mainnet has no upstream with a WebSocket"):
            await harness.listen(svm_topic("voteSubscribe"))


@on_uvloop
async def test_solanas_refusal_is_passed_on_and_the_next_subscription_is_tried_again() -> None:
    async with solana("ws") as (harness, (first,)):

        def refuse(_: Any) -> Any:
            raise Refused(-32602, "Invalid Request: Invalid pubkey provided")

        first.answers["accountSubscribe"] = refuse
        async with asyncio.TaskGroup() as group:
            tries = [group.create_task(_error_of(harness, ACCOUNT)) for _ in range(3)]
        assert all(b"Invalid pubkey" in each.result() for each in tries)
        first.answers.clear()
        listener = await harness.listen(ACCOUNT)
        await first.change("accountSubscribe", ["abc", {"encoding": "base64"}], 1)
        await until(lambda: listener.events)


async def _error_of(harness: FeedHarness, topic: Topic) -> bytes:
    with pytest.raises(RpcError) as refused:
        await harness.listen(topic)
    return refused.value.error


@on_uvloop
async def test_solana_has_neither_replays_nor_other_subscriptions() -> None:
    async with solana("ws") as (harness, _):
        with pytest.raises(RpcError, match="fromBlock"):
            await harness.listen(SLOTS, from_block=5)
        with pytest.raises(RpcError, match="shredSubscribe"):
            await harness.listen(svm_topic("shredSubscribe"))
