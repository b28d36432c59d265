"""Random transfers and reorganisations: the index always equals a plain replay of the canonical chain."""

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


def event(rng: random.Random) -> Event:
    contract, sender, recipient = rng.choice(CONTRACTS), *rng.choices(HOLDERS, k=2)
    amount, token = rng.choice(AMOUNTS), rng.choice((0, 1, 2, 2**255))
    match rng.randrange(6):
        case 0:
            return erc20(contract, sender, recipient, amount)
        case 1:
            return erc721(contract, sender, recipient, token)
        case 2:
            return erc1155(contract, sender, recipient, token, amount)
        case 3:
            tokens = [(rng.randrange(3), rng.choice(AMOUNTS)) for _ in range(rng.randrange(4))]
            return erc1155_batch(contract, sender, recipient, tokens)
        case 4:
            return deposit(contract, recipient, amount)
        case _:
            return withdrawal(contract, sender, amount)


def mine(stage: Scene, rng: random.Random, most: int) -> None:
    stage.chain.mine(*([event(rng) for _ in range(rng.randrange(5))] for _ in range(rng.randrange(1, most))))


@pytest.mark.parametrize("seed", range(10))
async def test_index_equals_a_replay_of_the_canonical_chain(database: str, seed: int) -> None:
    rng = random.Random(seed)
    async with scene(database) as stage, stage.leading(keep=KEEP) as (follower, term):
        stage.upstream.max_range = rng.choice((0, 1, 3))
        mine(stage, rng, 60)
        for _ in range(12):
            written = max(follower.cursor.number, 0)
            depth = rng.randrange(0, KEEP)
            # Blocks indexed in ranges cannot be undone, only the last `KEEP` can.
            if depth and stage.chain.head > 40 and stage.chain.head - depth >= written - KEEP + 1:
                stage.chain.drop(depth)
            mine(stage, rng, 20)
            try:
                await follower.step(term)
            except ReadFailed:
                pass
            assert await _agrees(stage)
        for _ in range(3):
            await follower.step(term)
        assert await stage.is_complete()


async def _agrees(stage: Scene) -> bool:
    """If the cursor is on the canonical chain, the index equals that chain up to the cursor."""
    found = await stage.cursor()
    if found is None:
        return True
    number, block_hash = found
    if number < 0 or stage.chain.blocks[min(number, stage.chain.head)].hash != block_hash:
        return True
    return await stage.indexed() == stage.chain.holdings(0, number)
