"""Random transfers and random reorganisations: what is written equals a plain replay of the chain, whatever came between."""

from __future__ import annotations

import random

import pytest

from proxy.services.follower.block_reader import ReadFailed
from tests.chain_upstream import (
    ZERO,
    Event,
    address,
    deposit,
    erc20,
    erc721,
    erc1155,
    erc1155_batch,
    withdrawal,
)
from tests.follower.scene import Scene, scene

KEEP = 12
HOLDERS = [ZERO, *(address(n) for n in range(5))]
CONTRACTS = [address(100 + n) for n in range(3)]
AMOUNTS = (0, 1, 7, 10**18, 10**77, 2**256 - 1)


def event(chance: random.Random) -> Event:
    contract, sender, recipient = chance.choice(CONTRACTS), *chance.choices(HOLDERS, k=2)
    amount, token = chance.choice(AMOUNTS), chance.choice((0, 1, 2, 2**255))
    match chance.randrange(6):
        case 0:
            return erc20(contract, sender, recipient, amount)
        case 1:
            return erc721(contract, sender, recipient, token)
        case 2:
            return erc1155(contract, sender, recipient, token, amount)
        case 3:
            tokens = [(chance.randrange(3), chance.choice(AMOUNTS)) for _ in range(chance.randrange(4))]
            return erc1155_batch(contract, sender, recipient, tokens)
        case 4:
            return deposit(contract, recipient, amount)
        case _:
            return withdrawal(contract, sender, amount)


def mine(stage: Scene, chance: random.Random, most: int) -> None:
    stage.chain.mine(*([event(chance) for _ in range(chance.randrange(5))] for _ in range(chance.randrange(1, most))))


@pytest.mark.parametrize("seed", range(10))
async def test_record_equals_a_replay_of_the_canonical_chain(database: str, seed: int) -> None:
    chance = random.Random(seed)
    async with scene(database) as stage, stage.leading(keep=KEEP) as (following, term):
        stage.upstream.max_range = chance.choice((0, 1, 3))
        mine(stage, chance, 60)
        for _ in range(12):
            written = max(following.cursor.number, 0)
            depth = chance.randrange(0, KEEP)
            # Blocks that were written in ranges stay: only those that are kept can go.
            if depth and stage.chain.head > 40 and stage.chain.head - depth >= written - KEEP + 1:
                stage.chain.drop(depth)
            mine(stage, chance, 20)
            try:
                await following.step(term)
            except ReadFailed:
                pass
            assert await _agrees(stage)
        for _ in range(3):
            await following.step(term)
        assert await stage.is_whole()


async def _agrees(stage: Scene) -> bool:
    """At every moment the record is that of a chain up to its cursor: the canonical one, if the cursor is on it."""
    found = await stage.cursor()
    if found is None:
        return True
    number, block_hash = found
    if number < 0 or stage.chain.blocks[min(number, stage.chain.head)].hash != block_hash:
        return True
    return await stage.record() == stage.chain.holdings(0, number)
