"""ERC-20 balances and metadata: the index lists the contracts whose tokens a holder has received, and the contracts report the
amounts.

Amounts are never taken from the index: a token may pay interest without an event. All are read at one block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proxy.chains.evm import abi, address
from proxy.chains.registry import Network
from proxy.core import portfolio
from proxy.core.portfolio import Balances, Holding, TokenList
from proxy.errors import NotFound
from proxy.services.multicall import Multicall
from proxy.services.tokens.token_contracts import DECIMALS, NAME, SYMBOL, TokenContracts, about_a_block, token_of
from proxy.services.tokens.token_prices import TokenPrices
from proxy.store.postgres.holdings import HoldingStore
from proxy.store.valkey.cache import DataCache
from proxy.turn_queue import in_turns, next_turn

# The maximum number of contracts queried for one holder; with more, the reply is marked as truncated. A holder with more was
# sent most of them unsolicited.
MOST_CONTRACTS = 10_000
# Tokens that are described together: the names of as many contracts are read in one call.
PER_STEP = 500
_SUPPLY = abi.call("totalSupply()")
# The balance of an arbitrary address: a contract that returns one is a token, even if it has no name, symbol or supply.
_PROBE = abi.call("balanceOf(address)", (1).to_bytes(20, "big"))


@dataclass(frozen=True, slots=True, repr=False)
class EvmTokens:
    contracts: TokenContracts
    multicall: Multicall
    holdings: HoldingStore
    cache: DataCache
    prices: TokenPrices

    def __repr__(self) -> str:
        return f"<EvmTokens of {self.contracts!r}>"

    async def balances(self, network: Network, holder: bytes) -> Balances:
        """All tokens of a holder, in the order of the API spec, and the block at which they were read."""
        block, block_name = await self.contracts.newest_block(network)

        async def read() -> dict[str, Any]:
            return {**await self._read_balances(network, holder, block), "as_of_block": block}

        # The block is part of the cache key, so that a cached list is never older than the index.
        name = f"{holder.hex()}@{block_name}"
        keep_s = about_a_block(network)
        balances: Balances = await self.cache.once(
            network.id, "balances", name, make=read, ttl_s=keep_s, read=portfolio.read_balances
        )
        # Reading a list of thousands is a step of its own.
        await next_turn()
        return balances

    async def _read_balances(self, network: Network, holder: bytes, block: int) -> dict[str, Any]:
        contracts = await self.holdings.tokens_of(network.id, holder, limit=MOST_CONTRACTS + 1)
        candidates = contracts[:MOST_CONTRACTS]
        data = abi.call("balanceOf(address)", holder)
        replies = await self.multicall.read(network, [(each, data) for each in candidates], block=block)
        tokens = TokenList()
        for start in range(0, len(candidates), PER_STEP):
            part = zip(candidates[start : start + PER_STEP], replies[start : start + PER_STEP], strict=True)
            held = {contract: raw for contract, reply in part if (raw := abi.uint(reply))}
            tokens.add(await self._described(network, held, block))
            await next_turn()
        items = await in_turns(tokens.items(), portfolio.encoded)
        del tokens
        await next_turn()
        return {"tokens": items, "truncated": len(contracts) > len(candidates)}

    async def _described(self, network: Network, held: Mapping[bytes, int], block: int) -> list[Holding]:
        tokens = await self.contracts.known(network, [*held], block)
        await next_turn()
        prices = await self.prices.known(network, [token.contract for token in tokens.values()])
        return [
            Holding(token, held[contract], (known := prices[token.contract]).usd, known.logo)
            for contract, token in tokens.items()
        ]

    async def metadata(self, network: Network, contract: bytes) -> dict[str, Any]:
        """A token's name, symbol, decimals and supply from its contract, with its price and logo."""

        async def read() -> dict[str, Any]:
            block = await self.multicall.tip(network)
            calls = [(contract, data) for data in (NAME, SYMBOL, DECIMALS, _SUPPLY, _PROBE)]
            replies = await self.multicall.read(network, calls, block=block)
            if not any(replies):
                raise NotFound(f"there is no token contract at {address.checksum(contract)} on {network.id}")
            token, supply = token_of(contract, *replies[:3]), abi.uint(replies[3])
            known = (await self.prices.known(network, [token.contract]))[token.contract]
            return {**portfolio.described(token, supply, known.usd, known.logo), "as_of_block": block}

        name, keep_s = contract.hex(), about_a_block(network)
        metadata: dict[str, Any] = await self.cache.once(network.id, "metadata", name, make=read, ttl_s=keep_s)
        return metadata
