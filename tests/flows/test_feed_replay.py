"""Subscriptions with `fromBlock` replay the past events and then go live without a gap or a repetition."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from proxy.errors import Unavailable
from proxy.services.feed import replay
from proxy.services.feed.topics import FeedEvent, Topic
from proxy.services.rpc.calls import RpcError
from tests.feed_upstreams import CONTRACTS, HEADS, FeedHarness, RecordingListener, feed_harness, logs_topic
from tests.flows.test_feed_logs import expected_logs, until_logs
from tests.rpc_upstreams import Refused
from tests.service import until
from tests.web.worker import on_uvloop

ALL = logs_topic()
SOME = {"address": CONTRACTS[:2]}
# Blocks become final early here, so older logs are fetched in ranges.
DEV = "dev/mainnet"


async def mining(harness: FeedHarness, stop: asyncio.Event, every_s: float = 0.01) -> None:
    while not stop.is_set():
        await harness.chain.mine()
        await asyncio.sleep(every_s)


@pytest.mark.parametrize("kind", ["ws", "http"])
@pytest.mark.parametrize("back", [1, 40, 150])
@on_uvloop
async def test_heads_since_a_block_and_then_live_while_blocks_come(kind: str, back: int) -> None:
    async with feed_harness([kind], blocks=200) as harness:
        first, stop = len(harness.chain.canonical) - back, asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(mining(harness, stop))
            listener = await harness.listen(HEADS, from_block=first)
            live = len(listener.events)
            await until(lambda: len(listener.events) > live + 20)
            stop.set()
        await harness.until_tip(listener)
        assert listener.hashes == harness.chain.canonical[first:]


@pytest.mark.parametrize("network", [DEV, "arbitrum/mainnet"])
@pytest.mark.parametrize("members", [{}, SOME])
@on_uvloop
async def test_logs_since_a_block_and_then_live_while_blocks_come(network: str, members: dict[str, Any]) -> None:
    async with feed_harness(["ws", "http"], blocks=700, network=network) as harness:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(mining(harness, stop))
            listener = await harness.listen(logs_topic(**members), from_block=80)
            live = len(listener.events)
            await until(lambda: len(listener.events) > live + 20)
            stop.set()
        await until_logs(harness, listener, 80, **members)
        assert not any(log["removed"] for log in listener.results)


@on_uvloop
async def test_old_logs_are_fetched_in_filtered_ranges_and_not_block_by_block() -> None:
    async with feed_harness(["http"], blocks=700, network=DEV) as harness:
        listener = await harness.listen(logs_topic(**SOME), from_block=1)
        await until_logs(harness, listener, 1, **SOME)
        ranges = [call.params[0] for call in harness.upstreams[0].calls if call.method == "eth_getLogs"]
        ranges = [each for each in ranges if "fromBlock" in each]
        assert len(ranges) == 5
        assert all(each["address"] == SOME["address"] for each in ranges)
        assert harness.count("eth_getLogs") < 40
        assert listener.room_requests >= 2


@on_uvloop
async def test_from_block_in_the_future_starts_live() -> None:
    async with feed_harness(["ws"]) as harness:
        heads, logs = await harness.listen(HEADS, from_block=5000), await harness.listen(ALL, from_block=5000)
        start = len(harness.chain.canonical)
        await harness.chain.mine(3)
        await harness.until_tip(heads)
        assert heads.hashes == harness.chain.canonical[start:]
        await until_logs(harness, logs, start)


@pytest.mark.parametrize("topic", [HEADS, ALL])
@on_uvloop
async def test_replay_waits_for_a_from_block_slightly_ahead_of_the_feed(topic: Topic) -> None:
    """The client received those blocks from another worker, which was faster."""

    async with feed_harness(["ws"]) as harness:
        listener = RecordingListener()
        async with asyncio.TaskGroup() as group:
            joining = group.create_task(harness.feed.subscribe_from(topic, listener, 14))
            while not joining.done():
                await harness.chain.mine()
                await asyncio.sleep(0.02)
        await harness.chain.mine(2)
        await harness.until_tip(listener)
        if topic == HEADS:
            assert listener.hashes == harness.chain.canonical[14:]
        else:
            await until_logs(harness, listener, 14)


@on_uvloop
async def test_from_block_at_the_tip_sends_the_tip() -> None:
    async with feed_harness(["ws"]) as harness:
        tip = harness.chain.head
        heads, logs = await harness.listen(HEADS, from_block=tip), await harness.listen(ALL, from_block=tip)
        await harness.chain.mine(2)
        await harness.until_tip(heads)
        assert heads.hashes == harness.chain.canonical[tip:]
        await until_logs(harness, logs, tip)


@on_uvloop
async def test_range_beyond_the_limit_is_refused_and_the_error_names_the_oldest_possible_block() -> None:
    async with feed_harness(["http"], blocks=50) as harness:
        harness.evm._replay_blocks = 20
        await harness.listen(HEADS)
        for topic in (HEADS, ALL):
            with pytest.raises(RpcError, match=f"at most 20 can be replayed.*{hex(31)}"):
                await harness.listen(topic, from_block=30)
            with pytest.raises(RpcError, match="fromBlock"):
                harness.feed.check_from(topic, 0)
            harness.feed.check_from(topic, 31)
            harness.feed.check_from(topic, 10**9)
            listener = await harness.listen(topic, from_block=31)
            assert listener.events[0].block == 31
        with pytest.raises(RpcError, match="only newHeads and logs"):
            harness.feed.check_from(Topic("syncing"), 45)


class PausedListener(RecordingListener):
    """A listener without room after this block, until `go` is set."""

    def __init__(self, last: int = 0) -> None:
        super().__init__()
        self.last = last
        self.go = asyncio.Event()

    async def room(self) -> None:
        await super().room()
        if self.events and self.events[-1].block >= self.last:
            await self.go.wait()


@on_uvloop
async def test_replay_waits_while_the_feed_is_in_the_middle_of_a_reorganisation() -> None:
    """The old blocks are removed already, and the logs of the new ones are not available yet."""
    async with feed_harness(["ws"], blocks=100) as harness:
        upstream, other = harness.upstreams[0], await harness.listen(ALL)
        await harness.chain.mine(3)
        await until_logs(harness, other, 101)
        listener, old = PausedListener(last=103), set(harness.chain.canonical)

        def logs_of_old_blocks(params: list[Any]) -> Any:
            if params[0]["blockHash"] not in old:
                raise Refused(-32000, "unknown block")
            return upstream._eth_getLogs(params)

        async with asyncio.TaskGroup() as group:
            group.create_task(harness.feed.subscribe_from(ALL, listener, 100))
            await until(lambda: listener.events and listener.events[-1].block == 103)
            upstream.answers["eth_getLogs"] = logs_of_old_blocks
            await harness.chain.replace_blocks(2)
            await until(lambda: other.logs() == expected_logs(harness, 101)[:2])
            requests = listener.room_requests
            listener.go.set()
            await until(lambda: listener.room_requests > requests + 3)
            upstream.answers.clear()
        await until_logs(harness, listener, 100)
        await until_logs(harness, other, 101)


@pytest.mark.parametrize("network", [DEV, "arbitrum/mainnet"])
@on_uvloop
async def test_reorganisation_during_a_replay_is_reported(network: str) -> None:
    """It happens while the listener waits between two batches and has received blocks that no longer exist."""

    async with feed_harness(["ws", "http"], blocks=100, network=network) as harness:
        watching = await harness.listen(HEADS)
        heads, logs = PausedListener(), PausedListener()
        async with asyncio.TaskGroup() as group:
            group.create_task(harness.feed.subscribe_from(HEADS, heads, 97))
            group.create_task(harness.feed.subscribe_from(ALL, logs, 98))
            await until(lambda: heads.events and logs.events)
            await harness.chain.replace_blocks(3, longer=1)
            await harness.until_tip(watching)
            heads.go.set()
            logs.go.set()
        await harness.chain.mine(2)
        await harness.until_tip(heads)
        assert heads.heads() == harness.chain.canonical[97:]
        await until_logs(harness, logs, 98)
        assert len(heads.events) > len(heads.heads())


@on_uvloop
async def test_constant_reorganisations_during_replays_end_with_the_canonical_chain() -> None:
    async with feed_harness(["ws", "http"], blocks=150) as harness:
        stop = asyncio.Event()

        async def shake() -> None:
            turn = 0
            while not stop.is_set():
                turn += 1
                await (harness.chain.replace_blocks(turn % 4 + 1) if turn % 3 == 0 else harness.chain.mine())
                await asyncio.sleep(0.01)

        async with asyncio.TaskGroup() as group:
            group.create_task(shake())
            heads = [await harness.listen(HEADS, from_block=first) for first in (20, 80, 120)]
            logs = [await harness.listen(ALL, from_block=first) for first in (20, 80, 120)]
            await asyncio.sleep(0.3)
            stop.set()
        await harness.chain.mine()
        for first, listener in zip((20, 80, 120), heads, strict=True):
            await harness.until_tip(listener)
            assert listener.heads() == harness.chain.canonical[first:]
        for first, listener in zip((20, 80, 120), logs, strict=True):
            await until_logs(harness, listener, first)


@on_uvloop
async def test_replayed_logs_are_removed_after_the_listener_is_live() -> None:
    """Only for the listener that received them: a later one gets no removals."""
    async with feed_harness(["ws"], blocks=30, network=DEV) as harness:
        late = await harness.listen(ALL)
        listener = await harness.listen(ALL, from_block=20)
        await until_logs(harness, listener, 20)
        await harness.chain.replace_blocks(3, longer=1)
        await until_logs(harness, listener, 20)
        assert [log["removed"] for log in listener.results].count(True) == 6
        await until_logs(harness, late, 28)
        assert not any(log["removed"] for log in late.results)


@on_uvloop
async def test_replay_ends_when_the_listener_unsubscribes() -> None:
    class BlockedListener(RecordingListener):
        async def room(self) -> None:
            await asyncio.Event().wait()

    async with feed_harness(["http"], blocks=400) as harness:
        for topic in (HEADS, ALL):
            listener = BlockedListener()
            async with asyncio.TaskGroup() as group, asyncio.timeout(10):
                replaying = group.create_task(harness.feed.subscribe_from(topic, listener, 10))
                await until(lambda listener=listener: listener.events)
                harness.feed.unsubscribe(topic, listener)
                await replaying
            sent = len(listener.events)
            await harness.chain.mine(3)
            other = await harness.listen(HEADS)
            await harness.chain.mine()
            await harness.until_tip(other)
            assert len(listener.events) == sent


@on_uvloop
async def test_cancelled_replay_leaves_nothing_behind() -> None:
    class BlockedListener(RecordingListener):
        async def room(self) -> None:
            await asyncio.Event().wait()

    async with feed_harness(["http"], blocks=400) as harness:
        listener = BlockedListener()
        async with asyncio.TaskGroup() as group:
            replaying = group.create_task(harness.feed.subscribe_from(ALL, listener, 10))
            await until(lambda: listener.events)
            replaying.cancel()
        assert not harness.evm._waiting
        assert harness.evm.logs.filters == 0


@on_uvloop
async def test_replay_without_upstream_replies_fails_with_a_reason() -> None:
    pause, replay.PAUSE_S = replay.PAUSE_S, 0.01
    try:
        async with feed_harness(["http"], blocks=100, network=DEV) as harness:
            await harness.listen(HEADS)

            def fail(_: Any) -> Any:
                raise Refused(-32603, "internal error")

            harness.upstreams[0].answers["eth_getLogs"] = fail
            with pytest.raises(Unavailable, match="subscribe again from the last block"):
                await harness.listen(ALL, from_block=10)
    finally:
        replay.PAUSE_S = pause


@on_uvloop
async def test_replays_lose_nothing_when_an_upstream_dies() -> None:
    async with feed_harness(["ws", "http"], blocks=300) as harness:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(mining(harness, stop))
            heads, logs = RecordingListener(), RecordingListener()
            both = [
                group.create_task(harness.feed.subscribe_from(HEADS, heads, 5)),
                group.create_task(harness.feed.subscribe_from(ALL, logs, 5)),
            ]
            await until(lambda: heads.events and logs.events)
            await harness.upstreams[0].kill()
            await asyncio.wait(both)
            stop.set()
        await harness.chain.mine()
        await harness.until_tip(heads)
        assert heads.hashes == harness.chain.canonical[5:]
        await until_logs(harness, logs, 5)


@on_uvloop
async def test_batches_are_small_and_wait_for_room() -> None:
    sizes: list[int] = []

    class CountingListener(RecordingListener):
        def on_events(self, events: Sequence[FeedEvent]) -> None:
            super().on_events(events)
            sizes.append(len(events))

    async with feed_harness(["http"], blocks=600, network=DEV) as harness:
        listeners = {topic: CountingListener() for topic in (HEADS, ALL)}
        for topic, listener in listeners.items():
            await harness.feed.subscribe_from(topic, listener, 1)
            assert max(sizes) <= replay.BATCH
            assert listener.room_requests >= len(listener.events) // replay.BATCH
        assert listeners[ALL].logs() == expected_logs(harness, 1)
