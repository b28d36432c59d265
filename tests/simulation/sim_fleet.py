"""Several gateways in one world: the Valkey that they share, and the troubles of a fleet.

A trouble is a cut between two parts, in one direction or both, or a fault of Valkey. They come one after the other.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tests.simulation.memory_network import CALM, Address, MemoryNetwork, Weather
from tests.simulation.oracle import Oracle
from tests.simulation.sim_valkey import SimValkey

VALKEY: Address = ("10.3.0.1", 6379)
TROUBLES = ("client cut", "upstream cut", "valkey clock", "valkey cut", "valkey deaf", "valkey hangs", "valkey restart")
# Hosts have announced themselves by then. A host that has never heard of another believes that it is alone.
BEGINS_S = 3.0
LASTS_S = (0.05, 4.0)
# Clients whose calls are held up for longer could not tell this from a call that is late.
CLIENT_CUT_S = 2.0


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """`skews_s`: how far the wall clock of each host is ahead. `weather`: of the connections to Valkey."""

    hosts: int = 1
    skews_s: tuple[float, ...] = (0.0,)
    troubles: tuple[str, ...] = ()
    weather: Weather = CALM

    def leaving_out(self, names: frozenset[str]) -> FleetPlan:
        return replace(self, troubles=tuple(each for each in self.troubles if f"trouble {each}" not in names))


class FleetTrouble:
    def __init__(
        self, plan: FleetPlan, valkey: SimValkey, network: MemoryNetwork, oracle: Oracle, rng: random.Random
    ) -> None:
        self._plan, self._valkey, self._network, self._oracle, self._rng = plan, valkey, network, oracle, rng

    def __repr__(self) -> str:
        return f"<FleetTrouble {self._plan.troubles}>"

    async def live(self, gateways: Sequence[str], upstreams: Sequence[Address], clients: Sequence[str]) -> None:
        rng = self._rng
        await asyncio.sleep(BEGINS_S)
        self._valkey.endures(self._plan.weather)
        if not self._plan.troubles:
            return
        while True:
            trouble, gateway = rng.choice(self._plan.troubles), rng.choice(gateways)
            lasts_s, pause_s = rng.uniform(*LASTS_S), rng.expovariate(1 / 1.5)
            upstream, client = rng.choice(upstreams), rng.choice(clients)
            if trouble == "upstream cut":
                await self._cut(trouble, gateway, upstream[0], lasts_s, partial(self._blame, upstream))
            elif trouble == "client cut":
                await self._cut(trouble, client, gateway, min(lasts_s, CLIENT_CUT_S))
            elif trouble == "valkey cut":
                await self._cut(trouble, gateway, VALKEY[0], lasts_s)
            elif trouble == "valkey deaf":
                one, other = (gateway, VALKEY[0]) if rng.random() < 0.5 else (VALKEY[0], gateway)
                await self._cut_one_way(trouble, one, other, lasts_s)
            else:
                await self._strike(trouble, lasts_s)
            await asyncio.sleep(pause_s)

    def _blame(self, upstream: Address) -> None:
        self._network.fault(upstream, "fleet", "upstream cut")

    async def _cut(
        self, trouble: str, one: str, other: str, lasts_s: float, note: Callable[[], None] | None = None
    ) -> None:
        self._network.history.fault("fleet", trouble, f"{one} and {other} for {lasts_s:.2f} s")
        self._network.cut(one, other)
        self._network.cut(other, one)
        if note is not None:
            note()
        await asyncio.sleep(lasts_s)
        self._network.mend(one, other)
        self._network.mend(other, one)
        if note is not None:
            note()
        self._network.history.note("fleet", f"{one} and {other} are no longer cut off")

    async def _cut_one_way(self, trouble: str, one: str, other: str, lasts_s: float) -> None:
        self._network.history.fault("fleet", trouble, f"from {one} to {other} for {lasts_s:.2f} s")
        self._network.cut(one, other)
        await asyncio.sleep(lasts_s)
        self._network.mend(one, other)
        self._network.history.note("fleet", f"{one} reaches {other} again")

    async def _strike(self, trouble: str, lasts_s: float) -> None:
        if trouble == "valkey hangs":
            self._valkey.hang()
            await asyncio.sleep(lasts_s)
            self._valkey.thaw()
            return
        # Tokens that were lent before count for nothing any more.
        self._oracle.tokens_forgotten()
        if trouble == "valkey restart":
            self._valkey.restart()
        else:
            self._valkey.set_clock(self._rng.choice((-30.0, -1.0, -0.3, 0.0, 0.3, 1.0, 30.0)))
