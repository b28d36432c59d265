"""Facts about tokens that are not in their contracts: prices, and logos from the operator's token lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal

import msgspec

from proxy.chains.families import family_of
from proxy.chains.registry import Network
from proxy.services.prices import PriceService


# A msgspec struct for speed, because a list has hundreds: see core/portfolio.
class KnownToken(msgspec.Struct, frozen=True, gc=False):
    usd: Decimal | None
    logo: str | None


class TokenPrices:
    """Logos are looked up by chain id and contract, as in token lists; EVM addresses are matched case-insensitively."""

    def __init__(self, prices: PriceService, logos: Mapping[tuple[int, str], str]) -> None:
        self._prices = prices
        self._logos = logos

    def __repr__(self) -> str:
        return f"<TokenPrices of {self._prices!r} and {len(self._logos)} logos>"

    async def known(self, network: Network, contracts: Sequence[str]) -> dict[str, KnownToken]:
        prices, logos = await self._prices.usd_many(network, contracts), self.logos(network, contracts)
        return {
            contract: KnownToken(None if (price := prices[contract]) is None else price.usd, logos.get(contract))
            for contract in contracts
        }

    async def coin(self, network: Network) -> Decimal | None:
        """The price of the network's native coin."""
        price = await self._prices.usd(network)
        return None if price is None else price.usd

    def logos(self, network: Network, contracts: Sequence[str]) -> dict[str, str]:
        """The logos, by contract, of those that have one."""
        family = family_of(network)
        chain_id = family.list_id(network.name, network.facts.chain_id)
        if chain_id is None:
            return {}
        names = ((contract, (chain_id, family.addresses.fold(contract))) for contract in contracts)
        return {contract: logo for contract, name in names if (logo := self._logos.get(name)) is not None}
