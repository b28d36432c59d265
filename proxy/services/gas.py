"""Gas prices of networks, from memory.

An estimate is good until the head moves: whoever asks first after that has it made anew, and all others that ask meanwhile wait
for the same. It is computed from the block that the workers of a host agree is the newest, so all of them say the same. While a
chain cannot be asked the last good estimate stands for a minute, with the time that it is of.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from proxy.chains.families import family_of
from proxy.chains.registry import Network
from proxy.core import fees
from proxy.core.fees import Fees
from proxy.errors import Fault, NotFound, Unavailable
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.rpc.networks import Route

# For so long an estimate is answered while its chain cannot be asked.
STALE_S = 60.0
# Made anew after this time although the head has not moved: it may have been replaced.
RENEW_S = 10.0
# How long an answer may take; and after a failure, how long the last good estimate is answered without asking again.
ANSWER_S = 3.0
PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class GasReading:
    """`at` is when it was made, in seconds since 1970."""

    fees: Fees
    at: float


@dataclass(slots=True)
class _CachedReading:
    reading: GasReading
    tip: int
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
        self._kept: dict[str, _CachedReading] = {}
        self._paused_until: dict[str, float] = {}
        self._flights: dict[str, asyncio.Future[None]] = {}

    def __repr__(self) -> str:
        return f"<GasPrices of {', '.join(self._kept) or 'nothing yet'}>"

    async def read(self, network: Network) -> GasReading:
        """NotFound for a chain that has no such prices, Unavailable where none is known that is young enough."""
        if "gas_prices" not in family_of(network).features:
            raise NotFound(f"there are no gas prices on {network.id}: its fees are not per unit of gas")
        route = self._internal_calls.route(network)
        while (kept := self._good(route)) is None:
            flight = self._flights.get(network.id)
            if flight is None:
                return await self._renew(network, route)
            await asyncio.wait((flight,))
        return kept.reading

    def _good(self, route: Route) -> _CachedReading | None:
        """What can be answered at once."""
        kept, now = self._kept.get(route.network.id), self._clock()
        if kept is None or now - kept.made_at > STALE_S:
            return None
        is_true = kept.tip == route.heads.tip and now - kept.made_at < RENEW_S
        return kept if is_true or now < self._paused_until.get(route.network.id, 0.0) else None

    async def _renew(self, network: Network, route: Route) -> GasReading:
        name = network.id
        flight = self._flights[name] = asyncio.get_running_loop().create_future()
        tip = route.heads.tip
        try:
            async with asyncio.timeout(ANSWER_S):
                found = await self._ask(network, tip)
            reading = GasReading(found, self._wall())
            self._kept[name] = _CachedReading(reading, tip, self._clock())
            return reading
        except (Fault, RpcError, ValueError, TimeoutError) as exc:
            self._paused_until[name] = self._clock() + PAUSE_S
            if (kept := self._good(route)) is not None:
                return kept.reading
            raise Unavailable(f"{name} does not tell its gas prices at the moment; try again shortly") from exc
        finally:
            del self._flights[name]
            flight.set_result(None)

    async def _ask(self, network: Network, tip: int) -> Fees:
        facts = network.facts
        common: dict[str, Any] = {
            "floor_wei": fees.wei_of(facts.min_priority_gwei),
            "block_time_s": facts.block_time_s,
        }
        if facts.legacy_fees:
            price = await self._internal_calls.call(network, "eth_gasPrice")
            return fees.of_gas_price(_number(price), tip or await self._tip(network), **common)
        block = hex(tip) if tip else "latest"
        history = await self._internal_calls.call(
            network, "eth_feeHistory", hex(fees.HISTORY_BLOCKS), block, list(fees.PERCENTILES)
        )
        return fees.of_history(history, **common)

    async def _tip(self, network: Network) -> int:
        return _number(await self._internal_calls.call(network, "eth_blockNumber"))


def _number(value: Any) -> int:
    if not isinstance(value, str):
        raise ValueError("no number")
    return int(value, 16)
