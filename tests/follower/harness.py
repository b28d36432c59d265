"""A small chain, a database, and a follower that indexes the one into the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from proxy.compose.background import Background
from proxy.core.transfer_history import index_of, item_of
from proxy.services.follower.network_follower import NetworkFollower
from proxy.services.follower.sinks import FollowerSink
from proxy.services.rpc.networks import Route
from proxy.settings import load
from proxy.store.postgres.blocks import BlockStore, LeaderSession
from proxy.store.postgres.holdings import HoldingStore
from proxy.store.postgres.transfers import value_of
from tests.chain_upstream import (
    ZERO,
    ChainUpstream,
    Event,
    LittleChain,
    address,
    deposit,
    erc20,
    erc721,
    erc1155,
    erc1155_batch,
    withdrawal,
)
from tests.database import connected
from tests.rpc_upstreams import scripted
from tests.shipped_tables import TABLES

NETWORK = "dev/testnet"
PEPPER = "a pepper that no attacker can guess"

A, B, C = address(1), address(2), address(3)
COIN, ART, GAME, WETH = address(100), address(101), address(102), address(103)
HUGE = 2**256 - 1


def everything() -> list[list[Event]]:
    """One block for each kind of event."""
    return [
        [erc20(COIN, ZERO, A, 1000), erc20(COIN, A, B, 300), erc20(COIN, B, B, 7)],
        [erc721(ART, ZERO, A, 1), erc721(ART, ZERO, A, HUGE), erc721(ART, A, B, 1)],
        [erc1155(GAME, ZERO, A, 5, 10), erc1155_batch(GAME, A, B, [(5, 3), (6, 0)]), erc1155_batch(GAME, ZERO, C, [])],
        [deposit(WETH, A, 50), withdrawal(WETH, A, 20), erc20(WETH, A, C, 5)],
        [erc20(COIN, B, ZERO, 100), erc721(ART, B, ZERO, 1), erc1155(GAME, B, ZERO, 5, 3)],
    ]


def settings_of(database: str, urls: Sequence[str], *, cost: str = "", **follower: Any) -> dict[str, Any]:
    """`cost`: the provider whose prices the upstreams have."""
    costs = {"cost": cost} if cost else {}
    return {
        "database": {"url": database},
        "keys": {"pepper": PEPPER},
        "log": {"access": False},
        "rpc": {"call_timeout_s": 5.0},
        "upstreams": [{"network": NETWORK, "url": url, **costs} for url in urls],
        "follower": {"start": {NETWORK: 0}, "networks": [NETWORK], **follower},
    }


class FollowerHarness:
    def __init__(self, database: str, chain: LittleChain, upstreams: list[ChainUpstream], running: Background) -> None:
        self.database = database
        self.chain = chain
        self.upstreams = upstreams
        self.running = running
        self.route: Route = running.networks.routes[NETWORK]
        self.holdings = HoldingStore(running.pool)

    @property
    def upstream(self) -> ChainUpstream:
        return self.upstreams[0]

    def follower(
        self, *more: FollowerSink, keep: int = 16, start: int | None = 0, renews: bool = False
    ) -> NetworkFollower:
        self.running.sinks = [*self.running.sinks, *more]
        sinks = [*self.running.sinks, self.running.transfers(self.route)]
        reader = self.running.reader(self.route, sinks)
        follower = NetworkFollower(reader, self.running.blocks, sinks, start=start, keep=keep, renews=renews)
        follower.keep = keep  # exactly, regardless of the network's finality
        return follower

    @asynccontextmanager
    async def leading(
        self, *more: FollowerSink, **options: Any
    ) -> AsyncIterator[tuple[NetworkFollower, LeaderSession]]:
        """A leading follower whose steps the test runs."""
        follower = self.follower(*more, **options)
        async with self.running.blocks.lead(NETWORK) as term:
            yield follower, term

    async def indexed(self) -> dict[tuple[bytes, ...], int]:
        """The indexed holdings that are not zero."""
        return await indexed(self.database)

    async def cursor(self) -> tuple[int, str] | None:
        found = await self.holdings.as_of(NETWORK)
        return None if found is None else (found.block, "0x" + found.hash.hex())

    async def is_complete(self, first: int = 0) -> bool:
        """Whether the index matches the chain up to its last block."""
        tip = self.chain.blocks[-1]
        return (
            await self.cursor() == (tip.number, tip.hash)
            and await self.indexed() == self.chain.holdings(first)
            and await indexed_transfers(self.database) == self.chain.transfers(first)
        )


async def indexed(database: str, network: str = NETWORK) -> dict[tuple[bytes, ...], int]:
    async with connected(database) as connection:
        number = await connection.fetchval("select number from followed_networks where network = $1", network)
        tokens = await connection.fetch(
            "select holder, contract, amount from token_holdings where network = $1 and amount <> 0", number
        )
        nfts = await connection.fetch(
            "select holder, contract, token_id, amount from nft_holdings where network = $1", number
        )
    found: dict[tuple[bytes, ...], int] = {(row["holder"], row["contract"]): int(row["amount"]) for row in tokens}
    for row in nfts:
        assert row["amount"] != 0, "zero balances must be removed"
        found[row["holder"], row["contract"], int(row["token_id"]).to_bytes(32, "big")] = int(row["amount"])
    return found


async def indexed_transfers(database: str, network: str = NETWORK) -> list[tuple[Any, ...]]:
    """All rows of the history, in the form of `LittleChain.transfers`."""
    async with connected(database) as connection:
        rows = await connection.fetch(
            """select t.*, b.hash, b.time, substr(b.transactions, 32 * t.tx + 1, 32) as transaction
            from transfers t join followed_networks n on n.number = t.network
            join transfer_blocks b on b.network = t.network and b.number = t.block
            where n.network = $1 order by t.block, t.place""",
            network,
        )
    return [
        (
            *(row["block"], "0x" + row["hash"].hex(), row["time"], "0x" + row["transaction"].hex()),
            *(index_of(row["place"]), item_of(row["place"]), row["category"], row["contract"]),
            *(row["sender"], row["recipient"], value_of(row["token_id"]), value_of(row["amount"])),
        )
        for row in rows
    ]


@asynccontextmanager
async def follower_harness(
    database: str,
    *,
    upstreams: int = 1,
    chain: LittleChain | None = None,
    silent_s: float = 15.0,
    **follower: Any,
) -> AsyncIterator[FollowerHarness]:
    chain = chain or LittleChain()
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(scripted(upstreams, chain, ChainUpstream))  # type: ignore[arg-type]
        over: Mapping[str, Any] = settings_of(database, [server.url for server in servers], **follower)
        running = Background(load(environ={}, overrides=over), TABLES)
        running.blocks = BlockStore(running.pool, silent_s=silent_s)
        await running.open()
        stack.push_async_callback(running.close)
        await asyncio.sleep(0)
        yield FollowerHarness(database, chain, servers, running)  # type: ignore[arg-type]
