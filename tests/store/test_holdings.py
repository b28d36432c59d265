"""Reads of holdings: correct results, paging, and index use on many rows."""

from __future__ import annotations

import re

import pytest

from proxy.core.holdings import HoldingChanges, Transfer
from proxy.errors import Unavailable
from proxy.store.postgres import blocks, holdings, sql
from proxy.store.postgres.blocks import BlockId, BlockStore
from proxy.store.postgres.holdings import Collection, HoldingStore, NftHolding
from proxy.store.postgres.pool import DatabaseConnection, Pool
from tests.database import connected

NETWORK, OTHER = "dev/mainnet", "dev/testnet"
ZERO = bytes(20)
A, B, C = (bytes([n]) * 20 for n in (1, 2, 3))
COIN, ART, GAME = (bytes([n]) * 20 for n in (101, 102, 103))
HUGE = 2**256 - 1


def moved(standard: int, contract: bytes, sender: bytes, recipient: bytes, amount: int, token: int = 0) -> Transfer:
    return Transfer(standard, contract, sender, recipient, amount, token, "0x", 0)


SOME = (
    moved(20, COIN, ZERO, A, 100),
    moved(20, COIN, A, B, 40),
    moved(20, GAME, B, C, HUGE),
    moved(721, ART, ZERO, A, 1, 1),
    moved(721, ART, ZERO, A, 1, HUGE),
    moved(721, ART, ZERO, B, 1, 2),
    moved(721, ART, A, ZERO, 1, 1),
    moved(1155, GAME, ZERO, A, 10, 5),
    moved(1155, GAME, ZERO, C, 3, 5),
)


@pytest.fixture
async def store(pool: Pool) -> HoldingStore:
    """A store with two networks that have the same transfers, one of them twice."""
    for network, times in ((NETWORK, 1), (OTHER, 2)):
        async with BlockStore(pool).lead(network) as term:
            await term.begin(7, b"\x07" * 32)
            async with term.transaction() as connection:
                at = BlockId(6, b"\x07" * 32)
                await blocks.move(connection, term.number, cursor=at, to=BlockId(8, b"\x08" * 32), time=1_700_000_000)
                for _ in range(times):
                    changes = HoldingChanges()
                    changes.add(SOME)
                    await holdings.add(connection, term.number, changes)
    return HoldingStore(pool)


async def test_tokens_of_a_holder_include_zero_and_negative_amounts(store: HoldingStore) -> None:
    """Others come first."""
    assert await store.tokens_of(NETWORK, A, limit=10) == [COIN]
    assert await store.tokens_of(NETWORK, B, limit=10) == [COIN, GAME]
    assert await store.tokens_of(OTHER, C, limit=10) == [GAME]
    assert await store.tokens_of(NETWORK, B, limit=1) == [COIN]
    assert await store.tokens_of("nowhere/none", A, limit=10) == []
    assert await amounts(store, NETWORK, A) == [60]
    assert await amounts(store, NETWORK, B) == [40, -HUGE]
    assert await amounts(store, OTHER, C) == [2 * HUGE]


async def amounts(store: HoldingStore, network: str, holder: bytes) -> list[int]:
    query = """select amount from token_holdings
        where network = (select number from followed_networks where network = $1) and holder = $2 order by amount desc"""
    return [int(amount) for (amount,) in await store.index.fetch(query, network, holder)]


async def test_nfts_of_a_holder_are_paged(store: HoldingStore) -> None:
    found = [NftHolding(ART, HUGE, 1, 721), NftHolding(GAME, 5, 10, 1155)]
    assert await store.nfts_of(NETWORK, A, limit=10) == found
    assert [await store.nfts_of(NETWORK, A, limit=1, offset=n) for n in range(3)] == [[found[0]], [found[1]], []]
    assert [await store.count_nfts(NETWORK, who) for who in (A, B, C, ZERO)] == [2, 1, 1, 0]


async def test_collection_reports_owners_and_supply(store: HoldingStore) -> None:
    assert await store.collection(NETWORK, ART) == Collection(owners=2, pieces=2, supply=2, standard=721)
    assert await store.collection(NETWORK, GAME) == Collection(owners=2, pieces=2, supply=13, standard=1155)
    assert await store.collection(NETWORK, COIN) == Collection(owners=0, pieces=0, supply=0, standard=None)


async def test_as_of_returns_the_indexed_block(store: HoldingStore) -> None:
    found = await store.as_of(NETWORK)
    assert found is not None
    assert (found.block, found.hash, found.first_block, found.fault) == (8, b"\x08" * 32, 7, None)
    assert found.time is not None
    assert found.time.timestamp() == 1_700_000_000
    assert await store.as_of("nowhere/none") is None


async def test_reads_without_a_database_are_unavailable() -> None:
    pool = Pool("postgresql://nobody@127.0.0.1:1/none", size=1, acquire_timeout_s=0.1)
    with pytest.raises(Unavailable):
        await HoldingStore(pool).tokens_of(NETWORK, A, limit=1)


MANY = """
insert into token_holdings
select 1, decode(lpad(to_hex(n % 500), 40, '0'), 'hex'), decode(lpad(to_hex(n), 40, '0'), 'hex'), n
from generate_series(1, 60000) as n;
insert into nft_holdings
select 1, 721, decode(lpad(to_hex(n % 500), 40, '0'), 'hex'), decode(lpad(to_hex(n % 5000), 40, '0'), 'hex'), n, 1
from generate_series(1, 60000) as n;
analyze token_holdings;
analyze nft_holdings;
"""


# Each query, the index that it must use in the tables of the network, and whether the order must come from the index.
PLANS = (
    (sql.holdings.tokens_of, (NETWORK, bytes(19) + b"\x05", 10), r"token_holdings_1_\d_pkey", True),
    (sql.holdings.nfts_of, (NETWORK, bytes(19) + b"\x05", 10, 0, None), r"nft_holdings_1_\d_pkey", True),
    (sql.holdings.count_nfts, (NETWORK, bytes(19) + b"\x05", None), r"nft_holdings_1_\d_pkey", False),
    (sql.holdings.read_collection, (NETWORK, bytes(19) + b"\x05"), r"nft_holdings_1_\d_network_contract_holder", False),
    (sql.holdings.remove_nfts_at_zero, (1,), r"nft_holdings_1_\d_network_idx", False),
)


async def test_pages_are_read_from_an_index(database: str) -> None:
    """Check plans on many rows with generic plans, which prepared statements get eventually."""
    async with connected(database) as connection:
        await connection.execute(sql.blocks.add_network, NETWORK)
        await connection.execute(MANY)
        # Each table has so few rows here that a bitmap and a sort cost the same.
        await connection.execute("set plan_cache_mode = force_generic_plan; set enable_bitmapscan = off")
        for query, arguments, index, ordered in PLANS:
            plan = await _plan(connection, query, arguments)
            assert re.search(rf"Index (?:Only )?Scan using {index}", plan), plan
            assert not re.search(r"Seq Scan on \w+_holdings", plan), plan
            assert not ordered or "Sort" not in plan, plan


async def _plan(connection: DatabaseConnection, query: str, arguments: tuple[object, ...]) -> str:
    rows = await connection.fetch(f"explain {query}", *arguments)
    return "\n".join(row[0] for row in rows)
