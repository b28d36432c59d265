"""Random transfers and reorganisations: the index always equals a plain replay of the canonical chain."""

from __future__ import annotations

import random

import pytest

from proxy.services.follower.block_reader import ReadFailed
from tests.chain_upstream import ZERO, Event, address, deposit, erc20, erc721, erc1155, erc1155_batch, withdrawal
from tests.follower.harness import FollowerHarness, follower_harness, indexed_transfers

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


def mine(harness: FollowerHarness, rng: random.Random, most: int) -> None:
    harness.chain.mine(*([event(rng) for _ in range(rng.randrange(5))] for _ in range(rng.randrange(1, most))))


@pytest.mark.parametrize("seed", range(10))
async def test_index_equals_a_replay_of_the_canonical_chain(database: str, seed: int) -> None:
    rng = random.Random(seed)
    async with follower_harness(database) as harness, harness.leading(keep=KEEP) as (follower, term):
        harness.upstream.max_range = rng.choice((0, 1, 3))
        mine(harness, rng, 60)
        for _ in range(12):
            written = max(follower.cursor.number, 0)
            depth = rng.randrange(0, KEEP)
            # Blocks indexed in ranges cannot be undone, only the last `KEEP` can.
            if depth and harness.chain.head > 40 and harness.chain.head - depth >= written - KEEP + 1:
                harness.chain.drop(depth)
            mine(harness, rng, 20)
            try:
                await follower.step(term)
            except ReadFailed:
                pass
            assert await _agrees(harness)
        for _ in range(3):
            await follower.step(term)
        assert await harness.is_complete()


async def _agrees(harness: FollowerHarness) -> bool:
    """If the cursor is on the canonical chain, the index equals that chain up to the cursor."""
    found = await harness.cursor()
    if found is None:
        return True
    number, block_hash = found
    if number < 0 or harness.chain.blocks[min(number, harness.chain.head)].hash != block_hash:
        return True
    if await indexed_transfers(harness.database) != harness.chain.transfers(0, number):
        return False
    return await harness.indexed() == harness.chain.holdings(0, number)
