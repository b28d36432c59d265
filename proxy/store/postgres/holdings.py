"""Token and NFT holdings: written by the follower and by back-fills, read by the token endpoints.

Writers pass their own connection, because holdings and cursor must change in one transaction. Readers name a network by its id
and get `Unavailable` if there is no database. Amounts are sums of transfer events: for tokens that rebase or pay interest they
show which contracts to query, not the balance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from proxy.core.holdings import HoldingChanges
from proxy.store.postgres import sql
from proxy.store.postgres.index_reads import IndexBlock, IndexReads
from proxy.store.postgres.pool import DatabaseConnection, Pool
from proxy.store.postgres.replica import ReplicaReads

# The index has only contracts of EVM networks.
CONTRACT_BYTES = 20


@dataclass(frozen=True, slots=True)
class NftHolding:
    contract: bytes
    token_id: int
    amount: int
    standard: int


@dataclass(frozen=True, slots=True)
class HolderShare:
    """The amount of a token, or of a contract's NFTs, that a holder has."""

    holder: bytes
    amount: int


@dataclass(frozen=True, slots=True)
class Collection:
    """`pieces`: the number of (token, holder) pairs. `supply`: the number of tokens in total. `standard`: 721 or 1155, or None
    if no transfer of the contract was indexed."""

    owners: int
    pieces: int
    supply: int
    standard: int | None


class HoldingStore:
    """Reads holdings. The data of a network is never older than the block that `as_of` returned last."""

    def __init__(
        self, pool: Pool, reads: ReplicaReads | None = None, *, index_pools: Mapping[str, Pool] | None = None
    ) -> None:
        """`index_pools`: the databases of networks whose index is not in the main one."""
        self.index = IndexReads(pool, reads, index_pools=index_pools)
        self._fetch = self.index.fetch

    async def tokens_of(self, network: str, holder: bytes, *, limit: int) -> list[bytes]:
        """Return the contracts of the tokens that the holder has or had, non-zero amounts first.

        An amount may be wrong for a token that rebases.
        """
        ((contracts,),) = await self._fetch(sql.holdings.tokens_of, network, holder, limit)
        packed: bytes = contracts or b""
        return [packed[start : start + CONTRACT_BYTES] for start in range(0, len(packed), CONTRACT_BYTES)]

    async def nfts_of(
        self, network: str, holder: bytes, *, limit: int, offset: int = 0, contracts: Sequence[bytes] = ()
    ) -> list[NftHolding]:
        """Return the holder's NFTs, of these contracts or of all, ordered by contract and token id."""
        rows = await self._fetch(sql.holdings.nfts_of, network, holder, limit, offset, contracts or None)
        return [NftHolding(contract, int(token), int(amount), standard) for contract, token, amount, standard in rows]

    async def count_nfts(self, network: str, holder: bytes, contracts: Sequence[bytes] = ()) -> int:
        (row,) = await self._fetch(sql.holdings.count_nfts, network, holder, contracts or None)
        return int(row[0])

    async def holders_of(self, network: str, contract: bytes, token_id: int, *, limit: int) -> list[HolderShare]:
        """Return up to `limit` holders of an ERC-1155 token."""
        rows = await self._fetch(sql.holdings.holders_of, network, contract, str(token_id), limit)
        return [HolderShare(holder, int(amount)) for holder, amount in rows]

    async def holder_rows(self, network: str, contract: bytes, *, most: int) -> tuple[int, bool]:
        """The number of rows that the holders of a contract have, counted up to `most`, and whether it has fungible tokens."""
        ((tokens, nfts),) = await self._fetch(sql.holdings.count_holders, network, contract, most)
        return max(tokens, nfts), tokens >= nfts

    async def largest_holders(
        self, network: str, contract: bytes, *, is_fungible: bool, limit: int
    ) -> tuple[list[HolderShare], int]:
        """The largest holders of a contract, and the number of all."""
        query = sql.holdings.token_holders if is_fungible else sql.holdings.nft_holders
        rows = await self._fetch(query, network, contract, limit)
        shares = [HolderShare(row["holder"], int(row["amount"])) for row in rows]
        return shares, rows[0]["holders"] if rows else 0

    async def collection(self, network: str, contract: bytes) -> Collection:
        (row,) = await self._fetch(sql.holdings.read_collection, network, contract)
        return Collection(row["owners"], row["pieces"], int(row["supply"]), row["standard"])

    async def as_of(self, network: str) -> IndexBlock | None:
        """Return the block that the index has reached, or None if the network is not followed yet."""
        return await self.index.as_of(network)


# Writes, on the caller's connection and in its transaction. `network` is the network's number.


@dataclass(frozen=True, slots=True)
class HoldingRows:
    """Changes as they are sent. In key order, so that concurrent writers lock rows in the same order."""

    tokens: tuple[bytes, str] | None
    nfts: tuple[bytes, str, str, str] | None

    @classmethod
    def of(cls, changes: HoldingChanges) -> HoldingRows:
        tokens = nfts = None
        if changes.tokens:
            keys = sorted(changes.tokens)
            tokens = b"".join(keys), _listed(map(changes.tokens.__getitem__, keys))
        if keys := sorted(key for key, delta in changes.nfts.items() if delta):
            nfts = (
                b"".join(key[:40] for key in keys),
                _listed(changes.standards[key[20:40]] for key in keys),
                _listed(int.from_bytes(key[40:], "big") for key in keys),
                _listed(map(changes.nfts.__getitem__, keys)),
            )
        return cls(tokens, nfts)


async def add(connection: DatabaseConnection, network: int, changes: HoldingChanges) -> None:
    """Add changes to the rows of their holders."""
    rows = HoldingRows.of(changes)
    if rows.tokens is not None:
        await connection.execute(sql.holdings.add_tokens, network, *rows.tokens)
    if rows.nfts is not None:
        await connection.execute(sql.holdings.add_nfts, network, *rows.nfts)
        await connection.execute(sql.holdings.remove_nfts_at_zero, network)


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


async def stage(connection: DatabaseConnection, network: int, packed: bytes) -> int:
    """Keep changes, to be merged into the holdings later. Returns their number, which grows."""
    return int(await connection.fetchval(sql.holdings.stage, network, packed))


async def staged(connection: DatabaseConnection, network: int) -> list[tuple[int, int, bytes]]:
    """The changes that are staged: each with its number, and the first byte of the first holder that was not merged."""
    rows = await connection.fetch(sql.holdings.staged, network)
    return [(row["id"], row["merged"], row["changes"]) for row in rows]


async def mark_merged(connection: DatabaseConnection, network: int, last: int, *, below: int) -> None:
    """Record that staged changes up to the number `last` were merged, for holders whose first byte is below this one."""
    await connection.execute(sql.holdings.mark_merged, network, last, below)


async def delete_staged(connection: DatabaseConnection, network: int, last: int) -> None:
    """Delete staged changes that were merged, up to the number `last`."""
    await connection.execute(sql.holdings.delete_staged, network, last)


async def record_changes(connection: DatabaseConnection, network: int, blocks: Sequence[tuple[int, bytes]]) -> None:
    """Record each block's packed changes, to undo them if the block is removed."""
    if blocks:
        numbers, packed = zip(*blocks, strict=True)
        await connection.execute(sql.holdings.record_changes, network, numbers, packed)


async def take_back(connection: DatabaseConnection, network: int, above: int) -> None:
    """Undo the changes of all blocks above this one."""
    undone = HoldingChanges()
    for row in await connection.fetch(sql.holdings.take_changes_above, network, above):
        undone.include(HoldingChanges.unpack(row["changes"]).taken_back())
    await add(connection, network, undone)


async def delete_changes_below(connection: DatabaseConnection, network: int, below: int) -> None:
    """Delete the recorded changes of blocks that can no longer be removed."""
    await connection.execute(sql.holdings.delete_changes_below, network, below)


async def delete_network(connection: DatabaseConnection, network: int) -> None:
    """Delete all holdings of a network."""
    for query in (sql.holdings.delete_tokens, sql.holdings.delete_nfts):
        await connection.execute(query, network)
    await connection.execute(sql.holdings.take_changes_above, network, -1)
    await delete_staged(connection, network, (1 << 63) - 1)
