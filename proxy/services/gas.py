"""Gas price estimates, cached per network.

An estimate is valid until the head moves or a block is replaced. The first request after that renews it, and concurrent
requests wait for the same result. It is computed from the block that the workers of a host agree is the newest, so all
workers return the same prices. While the chain cannot be read, the last good estimate is served for up to a minute, with
its original time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from proxy.chains.evm import fees
from proxy.chains.evm.fees import Fees
from proxy.chains.families import family_of
from proxy.chains.registry import Network
from proxy.errors import Fault, NotFound, Unavailable
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.rpc.networks import Route

# The oldest estimate served while the chain cannot be read.
STALE_S = 60.0
# An estimate is renewed after this time even if the head has not moved.
RENEW_S = 10.0
# The time limit for reading prices.
READ_S = 3.0
# After a failure, the last good estimate is served this long before the next attempt.
PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class GasReading:
    """`at`: the time of the estimate, in seconds since 1970."""

    fees: Fees
    at: float


@dataclass(slots=True)
class _CachedReading:
    """`head`: the tip, and how often blocks had been replaced."""

    reading: GasReading
    head: tuple[int, int]
    made_at: float


class GasPrices:
    def __init__(
        self,
        internal_calls: InternalCalls,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._internal_calls = internal_calls
        self._clock = clock
        self._wall = wall
        self._cached: dict[str, _CachedReading] = {}
        self._paused_until: dict[str, float] = {}
        self._flights: dict[str, asyncio.Future[None]] = {}

    def __repr__(self) -> str:
        return f"<GasPrices of {', '.join(self._cached) or 'nothing yet'}>"

    async def read(self, network: Network) -> GasReading:
        """Raises NotFound for a chain without gas prices, Unavailable if no recent estimate exists."""
        if "gas_prices" not in family_of(network).features:
            raise NotFound(f"{network.id} has no gas prices: its fees are not per unit of gas")
        route = self._internal_calls.route(network)
        while (cached := self._usable(route)) is None:
            flight = self._flights.get(network.id)
            if flight is None:
                return await self._renew(network, route)
            await asyncio.wait((flight,))
        return cached.reading

    def _usable(self, route: Route) -> _CachedReading | None:
        """The cached estimate, if it may be served without a renewal."""
        cached, now = self._cached.get(route.network.id), self._clock()
        if cached is None or now - cached.made_at > STALE_S:
            return None
        is_current = cached.head == _head_of(route) and now - cached.made_at < RENEW_S
        return cached if is_current or now < self._paused_until.get(route.network.id, 0.0) else None

    async def _renew(self, network: Network, route: Route) -> GasReading:
        name = network.id
        flight = self._flights[name] = asyncio.get_running_loop().create_future()
        head = _head_of(route)
        try:
            async with asyncio.timeout(READ_S):
                current = await self._fees(network, head[0])
            reading = GasReading(current, self._wall())
            self._cached[name] = _CachedReading(reading, head, self._clock())
            return reading
        except (Fault, RpcError, ValueError, TimeoutError) as exc:
            self._paused_until[name] = self._clock() + PAUSE_S
            if (cached := self._usable(route)) is not None:
                return cached.reading
            raise Unavailable(f"the gas prices of {name} cannot be read at the moment; try again shortly") from exc
        finally:
            del self._flights[name]
            flight.set_result(None)

    async def _fees(self, network: Network, tip: int) -> Fees:
        facts = network.facts
        common: dict[str, Any] = {
            "floor_wei": fees.wei_of(facts.min_priority_gwei),
            "block_time_s": facts.block_time_s,
        }
        if facts.legacy_fees:
            price = await self._internal_calls.quantity(network, "eth_gasPrice", is_shared=True)
            return fees.of_gas_price(price, tip or await self._tip(network), **common)
        block = hex(tip) if tip else "latest"
        history = await self._internal_calls.call(
            network, "eth_feeHistory", hex(fees.HISTORY_BLOCKS), block, list(fees.PERCENTILES), is_shared=True
        )
        return fees.of_history(history, **common)

    async def _tip(self, network: Network) -> int:
        return await self._internal_calls.quantity(network, "eth_blockNumber", is_shared=True)


def _head_of(route: Route) -> tuple[int, int]:
    return route.heads.tip, route.state.reorgs
