"""Who holds what: written by the follower and by back-fills in transactions of theirs, read by whoever answers questions.

Those who write pass their own connection, because what they write belongs together with their cursor. Those who read name a
network by its id and get `Unavailable` when there is no database. Amounts are sums of events: for tokens that pay interest
they say who to ask about, not how much there is.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from proxy.core.holdings import HoldingChanges
from proxy.store import sql
from proxy.store.pool import DatabaseConnection, Pool


@dataclass(frozen=True, slots=True)
class TokenHolding:
    contract: bytes
    amount: int


@dataclass(frozen=True, slots=True)
class NftHolding:
    contract: bytes
    token_id: int
    amount: int
    standard: int


@dataclass(frozen=True, slots=True)
class HolderShare:
    """How much of one token somebody has."""

    holder: bytes
    amount: int


@dataclass(frozen=True, slots=True)
class Collection:
    """`pieces`: rows, one for each holder of each token. `supply`: how many tokens there are in all. `standard`: 721 or 1155;
    None where nothing was ever seen of the contract."""

    owners: int
    pieces: int
    supply: int
    standard: int | None


@dataclass(frozen=True, slots=True)
class IndexBlock:
    """The block that answers are true at. Nothing before `first_block` is in them, but for what a back-fill brought."""

    block: int
    hash: bytes
    time: datetime.datetime | None
    first_block: int
    fault: str | None


class HoldingStore:
    """Questions about holdings."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def tokens_of(self, network: str, holder: bytes, *, limit: int) -> list[TokenHolding]:
        """Contracts whose token the holder has, or had: the amount may be zero, or less, and wrong where a token rebases. Those
        that it seems to have come first."""
        async with self._pool.connection() as connection:
            rows = await connection.fetch(sql.holdings.tokens_of, network, holder, limit)
        return [TokenHolding(contract, int(amount)) for contract, amount in rows]

    async def nfts_of(self, network: str, holder: bytes, *, limit: int, offset: int = 0) -> list[NftHolding]:
        """By contract and token id."""
        async with self._pool.connection() as connection:
            rows = await connection.fetch(sql.holdings.nfts_of, network, holder, limit, offset)
        return [NftHolding(contract, int(token), int(amount), standard) for contract, token, amount, standard in rows]

    async def count_nfts(self, network: str, holder: bytes) -> int:
        async with self._pool.connection() as connection:
            return int(await connection.fetchval(sql.holdings.count_nfts, network, holder))

    async def holders_of(self, network: str, contract: bytes, token_id: int, *, limit: int) -> list[HolderShare]:
        """Some who hold an ERC-1155 token."""
        async with self._pool.connection() as connection:
            rows = await connection.fetch(sql.holdings.holders_of, network, contract, str(token_id), limit)
        return [HolderShare(holder, int(amount)) for holder, amount in rows]

    async def collection(self, network: str, contract: bytes) -> Collection:
        async with self._pool.connection() as connection:
            row = await connection.fetchrow(sql.holdings.read_collection, network, contract)
        assert row is not None  # an aggregate always has one
        return Collection(row["owners"], row["pieces"], int(row["supply"]), row["standard"])

    async def as_of(self, network: str) -> IndexBlock | None:
        """None where the network is not followed, or not yet."""
        async with self._pool.connection() as connection:
            row = await connection.fetchrow(sql.holdings.as_of, network)
        if row is None:
            return None
        return IndexBlock(row["block"], row["block_hash"], row["block_time"], row["first_block"], row["fault"])


# For those who write, on their connection and in their transaction; `network` is its number


async def add(connection: DatabaseConnection, network: int, changes: HoldingChanges) -> None:
    """Rows in the order of their keys: whoever else writes locks them in the same order."""
    if changes.tokens:
        keys = sorted(changes.tokens)
        await connection.execute(
            sql.holdings.add_tokens,
            network,
            b"".join(keys),
            _listed(changes.tokens[key] for key in keys),
        )
    if keys := sorted(key for key, delta in changes.nfts.items() if delta):
        await connection.execute(
            sql.holdings.add_nfts,
            network,
            b"".join(key[:40] for key in keys),
            _listed(changes.standards[key[20:40]] for key in keys),
            _listed(int.from_bytes(key[40:], "big") for key in keys),
            _listed(changes.nfts[key] for key in keys),
        )
        await connection.execute(sql.holdings.remove_nfts_at_zero, network)


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


async def remember(connection: DatabaseConnection, network: int, blocks: Sequence[tuple[int, bytes]]) -> None:
    """What each block changed, packed, to be taken back if the chain drops it."""
    if blocks:
        numbers, packed = zip(*blocks, strict=True)
        await connection.execute(sql.holdings.remember_changes, network, numbers, packed)


async def take_back(connection: DatabaseConnection, network: int, above: int) -> None:
    """All that the blocks above this one changed."""
    undone = HoldingChanges()
    for row in await connection.fetch(sql.holdings.take_changes_above, network, above):
        undone.include(HoldingChanges.unpack(row["changes"]).taken_back())
    await add(connection, network, undone)


async def settle(connection: DatabaseConnection, network: int, below: int) -> None:
    """Blocks below this one stay for good."""
    await connection.execute(sql.holdings.forget_changes_below, network, below)


async def forget(connection: DatabaseConnection, network: int) -> None:
    """All of a network."""
    for query in (sql.holdings.forget_tokens, sql.holdings.forget_nfts):
        await connection.execute(query, network)
    await connection.execute(sql.holdings.take_changes_above, network, -1)
