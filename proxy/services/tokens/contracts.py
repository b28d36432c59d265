"""What contracts say of themselves, remembered; and the block at which the index and the chain can both be read.

The index lags the chain by a moment, or by much while it catches up. An answer that joins the two is read at the index's block,
so that it is whole and says truly which block it is of; where the upstreams have dropped that block, there is no answer.
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
from proxy.store.cache import DataCache
from proxy.store.holdings import HoldingStore, IndexBlock

# A name may change, seldom; a contract that left something unsaid may be a proxy without its code yet.
KEPT_S, KEPT_UNKNOWN_S = 86_400.0, 3_600.0
# Many requests at once ask the database once.
INDEX_S = 0.2
INDEX_BYTES = 1 << 20
# How often the index is read for an answer of one block.
TRIES = 4

NAME, SYMBOL, DECIMALS = (abi.call(signature) for signature in ("name()", "symbol()", "decimals()"))
_KIND = "token"
_read_token = msgspec.json.Decoder(TokenInfo).decode

T = TypeVar("T")


class PinnedBlock(NamedTuple):
    """A block, and what answers of it are kept under: the index's own block is in that by its hash, since another may come to
    stand at the same height."""

    block: int
    name: str


class TokenContracts:
    def __init__(
        self, multicall: Multicall, holdings: HoldingStore, kept: DataCache, *, follows: Callable[[str], bool]
    ) -> None:
        self._multicall = multicall
        # Whether somebody is to follow a network, by its id.
        self._follows = follows
        self._holdings = holdings
        self._kept = kept
        self._recent = DataCache(bytes=INDEX_BYTES)

    def __repr__(self) -> str:
        return f"<TokenContracts read by {self._multicall!r}>"

    async def at(self, network: Network) -> PinnedBlock:
        """The newest that the index and the chain both have. Unavailable without an index: an empty answer would be a lie."""

        async def look() -> tuple[int, str]:
            found = await self._indexed(network)
            return found.block, found.hash.hex()

        indexed, name = await self._recent.once(network.id, "index", "", make=look, ttl_s=INDEX_S)
        block = min(int(indexed), await self._multicall.tip(network))
        return PinnedBlock(block, f"{block}:{name}")

    async def at_one_block(self, network: Network, read: Callable[[], Awaitable[T]]) -> tuple[T, int]:
        """What is read of the index, by however many queries, and the block that all of it is of.

        A follower writes block by block, each with its cursor: where that has not moved, nothing else has. An index that
        catches up, or a chain faster than a large count, may move every time: then the block is the one it began at.
        """
        before, found = await self._indexed(network), await read()
        for _ in range(TRIES):
            after = await self._indexed(network)
            if after == before:
                break
            before, found = after, await read()
        return found, before.block

    async def _indexed(self, network: Network) -> IndexBlock:
        found = await self._holdings.as_of(network.id)
        if found is not None:
            return found
        if self._follows(network.id):
            raise Unavailable(f"the network {network.id} is not indexed yet: no follower has begun with it")
        raise NotFound(f"the network {network.id} is known, but nobody follows it: there is no index of holdings")

    async def known(self, network: Network, contracts: Sequence[bytes], block: int) -> dict[bytes, TokenInfo]:
        """Name, symbol and decimals of each: from memory, or all that are missing by one read."""
        kept = await self._kept.get(network.id, _KIND, [contract.hex() for contract in contracts], read=_read_token)
        found = {contract: token for contract, token in zip(contracts, kept, strict=True) if token is not None}
        missing = [contract for contract in contracts if contract not in found]
        if not missing:
            return found
        calls = [(contract, data) for contract in missing for data in (NAME, SYMBOL, DECIMALS)]
        read = await self._multicall.read(network, calls, block=block)
        new = {contract: token_of(contract, *read[3 * n : 3 * n + 3]) for n, contract in enumerate(missing)}
        await self._remember(network, new)
        return found | new

    async def _remember(self, network: Network, new: dict[bytes, TokenInfo]) -> None:
        for ttl_s, is_whole in ((KEPT_S, True), (KEPT_UNKNOWN_S, False)):
            values = {
                contract.hex(): token
                for contract, token in new.items()
                if (token.symbol is not None and token.decimals is not None) is is_whole
            }
            if values:
                await self._kept.put(network.id, _KIND, values, ttl_s=ttl_s)


def token_of(contract: bytes, name: bytes | None, symbol: bytes | None, decimals: bytes | None) -> TokenInfo:
    """What three answers of a contract mean."""
    places = abi.uint(decimals)
    return TokenInfo(
        address.checksum(contract),
        display_text.cleaned(abi.text(name), display_text.NAME),
        display_text.cleaned(abi.text(symbol), display_text.SYMBOL),
        places if places is not None and places <= units.MOST_DECIMALS else None,
    )


def about_a_block(network: Network) -> float:
    """How long an answer of the newest block is kept: long enough for a burst, short enough to be of now."""
    return min(max(network.facts.block_time_s, 1.0), 12.0)
