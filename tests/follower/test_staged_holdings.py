"""Sums that a back-fill has staged are merged once, wherever it is killed."""

from __future__ import annotations

import random

import pytest

from proxy.core.holdings import FUNGIBLE, HoldingChanges, Transfer
from proxy.services.follower.staged_holdings import PARTS, StagedHoldings
from proxy.store.postgres.blocks import LeaderSession
from tests.database import connected
from tests.follower.harness import NETWORK, FollowerHarness, follower_harness, indexed


def traded(seed: int) -> HoldingChanges:
    """Transfers between holders of all parts, of a token and of an NFT."""
    rng = random.Random(seed)
    holders = [rng.randbytes(20) for _ in range(3 * PARTS)]
    found = HoldingChanges()
    for index in range(200):
        standard, sender, recipient = rng.choice((FUNGIBLE, 721)), rng.choice(holders), rng.choice(holders)
        found.add([Transfer(standard, b"c" * 20, sender, recipient, rng.randrange(9), index % 7, "0x", index)])
    return found


def amounts(*changes: HoldingChanges) -> dict[bytes, int]:
    """The holdings that must be stored, by key."""
    whole = HoldingChanges()
    for each in changes:
        whole.include(each)
    return {key: delta for key, delta in (whole.tokens | whole.nfts).items() if delta}


async def stored(database: str) -> dict[bytes, int]:
    return {b"".join(key): amount for key, amount in (await indexed(database)).items()}


async def rows_left(database: str) -> int:
    async with connected(database) as connection:
        return int(await connection.fetchval("select count(*) from staged_holdings"))


async def stage(staged: StagedHoldings, term: LeaderSession, changes: HoldingChanges) -> None:
    async with term.transaction() as connection:
        number = await staged.stage(connection, changes.pack())
    staged.include(changes, number)


async def loaded(term: LeaderSession, most: int) -> StagedHoldings:
    staged = StagedHoldings(term, most=most)
    await staged.load()
    return staged


async def test_sums_are_merged_once_there_are_many(database: str) -> None:
    async with follower_harness(database) as harness, harness.running.blocks.backfill(NETWORK) as term:
        first, second = traded(1), traded(2)
        staged = await loaded(term, len(first))
        await stage(staged, term, first)
        assert await stored(database) == {}
        await staged.merge_some()
        await stage(staged, term, second)
        await staged.merge_some()
        assert await stored(database) == amounts(first)
        await staged.merge_all()
        assert await stored(database) == amounts(first, second)
        assert await rows_left(database) == 0


@pytest.mark.parametrize("merged", range(PARTS + 1))
async def test_next_run_merges_the_parts_that_are_left(database: str, merged: int) -> None:
    """A run ends after so many parts, while newer sums are staged; the one after that ends as well."""
    async with follower_harness(database) as harness, harness.running.blocks.backfill(NETWORK) as term:
        first, second = traded(1), traded(2)
        staged = await loaded(term, 1)
        await stage(staged, term, first)
        staged._begin()
        await stage(staged, term, second)
        for _ in range(merged):
            await staged._merge_part()
        again = await loaded(term, 1)
        again._begin()
        for _ in range(merged // 2):
            await again._merge_part()
        await (await loaded(term, 1)).merge_all()
        assert await stored(database) == amounts(first, second)
        assert await rows_left(database) == 0


async def test_deleting_the_index_deletes_staged_sums(database: str) -> None:
    async with follower_harness(database) as harness:
        await forget_with_staged_sums(harness)
        assert await rows_left(database) == 0


async def forget_with_staged_sums(harness: FollowerHarness) -> None:
    from proxy.services.follower.network_follower import forget

    async with harness.running.blocks.backfill(NETWORK) as term:
        await stage(await loaded(term, 1), term, traded(1))
        await forget(term, harness.running.sinks)
