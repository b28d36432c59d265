"""Everything at once, by chance: upstreams die, stall and fail, the chain is reorganised, listeners come live and with cursors.

When it is quiet again, each of them must hold exactly what the chain holds since its first block.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from proxy.services.feed.replay import NEAR
from tests.feed_upstreams import HEADS, QUICK, Ear, FeedScene, FeedUpstream, feed_scene, logs_topic
from tests.flows.test_feed_logs import FILTERS, record
from tests.rpc_upstreams import Refused
from tests.service import until
from tests.web.worker import on_uvloop

STEPS = 120
MOST_LISTENERS = 12


def fail(_: Any) -> Any:
    raise Refused(-32603, "internal error")


@dataclass
class Shaker:
    found: FeedScene
    chance: random.Random
    group: asyncio.TaskGroup
    # Each listener with its filter, None for heads, and its first block.
    ears: list[tuple[Ear, dict[str, Any] | None, int]] = field(default_factory=list)
    dead: set[FeedUpstream] = field(default_factory=set)
    # Listeners that came live hold nothing from before: the chain is not reorganised below the youngest of them.
    lowest: int = 20

    async def step(self) -> None:
        doings = (self.mine, self.reorganise, self.kill_or_revive, self.cut, self.mute, self.fail_logs, self.listen)
        (doing,) = self.chance.choices(doings, (55, 13, 8, 4, 3, 3, 14))
        await doing()
        await asyncio.sleep(self.chance.choice((0, 0, 0.005, 0.02)))

    async def mine(self) -> None:
        await self.found.chain.mine(self.chance.choice((1, 1, 1, 1, 2, 40)), logs=self.chance.randrange(3))

    async def reorganise(self) -> None:
        depth = min(self.chance.choice((1, 1, 2, 3, 6)), self.found.chain.head - self.lowest)
        if depth > 0:
            longer, logs = self.chance.randrange(3), self.chance.randrange(3)
            await self.found.chain.reorganise(depth, longer=longer, logs=logs, at_once=self.chance.random() < 0.5)

    async def kill_or_revive(self) -> None:
        upstream = self.chance.choice(self.found.upstreams)
        if upstream in self.dead:
            await upstream.open()
            self.dead.discard(upstream)
        elif len(self.dead) + 1 < len(self.found.upstreams):
            await upstream.kill()
            self.dead.add(upstream)

    async def cut(self) -> None:
        self.chance.choice(self.found.upstreams).cut()

    async def mute(self) -> None:
        upstream = self.chance.choice(self.found.upstreams)
        upstream.mute = not upstream.mute

    async def fail_logs(self) -> None:
        answers = self.chance.choice(self.found.upstreams).answers
        if answers.pop("eth_getLogs", None) is None:
            answers["eth_getLogs"] = fail

    async def listen(self) -> None:
        if len(self.ears) >= MOST_LISTENERS or self.dead:
            return
        ear, members = Ear(), self.chance.choice((None, *FILTERS))
        topic = HEADS if members is None else logs_topic(**members)
        if self.chance.random() < 0.5:
            # Not so far ahead of the feed that it would be taken for now.
            tip = self.found.evm.walk.chain.tip
            first = self.chance.randrange(5, max(6, min(self.found.chain.head - 5, tip.number + NEAR if tip else 5)))
            self.group.create_task(self.found.feed.subscribe_from(topic, ear, first))
        else:
            await self.found.feed.subscribe(topic, ear)
            tip = self.found.evm.walk.chain.tip
            if tip is None or tip.hash != self.found.chain.line[-1]:
                self.found.feed.unsubscribe(topic, ear)  # What is its first block could not be told.
                return
            first = len(self.found.chain.line)
        self.lowest = max(self.lowest, first)
        self.ears.append((ear, members, first))

    async def heal(self) -> None:
        for upstream in self.found.upstreams:
            upstream.mute = False
            upstream.answers.clear()
            if upstream in self.dead:
                await upstream.open()

    def is_right(self) -> bool:
        return all(
            ear.heads() == self.found.chain.line[first:]
            if members is None
            else ear.logs() == record(self.found, first, **members)
            for ear, members, first in self.ears
        )


@pytest.mark.parametrize("seed", range(4))
def test_listeners_hold_what_the_chain_holds_after_everything(seed: int) -> None:
    @on_uvloop
    async def run() -> None:
        chance = random.Random(seed)
        kinds = (["ws", "ws", "http"], ["ws", "http"], ["http", "http"], ["ws", "ws"])[seed]
        async with feed_scene(kinds, blocks=30, network=("dev/mainnet", QUICK)[seed % 2]) as found:
            async with asyncio.TaskGroup() as group:
                shaker = Shaker(found, chance, group)
                for _ in range(STEPS):
                    await shaker.step()
                await shaker.heal()
                # The replays that are still under way may need one more block to see where the chain is.
                await found.chain.mine()
            await found.chain.mine()
            await until(shaker.is_right, within_s=60, every_s=0.1)
            assert shaker.ears

    run()
