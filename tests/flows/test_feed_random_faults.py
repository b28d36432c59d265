"""Random combinations: upstreams die, stall and fail, the chain is reorganised, listeners subscribe live and with replays.

When everything has recovered, each listener must hold exactly the chain's events since its first block.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from proxy.services.feed.replay import NEAR
from tests.feed_upstreams import HEADS, QUICK, FeedHarness, FeedUpstream, RecordingListener, feed_harness, logs_topic
from tests.flows.test_feed_logs import FILTERS, expected_logs
from tests.rpc_upstreams import Refused
from tests.service import until
from tests.web.worker import on_uvloop

STEPS = 120
MOST_LISTENERS = 12


def fail(_: Any) -> Any:
    raise Refused(-32603, "internal error")


@dataclass
class RandomFaults:
    harness: FeedHarness
    rng: random.Random
    group: asyncio.TaskGroup
    # Each listener with its filter, None for heads, and its first block.
    listeners: list[tuple[RecordingListener, dict[str, Any] | None, int]] = field(default_factory=list)
    dead: set[FeedUpstream] = field(default_factory=set)
    # Live listeners hold nothing from before they joined, so the chain is not reorganised below the newest of them.
    lowest: int = 20

    async def step(self) -> None:
        actions = (self.mine, self.reorganise, self.kill_or_revive, self.cut, self.mute, self.fail_logs, self.listen)
        (action,) = self.rng.choices(actions, (55, 13, 8, 4, 3, 3, 14))
        await action()
        await asyncio.sleep(self.rng.choice((0, 0, 0.005, 0.02)))

    async def mine(self) -> None:
        await self.harness.chain.mine(self.rng.choice((1, 1, 1, 1, 2, 40)), logs=self.rng.randrange(3))

    async def reorganise(self) -> None:
        depth = min(self.rng.choice((1, 1, 2, 3, 6)), self.harness.chain.head - self.lowest)
        if depth > 0:
            longer, logs = self.rng.randrange(3), self.rng.randrange(3)
            await self.harness.chain.replace_blocks(depth, longer=longer, logs=logs, at_once=self.rng.random() < 0.5)

    async def kill_or_revive(self) -> None:
        upstream = self.rng.choice(self.harness.upstreams)
        if upstream in self.dead:
            await upstream.open()
            self.dead.discard(upstream)
        elif len(self.dead) + 1 < len(self.harness.upstreams):
            await upstream.kill()
            self.dead.add(upstream)

    async def cut(self) -> None:
        self.rng.choice(self.harness.upstreams).cut()

    async def mute(self) -> None:
        upstream = self.rng.choice(self.harness.upstreams)
        upstream.mute = not upstream.mute

    async def fail_logs(self) -> None:
        answers = self.rng.choice(self.harness.upstreams).answers
        if answers.pop("eth_getLogs", None) is None:
            answers["eth_getLogs"] = fail

    async def listen(self) -> None:
        if len(self.listeners) >= MOST_LISTENERS or self.dead:
            return
        listener, members = RecordingListener(), self.rng.choice((None, *FILTERS))
        topic = HEADS if members is None else logs_topic(**members)
        if self.rng.random() < 0.5:
            # Not so far ahead of the feed that it would mean "from now on".
            tip = self.harness.evm.walk.chain.tip
            first = self.rng.randrange(5, max(6, min(self.harness.chain.head - 5, tip.number + NEAR if tip else 5)))
            self.group.create_task(self.harness.feed.subscribe_from(topic, listener, first))
        else:
            await self.harness.feed.subscribe(topic, listener)
            tip = self.harness.evm.walk.chain.tip
            if tip is None or tip.hash != self.harness.chain.canonical[-1]:
                self.harness.feed.unsubscribe(topic, listener)  # Its first block is ambiguous.
                return
            first = len(self.harness.chain.canonical)
        self.lowest = max(self.lowest, first)
        self.listeners.append((listener, members, first))

    async def heal(self) -> None:
        for upstream in self.harness.upstreams:
            upstream.mute = False
            upstream.answers.clear()
            if upstream in self.dead:
                await upstream.open()

    def is_consistent(self) -> bool:
        return all(
            listener.heads() == self.harness.chain.canonical[first:]
            if members is None
            else listener.logs() == expected_logs(self.harness, first, **members)
            for listener, members, first in self.listeners
        )


@pytest.mark.parametrize("seed", range(4))
@on_uvloop
async def test_listeners_hold_the_canonical_chain_after_random_faults(seed: int) -> None:
    rng = random.Random(seed)
    kinds = (["ws", "ws", "http"], ["ws", "http"], ["http", "http"], ["ws", "ws"])[seed]
    async with feed_harness(kinds, blocks=30, network=("dev/mainnet", QUICK)[seed % 2]) as harness:
        async with asyncio.TaskGroup() as group:
            faults = RandomFaults(harness, rng, group)
            for _ in range(STEPS):
                await faults.step()
            await faults.heal()
            # Replays still running may need one more block to find the tip.
            await harness.chain.mine()
        await harness.chain.mine()
        await until(faults.is_consistent, within_s=60, every_s=0.1)
        assert faults.listeners
