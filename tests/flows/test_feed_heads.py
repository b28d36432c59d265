"""Every head is sent once and in order, whichever upstreams fail. Heads are compared with the chain by hash."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from proxy.core.head_chain import DEPTH
from proxy.errors import Unavailable
from proxy.services.feed import evm_feed
from proxy.services.feed.blocks import read_block
from proxy.services.rpc.tracker import Tracker
from tests.feed_upstreams import HEADS, FeedHarness, RecordingListener, feed_harness
from tests.service import holds, until
from tests.sockets import connected
from tests.web.worker import LIVE, on_uvloop

FIELDS = {"number", "hash", "parentHash", "timestamp", "gasUsed", "gasLimit", "baseFeePerGas"}


async def mine_slowly(harness: FeedHarness, count: int, every_s: float = 0.02) -> None:
    for _ in range(count):
        await harness.chain.mine()
        await asyncio.sleep(every_s)


@on_uvloop
async def test_heads_come_from_one_subscription_for_all_listeners() -> None:
    async with feed_harness(["ws", "http"]) as harness:
        listeners = [await harness.listen(HEADS) for _ in range(20)]
        start = len(harness.chain.canonical)
        await harness.chain.mine(5)
        for listener in listeners:
            await harness.until_tip(listener)
            assert listener.hashes == harness.chain.canonical[start:]
        assert harness.upstreams[0].subscribed == 1
        assert harness.upstreams[1].calls == []
        # All listeners get the same event object, so that it is framed once.
        assert all(one is other for one, other in zip(listeners[0].events, listeners[-1].events, strict=True))


@pytest.mark.parametrize("kind", ["ws", "http"])
@on_uvloop
async def test_head_has_the_specified_fields_and_no_transactions(kind: str) -> None:
    async with feed_harness([kind]) as harness:
        listener = await harness.listen(HEADS)
        await harness.chain.mine()
        await harness.until_tip(listener)
        assert set(listener.results[0]) >= FIELDS
        assert not set(listener.results[0]) & {"transactions", "uncles", "withdrawals"}
        assert all(isinstance(listener.results[0][name], str) for name in FIELDS)
        assert listener.events[0].block == harness.chain.head


@pytest.mark.parametrize("kinds", [["ws"], ["http"], ["ws", "http"]])
@on_uvloop
async def test_client_that_received_a_head_gets_no_reply_from_before_it(kinds: list[str]) -> None:
    async with feed_harness(kinds, network=LIVE) as harness, connected(harness.worker) as client:
        await Tracker(harness.worker.app.networks.routes[LIVE].state).look()
        await client.result("eth_subscribe", "newHeads")
        for reorganises in (False, True):
            await client.result("eth_blockNumber")
            await client.result("eth_getBlockByNumber", "latest", False)
            await (harness.chain.replace_blocks(1, longer=0) if reorganises else harness.chain.mine())
            head = (await client.event())["result"]
            assert head["hash"] == harness.chain.canonical[-1]
            assert await client.result("eth_blockNumber") == head["number"]
            assert (await client.result("eth_getBlockByNumber", "latest", False))["hash"] == head["hash"]


@on_uvloop
async def test_block_right_after_the_confirmation_is_sent() -> None:
    for kind in ("ws", "http"):
        async with feed_harness([kind]) as harness:
            listener = await harness.listen(HEADS)
            await harness.chain.mine()
            await harness.until_tip(listener)
            assert listener.hashes == harness.chain.canonical[-1:]


@on_uvloop
async def test_no_head_is_lost_when_the_upstream_is_killed_in_the_middle_of_a_stream_of_blocks() -> None:
    async with feed_harness(["ws", "ws", "http"]) as harness:
        first, second, _ = harness.upstreams
        listener = await harness.listen(HEADS)
        start = len(harness.chain.canonical)
        async with asyncio.TaskGroup() as group:
            mining = group.create_task(mine_slowly(harness, 120))
            await until(lambda: len(listener.events) > 10)
            await first.kill()
            await until(lambda: second.subscribed > 0)
            await until(lambda: len(listener.events) > 40)
            await second.kill()  # Only polling is left.
            await mining
        await harness.until_tip(listener)
        assert listener.hashes == harness.chain.canonical[start:]
        await first.open()  # The feed returns to it.
        await until(lambda: first.subscriptions, within_s=40)
        await harness.chain.mine(3)
        await harness.until_tip(listener)
        assert listener.hashes == harness.chain.canonical[start:]


@on_uvloop
async def test_network_without_a_websocket_is_polled_and_every_head_between_two_polls_is_sent() -> None:
    async with feed_harness(["http", "http"]) as harness:
        listener = await harness.listen(HEADS)
        start = len(harness.chain.canonical)
        await mine_slowly(harness, 60)
        await harness.until_tip(listener)
        assert listener.hashes == harness.chain.canonical[start:]


@on_uvloop
async def test_gap_of_hundreds_of_blocks_is_filled() -> None:
    async with feed_harness(["http"]) as harness:
        listener = await harness.listen(HEADS)
        start = len(harness.chain.canonical)
        await harness.chain.mine(400)
        await harness.until_tip(listener)
        assert listener.hashes == harness.chain.canonical[start:]


@on_uvloop
async def test_feed_leaves_a_silent_stream_and_loses_nothing() -> None:
    async with feed_harness(["ws", "ws"]) as harness:
        first, second = harness.upstreams
        listener = await harness.listen(HEADS)
        start = len(harness.chain.canonical)
        await harness.chain.mine(3)
        await harness.until_tip(listener)
        first.mute = True
        await harness.chain.mine(3)
        await harness.until_tip(listener)
        assert second.subscribed == 1
        await harness.chain.mine(3)
        await harness.until_tip(listener)
        assert listener.hashes == harness.chain.canonical[start:]


@on_uvloop
async def test_feed_leaves_an_upstream_that_falls_behind() -> None:
    async with feed_harness(["ws", "ws", "http"]) as harness:
        first, second, _ = harness.upstreams
        tracker = Tracker(harness.worker.app.networks.routes[harness.network].state)
        harness.worker.app.tasks.start("heads", tracker.run)
        listener = await harness.listen(HEADS)
        start = len(harness.chain.canonical)
        first.frozen = harness.chain.canonical[:]
        await harness.chain.mine(2)
        await until(lambda: second.subscribed == 1)
        await harness.chain.mine(2)
        await harness.until_tip(listener)
        assert listener.hashes == harness.chain.canonical[start:]


@on_uvloop
async def test_new_source_that_is_behind_repeats_no_old_heads() -> None:
    async with feed_harness(["ws", "ws"]) as harness:
        first, second = harness.upstreams
        second.behind = 3
        listener = await harness.listen(HEADS)
        start = len(harness.chain.canonical)
        await harness.chain.mine(5)
        await harness.until_tip(listener)
        await first.kill()
        await until(lambda: second.subscribed == 1)
        await harness.chain.mine(5)  # It reports them three blocks late.
        await until(lambda: len(listener.events) >= 7)
        second.behind = 0
        await harness.chain.mine()
        await harness.until_tip(listener)
        assert listener.hashes == harness.chain.canonical[start:]


@pytest.mark.parametrize("kind", ["ws", "http"])
@pytest.mark.parametrize("at_once", [True, False])
@on_uvloop
async def test_three_block_reorganisation_sends_the_new_heads(kind: str, at_once: bool) -> None:
    async with feed_harness([kind]) as harness:
        listener = await harness.listen(HEADS)
        start = len(harness.chain.canonical)
        await harness.chain.mine(5)
        await harness.until_tip(listener)
        old = harness.chain.canonical[start:]
        await harness.chain.replace_blocks(3, at_once=at_once)
        await harness.until_tip(listener)
        assert listener.hashes == [*old, *harness.chain.canonical[start + 2 :]]
        assert listener.heads() == harness.chain.canonical[start:]


@on_uvloop
async def test_many_reorganisations_end_with_the_canonical_chain() -> None:
    """Reorganisations deeper than one poll covers, while sources change."""
    async with feed_harness(["ws", "ws", "http"]) as harness:
        listener = await harness.listen(HEADS)
        start = len(harness.chain.canonical)
        await harness.chain.mine(12)
        await harness.until_tip(listener)
        for depth, longer in ((1, 1), (3, 0), (10, 2), (2, 5), (12, 1)):
            if depth == 10:
                await harness.upstreams[0].kill()
            if depth == 2:
                harness.upstreams[1].cut()
            await harness.chain.replace_blocks(depth, longer=longer, at_once=depth % 2 == 0)
            await asyncio.sleep(0.01)
        await harness.chain.mine()
        await harness.until_tip(listener)
        assert listener.heads() == harness.chain.canonical[start:]


@on_uvloop
async def test_source_on_an_abandoned_fork_is_ignored_until_it_catches_up() -> None:
    async with feed_harness(["ws", "ws"]) as harness:
        first, second = harness.upstreams
        listener = await harness.listen(HEADS)
        start = len(harness.chain.canonical)
        await harness.chain.mine(4)
        second.frozen = harness.chain.canonical[:]
        await harness.chain.replace_blocks(2, longer=2)
        await harness.until_tip(listener)
        sent = len(listener.events)
        await first.kill()
        await until(lambda: second.subscribed == 1)
        second.frozen = None
        await harness.chain.mine()
        await harness.until_tip(listener)
        assert len(listener.events) == sent + 1
        assert listener.heads() == harness.chain.canonical[start:]


@on_uvloop
async def test_chain_that_was_reset_is_followed() -> None:
    async with feed_harness(["ws"], blocks=40) as harness:
        listener = await harness.listen(HEADS)
        await harness.chain.mine(2)
        await harness.until_tip(listener)
        harness.upstreams[0].cut()
        del harness.chain.canonical[1:]
        await harness.chain.mine(3)
        await harness.until_tip(listener, within_s=30)
        await harness.chain.mine(2)
        await harness.until_tip(listener)
        assert listener.hashes[-2:] == harness.chain.canonical[-2:]


@pytest.mark.parametrize("kinds", [["ws"], ["ws", "ws"]])
@on_uvloop
async def test_head_from_the_distant_past_removes_nothing(kinds: list[str]) -> None:
    """Several machines may share one address, and one of them may be far behind."""

    async with feed_harness(kinds, blocks=DEPTH + 50) as harness:
        listener = await harness.listen(HEADS)
        start = len(harness.chain.canonical)
        await harness.chain.mine(2)
        await harness.until_tip(listener)
        await harness.upstreams[0].notify_head(harness.chain.canonical[3])
        await harness.chain.mine(2)
        await harness.until_tip(listener)
        assert listener.hashes == harness.chain.canonical[start:]


@on_uvloop
async def test_no_upstream_is_called_without_listeners() -> None:
    async with feed_harness(["ws", "http"]) as harness:
        first, second = harness.upstreams
        assert first.subscribed == 0
        assert not first.calls + second.calls
        listener = await harness.listen(HEADS)
        assert first.subscribed == 1
        harness.feed.unsubscribe(HEADS, listener)
        await until(lambda: not first.subscriptions)
        calls = len(first.calls) + len(second.calls)
        await harness.chain.mine(3)
        await holds(lambda: len(first.calls) + len(second.calls) == calls, for_s=0.5)
        assert listener.events == []
        resumed = await harness.listen(HEADS)
        await harness.chain.mine()
        await harness.until_tip(resumed)
        assert resumed.hashes == harness.chain.canonical[-1:]
        assert listener.events == []


@pytest.mark.parametrize("member", ["hash", "parentHash", "number"])
@pytest.mark.parametrize(
    "value", ['0x1"],"method":"eth_sendRawTransaction', "", "0x", "-0x1", "0x" + "g" * 64, 5, None]
)
def test_block_with_malformed_members_is_rejected(member: str, value: object) -> None:
    block = {"number": "0x1", "hash": "0x" + "A" * 64, "parentHash": "0x" + "b" * 64}
    good = read_block(orjson.dumps({**block, "size": "0x5", "transactions": []}))
    assert good is not None
    assert (good.number, good.hash, good.parent) == (1, "0x" + "a" * 64, "0x" + "b" * 64)
    assert read_block(orjson.dumps({**block, member: value})) is None
    assert read_block(orjson.dumps(value)) is None


@on_uvloop
async def test_feed_leaves_a_source_that_sends_invalid_blocks() -> None:
    async with feed_harness(["ws", "http"]) as harness:
        listener = await harness.listen(HEADS)
        start = len(harness.chain.canonical)
        await harness.upstreams[0].notify(lambda *_: True, {"number": "0x1", "hash": "0x2", "parentHash": "]"})
        await until(lambda: harness.upstreams[1].calls)
        await harness.chain.mine(3)
        await harness.until_tip(listener)
        assert listener.hashes == harness.chain.canonical[start:]


@on_uvloop
async def test_subscription_without_any_upstream_fails_with_a_reason() -> None:
    limit, evm_feed.READY_S = evm_feed.READY_S, 0.5
    try:
        async with feed_harness(["ws"]) as harness:
            await harness.upstreams[0].kill()
            with pytest.raises(Unavailable, match="reports its head"):
                await harness.feed.subscribe(HEADS, RecordingListener())
    finally:
        evm_feed.READY_S = limit
