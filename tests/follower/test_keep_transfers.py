"""`follower.keep_transfers`: tables of old transfers are dropped, and the coverage names the block where the rest starts."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.compose import background
from proxy.core.transfer_history import ERC20, ERC721, ERC1155
from proxy.services.follower import network_follower
from proxy.store.postgres import transfers
from proxy.store.postgres.index_reads import IndexReads
from proxy.store.postgres.transfers import TransferStore
from tests.database import connected
from tests.follower.harness import NETWORK, FollowerHarness, everything, follower_harness, indexed_transfers

# Blocks per table, blocks whose transfers are kept, and blocks that a reorganisation can undo.
SPAN, KEPT, UNDO = 10, 15, 4
ALL = (ERC20, ERC721, ERC1155)


@pytest.fixture(autouse=True)
def small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "blocks_per_table", lambda block_time_s: SPAN)
    monkeypatch.setattr(transfers, "AHEAD", SPAN)
    monkeypatch.setattr(network_follower, "SETTLE_BLOCKS", 1)


async def coverage(harness: FollowerHarness) -> dict[int, int]:
    found = await TransferStore(IndexReads(harness.running.pool)).coverage(NETWORK)
    return {category: blocks.first for category, blocks in found.items()}


async def grow(harness: FollowerHarness, steps: int, **options: Any) -> None:
    async with harness.leading(keep=UNDO, **options) as (follower, term):
        for _ in range(steps):
            harness.chain.mine(*everything())
            await follower.step(term)


def oldest_kept(harness: FollowerHarness) -> int:
    """The first block of the oldest table that has a block to be kept."""
    return max(0, (harness.chain.blocks[-1].number - UNDO - KEPT) // SPAN * SPAN)


async def test_whole_tables_of_old_transfers_are_dropped(database: str) -> None:
    async with (
        follower_harness(database, keep_transfers={NETWORK: KEPT}) as harness,
        harness.leading(keep=UNDO) as (follower, term),
    ):
        harness.chain.mine(*everything())
        await follower.step(term)
        for _ in range(40):
            harness.chain.mine(everything()[0])
            await follower.step(term)
            first = oldest_kept(harness)
            assert await indexed_transfers(database) == harness.chain.transfers(first)
            assert await coverage(harness) == dict.fromkeys(ALL, first)
        assert oldest_kept(harness) >= 2 * SPAN
        assert await harness.indexed() == harness.chain.holdings()
        harness.chain.drop(UNDO)
        harness.chain.mine(*everything())
        await follower.step(term)
        await follower.step(term)
        assert await indexed_transfers(database) == harness.chain.transfers(oldest_kept(harness))


async def test_all_transfers_are_kept_by_default(database: str) -> None:
    async with follower_harness(database) as harness:
        await grow(harness, 10)
        assert await harness.is_complete()
        assert await coverage(harness) == dict.fromkeys(ALL, 0)


async def test_tables_that_are_being_read_are_dropped_later(database: str) -> None:
    async with follower_harness(database, keep_transfers={"*": KEPT}) as harness:
        await grow(harness, 2)
        async with connected(database) as reader, reader.transaction():
            await reader.fetch("select * from transfers")
            await grow(harness, 1)
            held = oldest_kept(harness)
            await grow(harness, 3)
            assert held < oldest_kept(harness)
            assert await harness.is_complete()
        await grow(harness, 1)
        assert await indexed_transfers(database) == harness.chain.transfers(oldest_kept(harness))


async def test_category_that_is_no_longer_written_does_not_count_as_complete(database: str) -> None:
    """A back-fill would skip blocks that count as complete."""
    async with follower_harness(database, keep_transfers={NETWORK: KEPT}) as harness:
        await grow(harness, 3)
        chain, ended = harness.chain, harness.chain.blocks[-1].number + 1
    async with follower_harness(
        database, chain=chain, keep_transfers={NETWORK: KEPT}, transfers={NETWORK: ["erc20"]}
    ) as harness:
        await grow(harness, 6)
        assert await coverage(harness) == {ERC20: oldest_kept(harness)}
    last = chain.blocks[-1].number
    assert oldest_kept(harness) > ended
    async with connected(database) as connection:
        number = await connection.fetchval("select number from followed_networks where network = $1", NETWORK)
        missing = await transfers.uncovered(connection, number, ALL, blocks=(oldest_kept(harness), last), head=last + 1)
    assert missing == {each: [(oldest_kept(harness), last)] for each in (ERC721, ERC1155)}
