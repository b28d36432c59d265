"""What is known of tokens beside what their contracts say: prices, and logos from the operator's token lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from proxy.chains.registry import Network
from proxy.chains.svm.address import LIST_IDS
from proxy.services.prices import Prices


@dataclass(frozen=True, slots=True)
class Known:
    usd: Decimal | None
    logo: str | None


class Market:
    """Logos are found by chain id and contract, as token lists have them; the case of an EVM address does not matter."""

    def __init__(self, prices: Prices, logos: Mapping[tuple[int, str], str]) -> None:
        self._prices = prices
        self._logos = logos

    def __repr__(self) -> str:
        return f"<Market of {self._prices!r} and {len(self._logos)} logos>"

    async def known(self, network: Network, contracts: Sequence[str]) -> dict[str, Known]:
        prices = await self._prices.usd_many(network, contracts)
        return {
            contract: Known(None if (price := prices[contract]) is None else price.usd, self._logo(network, contract))
            for contract in contracts
        }

    async def coin(self, network: Network) -> Decimal | None:
        """The price of the network's own coin."""
        price = await self._prices.usd(network)
        return None if price is None else price.usd

    def _logo(self, network: Network, contract: str) -> str | None:
        if network.family == "evm":
            chain_id, contract = network.facts.chain_id, contract.lower()
        else:
            chain_id = LIST_IDS.get(network.name)
        return None if chain_id is None else self._logos.get((chain_id, contract))
