"""Subscriptions with a cursor: what happened since then, then live, without a seam; against the chain's own record."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from proxy.errors import Unavailable
from proxy.services.feed import replay
from proxy.services.feed.topics import FeedEvent, Topic
from proxy.services.rpc.calls import RpcError
from tests.feed_upstreams import CONTRACTS, HEADS, Ear, FeedScene, feed_scene, logs_topic
from tests.flows.test_feed_logs import record, until_logs
from tests.rpc_upstreams import Refused
from tests.service import until
from tests.web.worker import on_uvloop

ALL = logs_topic()
SOME = {"address": CONTRACTS[:2]}
# Blocks are final soon: older logs are taken by ranges.
DEV = "dev/mainnet"


async def mining(found: FeedScene, stop: asyncio.Event, every_s: float = 0.01) -> None:
    while not stop.is_set():
        await found.chain.mine()
        await asyncio.sleep(every_s)


@pytest.mark.parametrize("kind", ["ws", "http"])
@pytest.mark.parametrize("back", [1, 40, 150])
def test_heads_since_a_block_and_then_live_while_blocks_come(kind: str, back: int) -> None:
    @on_uvloop
    async def run() -> None:
        async with feed_scene([kind], blocks=200) as found:
            first, stop = len(found.chain.line) - back, asyncio.Event()
            async with asyncio.TaskGroup() as group:
                group.create_task(mining(found, stop))
                ear = await found.listen(HEADS, from_block=first)
                live = len(ear.events)
                await until(lambda: len(ear.events) > live + 20)
                stop.set()
            await found.until_tip(ear)
            assert ear.hashes == found.chain.line[first:]

    run()


@pytest.mark.parametrize("network", [DEV, "arbitrum/mainnet"])
@pytest.mark.parametrize("members", [{}, SOME])
def test_logs_since_a_block_and_then_live_while_blocks_come(network: str, members: dict[str, Any]) -> None:
    @on_uvloop
    async def run() -> None:
        async with feed_scene(["ws", "http"], blocks=700, network=network) as found:
            stop = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                group.create_task(mining(found, stop))
                ear = await found.listen(logs_topic(**members), from_block=80)
                live = len(ear.events)
                await until(lambda: len(ear.events) > live + 20)
                stop.set()
            await until_logs(found, ear, 80, **members)
            assert not any(log["removed"] for log in ear.results)

    run()


@on_uvloop
async def test_old_logs_are_taken_by_ranges_with_the_filter_and_not_block_by_block() -> None:
    async with feed_scene(["http"], blocks=700, network=DEV) as found:
        ear = await found.listen(logs_topic(**SOME), from_block=1)
        await until_logs(found, ear, 1, **SOME)
        ranges = [call.params[0] for call in found.upstreams[0].calls if call.method == "eth_getLogs"]
        ranges = [each for each in ranges if "fromBlock" in each]
        assert len(ranges) == 2
        assert all(each["address"] == SOME["address"] for each in ranges)
        assert found.count("eth_getLogs") < 40
        assert ear.asked_for_room >= 2


@on_uvloop
async def test_cursor_in_the_future_is_just_live() -> None:
    async with feed_scene(["ws"]) as found:
        heads, logs = await found.listen(HEADS, from_block=5000), await found.listen(ALL, from_block=5000)
        start = len(found.chain.line)
        await found.chain.mine(3)
        await found.until_tip(heads)
        assert heads.hashes == found.chain.line[start:]
        await until_logs(found, logs, start)


@pytest.mark.parametrize("topic", [HEADS, ALL])
def test_cursor_a_little_ahead_of_the_feed_is_waited_for(topic: Topic) -> None:
    """The listener heard of those blocks from another worker, which was quicker."""

    @on_uvloop
    async def run() -> None:
        async with feed_scene(["ws"]) as found:
            ear = Ear()
            async with asyncio.TaskGroup() as group:
                joining = group.create_task(found.feed.subscribe_from(topic, ear, 14))
                while not joining.done():
                    await found.chain.mine()
                    await asyncio.sleep(0.02)
            await found.chain.mine(2)
            await found.until_tip(ear)
            if topic == HEADS:
                assert ear.hashes == found.chain.line[14:]
            else:
                await until_logs(found, ear, 14)

    run()


@on_uvloop
async def test_cursor_at_the_tip_tells_the_tip() -> None:
    async with feed_scene(["ws"]) as found:
        tip = found.chain.head
        heads, logs = await found.listen(HEADS, from_block=tip), await found.listen(ALL, from_block=tip)
        await found.chain.mine(2)
        await found.until_tip(heads)
        assert heads.hashes == found.chain.line[tip:]
        await until_logs(found, logs, tip)


@on_uvloop
async def test_range_beyond_the_limit_is_refused_and_the_error_names_one_that_works() -> None:
    async with feed_scene(["http"], blocks=50) as found:
        found.evm._replay_blocks = 20
        await found.listen(HEADS)
        for topic in (HEADS, ALL):
            with pytest.raises(RpcError, match=f"at most 20 are replayed.*{hex(31)}"):
                await found.listen(topic, from_block=30)
            with pytest.raises(RpcError, match="fromBlock"):
                found.feed.check_from(topic, 0)
            found.feed.check_from(topic, 31)
            found.feed.check_from(topic, 10**9)
            ear = await found.listen(topic, from_block=31)
            assert ear.events[0].block == 31
        with pytest.raises(RpcError, match="only newHeads and logs"):
            found.feed.check_from(Topic("syncing"), 45)


class Held(Ear):
    """Has no room until it is told to go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()

    async def room(self) -> None:
        await super().room()
        await self.go.wait()


@on_uvloop
async def test_replay_waits_while_the_others_are_in_the_middle_of_taking_back() -> None:
    """Old blocks are taken back already, and the logs of the new ones cannot be had yet."""
    async with feed_scene(["ws"], blocks=100) as found:
        upstream, other = found.upstreams[0], await found.listen(ALL)
        await found.chain.mine(3)
        await until_logs(found, other, 101)
        ear, old = Held(), set(found.chain.line)

        def logs_of_old_blocks(params: list[Any]) -> Any:
            if params[0]["blockHash"] not in old:
                raise Refused(-32000, "unknown block")
            return upstream._eth_getLogs(params)

        async with asyncio.TaskGroup() as group:
            group.create_task(found.feed.subscribe_from(ALL, ear, 100))
            await until(lambda: ear.asked_for_room)
            upstream.answers["eth_getLogs"] = logs_of_old_blocks
            await found.chain.reorganise(2)
            await until(lambda: other.logs() == record(found, 101)[:2])
            asked = ear.asked_for_room
            ear.go.set()
            await until(lambda: ear.asked_for_room > asked + 3)
            upstream.answers.clear()
        await until_logs(found, ear, 100)
        await until_logs(found, other, 101)


@pytest.mark.parametrize("network", [DEV, "arbitrum/mainnet"])
def test_reorganisation_during_a_replay_is_told_as_such(network: str) -> None:
    """It happens while the listener is held up between two batches, having heard of blocks that are no more."""

    @on_uvloop
    async def run() -> None:
        async with feed_scene(["ws", "http"], blocks=100, network=network) as found:
            watching = await found.listen(HEADS)
            heads, logs = Held(), Held()
            async with asyncio.TaskGroup() as group:
                group.create_task(found.feed.subscribe_from(HEADS, heads, 97))
                group.create_task(found.feed.subscribe_from(ALL, logs, 98))
                await until(lambda: heads.events and logs.events)
                await found.chain.reorganise(3, longer=1)
                await found.until_tip(watching)
                heads.go.set()
                logs.go.set()
            await found.chain.mine(2)
            await found.until_tip(heads)
            assert heads.heads() == found.chain.line[97:]
            await until_logs(found, logs, 98)
            assert len(heads.events) > len(heads.heads())

    run()


@on_uvloop
async def test_reorganisations_all_the_time_during_replays_leave_the_canonical_chain() -> None:
    async with feed_scene(["ws", "http"], blocks=150) as found:
        stop = asyncio.Event()

        async def shake() -> None:
            turn = 0
            while not stop.is_set():
                turn += 1
                await (found.chain.reorganise(turn % 4 + 1) if turn % 3 == 0 else found.chain.mine())
                await asyncio.sleep(0.01)

        async with asyncio.TaskGroup() as group:
            group.create_task(shake())
            heads = [await found.listen(HEADS, from_block=first) for first in (20, 80, 120)]
            logs = [await found.listen(ALL, from_block=first) for first in (20, 80, 120)]
            await asyncio.sleep(0.3)
            stop.set()
        await found.chain.mine()
        for first, ear in zip((20, 80, 120), heads, strict=True):
            await found.until_tip(ear)
            assert ear.heads() == found.chain.line[first:]
        for first, ear in zip((20, 80, 120), logs, strict=True):
            await until_logs(found, ear, first)


@on_uvloop
async def test_replayed_logs_are_taken_back_after_the_listener_is_live() -> None:
    """By its own account: another that came later and heard of none of them is told of nothing."""
    async with feed_scene(["ws"], blocks=30, network=DEV) as found:
        late = await found.listen(ALL)
        ear = await found.listen(ALL, from_block=20)
        await until_logs(found, ear, 20)
        await found.chain.reorganise(3, longer=1)
        await until_logs(found, ear, 20)
        assert [log["removed"] for log in ear.results].count(True) == 6
        await until_logs(found, late, 28)
        assert not any(log["removed"] for log in late.results)


@on_uvloop
async def test_replay_ends_when_the_listener_leaves_in_the_middle() -> None:
    class Stuck(Ear):
        async def room(self) -> None:
            await asyncio.Event().wait()

    async with feed_scene(["http"], blocks=400) as found:
        for topic in (HEADS, ALL):
            ear = Stuck()
            async with asyncio.TaskGroup() as group, asyncio.timeout(10):
                replaying = group.create_task(found.feed.subscribe_from(topic, ear, 10))
                await until(lambda ear=ear: ear.events)
                found.feed.unsubscribe(topic, ear)
                await replaying
            told = len(ear.events)
            await found.chain.mine(3)
            other = await found.listen(HEADS)
            await found.chain.mine()
            await found.until_tip(other)
            assert len(ear.events) == told


@on_uvloop
async def test_cancelled_replay_leaves_nothing_behind() -> None:
    class Stuck(Ear):
        async def room(self) -> None:
            await asyncio.Event().wait()

    async with feed_scene(["http"], blocks=400) as found:
        ear = Stuck()
        async with asyncio.TaskGroup() as group:
            replaying = group.create_task(found.feed.subscribe_from(ALL, ear, 10))
            await until(lambda: ear.events)
            replaying.cancel()
        assert not found.evm._waiting
        assert found.evm.logs.filters == 0


@on_uvloop
async def test_replay_that_no_upstream_answers_is_given_up_with_words() -> None:
    pause, replay.PAUSE_S = replay.PAUSE_S, 0.01
    try:
        async with feed_scene(["http"], blocks=100, network=DEV) as found:
            await found.listen(HEADS)

            def fail(_: Any) -> Any:
                raise Refused(-32603, "internal error")

            found.upstreams[0].answers["eth_getLogs"] = fail
            with pytest.raises(Unavailable, match="subscribe again from the last block"):
                await found.listen(ALL, from_block=10)
    finally:
        replay.PAUSE_S = pause


@on_uvloop
async def test_upstream_that_dies_during_replays_loses_nothing() -> None:
    async with feed_scene(["ws", "http"], blocks=300) as found:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(mining(found, stop))
            heads, logs = Ear(), Ear()
            both = [
                group.create_task(found.feed.subscribe_from(HEADS, heads, 5)),
                group.create_task(found.feed.subscribe_from(ALL, logs, 5)),
            ]
            await until(lambda: heads.events and logs.events)
            await found.upstreams[0].kill()
            await asyncio.wait(both)
            stop.set()
        await found.chain.mine()
        await found.until_tip(heads)
        assert heads.hashes == found.chain.line[5:]
        await until_logs(found, logs, 5)


@on_uvloop
async def test_batches_are_small_and_wait_for_room() -> None:
    sizes: list[int] = []

    class Counting(Ear):
        def on_events(self, events: Sequence[FeedEvent]) -> None:
            super().on_events(events)
            sizes.append(len(events))

    async with feed_scene(["http"], blocks=600, network=DEV) as found:
        for topic in (HEADS, ALL):
            await found.feed.subscribe_from(topic, ear := Counting(), 1)
            assert max(sizes) <= replay.BATCH
            assert ear.asked_for_room >= len(ear.events) // replay.BATCH
        assert ear.logs() == record(found, 1)
