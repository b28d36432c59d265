"""Prices that sponsorship is decided by: the native coin in dollars, and the current gas price."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import Protocol

from proxy.chains.evm import policy
from proxy.chains.evm.fees import Fees
from proxy.chains.registry import Network
from proxy.core.units import EXACT
from proxy.errors import Unavailable


class NativePrice(Protocol):
    @property
    def usd(self) -> Decimal: ...


class NativePriceSource(Protocol):
    async def usd(self, network: Network, contract: str | None = None) -> NativePrice | None:
        """The price of a token, or of the network's native coin if no contract is given."""
        ...


class GasPriceReading(Protocol):
    @property
    def fees(self) -> Fees: ...


class GasPriceSource(Protocol):
    async def read(self, network: Network) -> GasPriceReading: ...


@dataclass(frozen=True, slots=True)
class SponsorCosts:
    """Raises Unavailable while a price is unknown."""

    coins: NativePriceSource
    gas: GasPriceSource

    async def coin(self, network: Network) -> int:
        """Pico-dollars for one whole coin, rounded up."""
        price = await self.coins.usd(network)
        if price is None or price.usd <= 0:
            raise Unavailable(f"the price of {network.chain.native.symbol} is currently unknown; try again shortly")
        return int(EXACT.scaleb(price.usd, policy.DECIMALS).to_integral_value(ROUND_CEILING))

    async def fast_wei(self, network: Network) -> int:
        """The maximum fee per unit of gas of the "fast" estimate."""
        reading = await self.gas.read(network)
        return reading.fees.estimates["fast"].max_fee_wei
