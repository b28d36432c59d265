"""Heads: every one once and in order, whatever becomes of the upstreams; checked by hash against the chain's own record."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from proxy.core.head_chain import DEPTH
from proxy.errors import Unavailable
from proxy.services.feed import evm_feed
from proxy.services.feed.blocks import read_block
from proxy.services.rpc.tracker import Tracker
from tests.feed_upstreams import HEADS, Ear, FeedScene, feed_scene
from tests.service import until
from tests.sockets import connected
from tests.web.worker import LIVE, on_uvloop

FIELDS = {"number", "hash", "parentHash", "timestamp", "gasUsed", "gasLimit", "baseFeePerGas"}


async def mine_slowly(found: FeedScene, count: int, every_s: float = 0.02) -> None:
    for _ in range(count):
        await found.chain.mine()
        await asyncio.sleep(every_s)


@on_uvloop
async def test_heads_come_from_one_subscription_for_all_listeners() -> None:
    async with feed_scene(["ws", "http"]) as found:
        ears = [await found.listen(HEADS) for _ in range(20)]
        start = len(found.chain.line)
        await found.chain.mine(5)
        for ear in ears:
            await found.until_tip(ear)
            assert ear.hashes == found.chain.line[start:]
        assert found.upstreams[0].subscribed == 1
        assert found.upstreams[1].calls == []
        # A message is the same object for all of them: it is framed once.
        assert all(one is other for one, other in zip(ears[0].events, ears[-1].events, strict=True))


@pytest.mark.parametrize("kind", ["ws", "http"])
def test_head_has_the_contracts_fields_and_no_transactions(kind: str) -> None:
    @on_uvloop
    async def run() -> None:
        async with feed_scene([kind]) as found:
            ear = await found.listen(HEADS)
            await found.chain.mine()
            await found.until_tip(ear)
            assert set(ear.results[0]) >= FIELDS
            assert not set(ear.results[0]) & {"transactions", "uncles", "withdrawals"}
            assert all(isinstance(ear.results[0][name], str) for name in FIELDS)
            assert ear.events[0].block == found.chain.head

    run()


@pytest.mark.parametrize("kinds", [["ws"], ["http"], ["ws", "http"]])
def test_whoever_was_told_of_a_head_is_not_told_what_was_true_before(kinds: list[str]) -> None:
    @on_uvloop
    async def run() -> None:
        async with feed_scene(kinds, network=LIVE) as found, connected(found.worker) as client:
            await Tracker(found.worker.app.networks.routes[LIVE]).look()
            await client.result("eth_subscribe", "newHeads")
            for reorganises in (False, True):
                await client.result("eth_blockNumber")
                await client.result("eth_getBlockByNumber", "latest", False)
                await (found.chain.reorganise(1, longer=0) if reorganises else found.chain.mine())
                told = (await client.event())["result"]
                assert told["hash"] == found.chain.line[-1]
                assert await client.result("eth_blockNumber") == told["number"]
                assert (await client.result("eth_getBlockByNumber", "latest", False))["hash"] == told["hash"]

    run()


@on_uvloop
async def test_block_right_after_the_confirmation_is_told() -> None:
    for kind in ("ws", "http"):
        async with feed_scene([kind]) as found:
            ear = await found.listen(HEADS)
            await found.chain.mine()
            await found.until_tip(ear)
            assert ear.hashes == found.chain.line[-1:]


@on_uvloop
async def test_no_head_is_lost_when_the_upstream_is_killed_in_the_middle_of_a_stream_of_blocks() -> None:
    async with feed_scene(["ws", "ws", "http"]) as found:
        first, second, _ = found.upstreams
        ear = await found.listen(HEADS)
        start = len(found.chain.line)
        async with asyncio.TaskGroup() as group:
            mining = group.create_task(mine_slowly(found, 120))
            await until(lambda: len(ear.events) > 10)
            await first.kill()
            await until(lambda: second.subscribed > 0)
            await until(lambda: len(ear.events) > 40)
            await second.kill()  # Now only polling is left.
            await mining
        await found.until_tip(ear)
        assert ear.hashes == found.chain.line[start:]
        await first.open()  # And it is turned to again.
        await until(lambda: first.subscriptions, within_s=40)
        await found.chain.mine(3)
        await found.until_tip(ear)
        assert ear.hashes == found.chain.line[start:]


@on_uvloop
async def test_network_without_a_socket_is_polled_and_every_head_between_two_looks_is_told() -> None:
    async with feed_scene(["http", "http"]) as found:
        ear = await found.listen(HEADS)
        start = len(found.chain.line)
        await mine_slowly(found, 60)
        await found.until_tip(ear)
        assert ear.hashes == found.chain.line[start:]


@on_uvloop
async def test_gap_of_hundreds_of_blocks_is_filled() -> None:
    async with feed_scene(["http"]) as found:
        ear = await found.listen(HEADS)
        start = len(found.chain.line)
        await found.chain.mine(400)
        await found.until_tip(ear)
        assert ear.hashes == found.chain.line[start:]


@on_uvloop
async def test_stream_that_falls_silent_is_left_and_nothing_is_lost() -> None:
    async with feed_scene(["ws", "ws"]) as found:
        first, second = found.upstreams
        ear = await found.listen(HEADS)
        start = len(found.chain.line)
        await found.chain.mine(3)
        await found.until_tip(ear)
        first.mute = True
        await found.chain.mine(3)
        await found.until_tip(ear)
        assert second.subscribed == 1
        await found.chain.mine(3)
        await found.until_tip(ear)
        assert ear.hashes == found.chain.line[start:]


@on_uvloop
async def test_upstream_that_falls_behind_the_others_is_left() -> None:
    async with feed_scene(["ws", "ws", "http"]) as found:
        first, second, _ = found.upstreams
        tracker = Tracker(found.worker.app.networks.routes[found.network])
        found.worker.app.tasks.start("heads", tracker.run)
        ear = await found.listen(HEADS)
        start = len(found.chain.line)
        first.frozen = found.chain.line[:]
        await found.chain.mine(2)
        await until(lambda: second.subscribed == 1)
        await found.chain.mine(2)
        await found.until_tip(ear)
        assert ear.hashes == found.chain.line[start:]


@on_uvloop
async def test_new_source_that_is_behind_tells_nothing_old() -> None:
    async with feed_scene(["ws", "ws"]) as found:
        first, second = found.upstreams
        second.behind = 3
        ear = await found.listen(HEADS)
        start = len(found.chain.line)
        await found.chain.mine(5)
        await found.until_tip(ear)
        await first.kill()
        await until(lambda: second.subscribed == 1)
        await found.chain.mine(5)  # It hears of them three blocks later.
        await until(lambda: len(ear.events) >= 7)
        second.behind = 0
        await found.chain.mine()
        await found.until_tip(ear)
        assert ear.hashes == found.chain.line[start:]


@pytest.mark.parametrize("kind", ["ws", "http"])
@pytest.mark.parametrize("at_once", [True, False])
def test_three_block_reorganisation_tells_the_new_heads(kind: str, at_once: bool) -> None:
    @on_uvloop
    async def run() -> None:
        async with feed_scene([kind]) as found:
            ear = await found.listen(HEADS)
            start = len(found.chain.line)
            await found.chain.mine(5)
            await found.until_tip(ear)
            old = found.chain.line[start:]
            await found.chain.reorganise(3, at_once=at_once)
            await found.until_tip(ear)
            assert ear.hashes == [*old, *found.chain.line[start + 2 :]]
            assert ear.heads() == found.chain.line[start:]

    run()


@on_uvloop
async def test_reorganisations_without_end_leave_the_canonical_chain() -> None:
    """Deeper than what happens between two looks, and while sources change."""
    async with feed_scene(["ws", "ws", "http"]) as found:
        ear = await found.listen(HEADS)
        start = len(found.chain.line)
        await found.chain.mine(12)
        await found.until_tip(ear)
        for depth, longer in ((1, 1), (3, 0), (10, 2), (2, 5), (12, 1)):
            if depth == 10:
                await found.upstreams[0].kill()
            if depth == 2:
                found.upstreams[1].cut()
            await found.chain.reorganise(depth, longer=longer, at_once=depth % 2 == 0)
            await asyncio.sleep(0.01)
        await found.chain.mine()
        await found.until_tip(ear)
        assert ear.heads() == found.chain.line[start:]


@on_uvloop
async def test_source_on_a_fork_that_the_others_left_is_not_believed_until_it_is_as_far() -> None:
    async with feed_scene(["ws", "ws"]) as found:
        first, second = found.upstreams
        ear = await found.listen(HEADS)
        start = len(found.chain.line)
        await found.chain.mine(4)
        second.frozen = found.chain.line[:]
        await found.chain.reorganise(2, longer=2)
        await found.until_tip(ear)
        told = len(ear.events)
        await first.kill()
        await until(lambda: second.subscribed == 1)
        second.frozen = None
        await found.chain.mine()
        await found.until_tip(ear)
        assert len(ear.events) == told + 1
        assert ear.heads() == found.chain.line[start:]


@on_uvloop
async def test_chain_that_was_started_anew_is_followed() -> None:
    async with feed_scene(["ws"], blocks=40) as found:
        ear = await found.listen(HEADS)
        await found.chain.mine(2)
        await found.until_tip(ear)
        found.upstreams[0].cut()
        del found.chain.line[1:]
        await found.chain.mine(3)
        await found.until_tip(ear, within_s=30)
        await found.chain.mine(2)
        await found.until_tip(ear)
        assert ear.hashes[-2:] == found.chain.line[-2:]


@pytest.mark.parametrize("kinds", [["ws"], ["ws", "ws"]])
def test_head_out_of_the_distant_past_takes_nothing_back(kinds: list[str]) -> None:
    """Behind one address there may be several machines, and one of them far behind."""

    @on_uvloop
    async def run() -> None:
        async with feed_scene(kinds, blocks=DEPTH + 50) as found:
            ear = await found.listen(HEADS)
            start = len(found.chain.line)
            await found.chain.mine(2)
            await found.until_tip(ear)
            await found.upstreams[0].tell_head(found.chain.line[3])
            await found.chain.mine(2)
            await found.until_tip(ear)
            assert ear.hashes == found.chain.line[start:]

    run()


@on_uvloop
async def test_nothing_is_asked_while_nobody_listens() -> None:
    async with feed_scene(["ws", "http"]) as found:
        first, second = found.upstreams
        assert first.subscribed == 0
        assert not first.calls + second.calls
        ear = await found.listen(HEADS)
        assert first.subscribed == 1
        found.feed.unsubscribe(HEADS, ear)
        await until(lambda: not first.subscriptions)
        asked = len(first.calls) + len(second.calls)
        await found.chain.mine(3)
        await asyncio.sleep(0.5)
        assert len(first.calls) + len(second.calls) == asked
        assert ear.events == []
        again = await found.listen(HEADS)
        await found.chain.mine()
        await found.until_tip(again)
        assert again.hashes == found.chain.line[-1:]
        assert ear.events == []


@pytest.mark.parametrize("member", ["hash", "parentHash", "number"])
@pytest.mark.parametrize(
    "value", ['0x1"],"method":"eth_sendRawTransaction', "", "0x", "-0x1", "0x" + "g" * 64, 5, None]
)
def test_block_whose_names_are_none_is_no_block(member: str, value: object) -> None:
    block = {"number": "0x1", "hash": "0x" + "A" * 64, "parentHash": "0x" + "b" * 64}
    good = read_block(orjson.dumps({**block, "size": "0x5", "transactions": []}))
    assert good is not None
    assert (good.number, good.hash, good.parent) == (1, "0x" + "a" * 64, "0x" + "b" * 64)
    assert read_block(orjson.dumps({**block, member: value})) is None
    assert read_block(orjson.dumps(value)) is None


@on_uvloop
async def test_source_that_tells_nonsense_is_left() -> None:
    async with feed_scene(["ws", "http"]) as found:
        ear = await found.listen(HEADS)
        start = len(found.chain.line)
        await found.upstreams[0].tell(lambda *_: True, {"number": "0x1", "hash": "0x2", "parentHash": "]"})
        await until(lambda: found.upstreams[1].calls)
        await found.chain.mine(3)
        await found.until_tip(ear)
        assert ear.hashes == found.chain.line[start:]


@on_uvloop
async def test_subscription_without_any_upstream_is_refused_with_words() -> None:
    limit, evm_feed.READY_S = evm_feed.READY_S, 0.5
    try:
        async with feed_scene(["ws"]) as found:
            await found.upstreams[0].kill()
            with pytest.raises(Unavailable, match="tells its head"):
                await found.feed.subscribe(HEADS, Ear())
    finally:
        evm_feed.READY_S = limit
