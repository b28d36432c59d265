"""Cached name, symbol and decimals of token contracts; and the block at which the index and the chain can both be read.

The index lags behind the chain: by a moment, or by much while it catches up. A reply that joins the two is read at the index's
block, so that it is consistent and names the right block. If the upstreams no longer have that block, the request fails.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from proxy.chains.evm import abi, address
from proxy.chains.registry import Network
from proxy.core import display_text, units
from proxy.core.portfolio import TokenInfo
from proxy.errors import NotFound, Unavailable
from proxy.services.multicall import Multicall
from proxy.store.postgres.holdings import HoldingStore
from proxy.store.postgres.index_reads import IndexBlock
from proxy.store.valkey.cache import DataCache
from proxy.tasks import min_block_of_task
from proxy.turn_queue import next_turn

# Names rarely change. A contract without a symbol or decimals may be a proxy that has no code yet, so it is read again sooner.
KEPT_S, KEPT_UNKNOWN_S = 86_400.0, 3_600.0
# Concurrent requests share one read of the index's block for this long.
INDEX_S = 0.2
INDEX_BYTES = 1 << 20
# How often the index is read again because it moved during a read.
TRIES = 4

NAME, SYMBOL, DECIMALS = (abi.call(signature) for signature in ("name()", "symbol()", "decimals()"))
_KIND = "token"
_read_token = msgspec.json.Decoder(TokenInfo).decode

T = TypeVar("T")


class PinnedBlock(NamedTuple):
    """A block, and the cache key of results read at it. The key includes the hash of the index's block, since a
    reorganisation may put another block at the same height."""

    block: int
    name: str


class TokenContracts:
    def __init__(
        self, multicall: Multicall, holdings: HoldingStore, cache: DataCache, *, follows: Callable[[str], bool]
    ) -> None:
        """`follows`: whether a network is configured to be followed, by its id."""
        self._multicall = multicall
        self._follows = follows
        self._holdings = holdings
        self._cache = cache
        self._recent = DataCache(bytes=INDEX_BYTES)

    def __repr__(self) -> str:
        return f"<TokenContracts read by {self._multicall!r}>"

    async def newest_block(self, network: Network) -> PinnedBlock:
        """The newest block that the index and the chain both have. Raises without an index: an empty list would be wrong."""

        async def look() -> tuple[int, str]:
            index_block = await self.indexed(network)
            return index_block.block, index_block.hash.hex()

        indexed, name = await self._recent.once(network.id, "index", "", make=look, ttl_s=INDEX_S)
        tip = await self._multicall.tip(network)
        # Most upstreams may not have the block of X-Min-Block: one that has it is enough.
        reached = tip if tip >= min_block_of_task.get() else max(tip, self._multicall.newest(network))
        block = min(int(indexed), reached)
        return PinnedBlock(block, f"{block}:{name}")

    async def at_one_block(self, network: Network, read: Callable[[], Awaitable[T]]) -> tuple[T, int]:
        """Run `read`, which may take several queries of the index, and return its result with the block that it belongs to.

        The follower writes the cursor with every block: if the cursor has not moved, nothing else has. On an index that is
        catching up, or on a chain faster than a large count, it may move every time. Then the block is the one before the last
        read.
        """
        before, answer = await self.indexed(network), await read()
        for _ in range(TRIES):
            after = await self.indexed(network)
            if after == before:
                break
            before, answer = after, await read()
        return answer, before.block

    async def indexed(self, network: Network) -> IndexBlock:
        """The block that the index has reached. Raises without an index."""
        block = await self._holdings.as_of(network.id)
        if block is not None:
            return block
        if self._follows(network.id):
            raise Unavailable(f"the network {network.id} is not indexed yet; try again shortly")
        raise NotFound(f"there is no index of holdings for {network.id}: the network is not configured to be followed")

    async def known(self, network: Network, contracts: Sequence[bytes], block: int) -> dict[bytes, TokenInfo]:
        """Name, symbol and decimals of each contract, from the cache; one batched read for those that are missing."""
        cached = await self._cache.get(network.id, _KIND, [contract.hex() for contract in contracts], read=_read_token)
        tokens = {contract: token for contract, token in zip(contracts, cached, strict=True) if token is not None}
        missing = [contract for contract in contracts if contract not in tokens]
        if not missing:
            return tokens
        calls = [(contract, data) for contract in missing for data in (NAME, SYMBOL, DECIMALS)]
        read = await self._multicall.read(network, calls, block=block)
        await next_turn()
        new = {contract: token_of(contract, *read[3 * n : 3 * n + 3]) for n, contract in enumerate(missing)}
        await next_turn()
        await self._store(network, new)
        return tokens | new

    async def _store(self, network: Network, new: dict[bytes, TokenInfo]) -> None:
        for ttl_s, is_complete in ((KEPT_S, True), (KEPT_UNKNOWN_S, False)):
            values = {
                contract.hex(): token
                for contract, token in new.items()
                if (token.symbol is not None and token.decimals is not None) is is_complete
            }
            if values:
                await self._cache.put(network.id, _KIND, values, ttl_s=ttl_s)


def token_of(contract: bytes, name: bytes | None, symbol: bytes | None, decimals: bytes | None) -> TokenInfo:
    """The token described by a contract's replies to name(), symbol() and decimals()."""
    places = abi.uint(decimals)
    return TokenInfo(
        address.checksum(contract),
        display_text.cleaned(abi.text(name), display_text.NAME),
        display_text.cleaned(abi.text(symbol), display_text.SYMBOL),
        places if places is not None and places <= units.MOST_DECIMALS else None,
    )


def about_a_block(network: Network) -> float:
    """How long a result at the newest block is cached: long enough for a burst, short enough to stay current."""
    return min(max(network.facts.block_time_s, 1.0), 12.0)
