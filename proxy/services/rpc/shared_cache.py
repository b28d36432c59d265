"""The second place to look for an answer: what another worker or host has kept of this network.

Only answers that can never change stand there, so only calls that may have one are looked for. The chain's first block is in
every name: one that was started anew under the same name, as development chains are, finds nothing of the old one's.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from proxy.services.rpc.flights import Flight
from proxy.tasks import Tasks

if TYPE_CHECKING:
    from proxy.services.rpc.networks import Route
    from proxy.store.cache import SharedReplies

# Looks under way: beyond that the upstreams are asked straight away.
MOST_AT_ONCE = 256
_serial = itertools.count(1)


class SharedCache:
    def __init__(self, route: Route, store: SharedReplies, tasks: Tasks) -> None:
        self._route = route
        self._store = store
        self._tasks = tasks
        self._open = 0
        # What tells this chain from all others; empty while it is not known, and then nothing is looked for.
        self.chain = ""

    def __repr__(self) -> str:
        return f"<SharedCache {self._route.network.id} {self.chain or 'unknown'}, {self._open} looks>"

    def take(self, flights: Sequence[Flight], now: float) -> Sequence[Flight]:
        """Look for those that may be there; the others are given back, to be launched at once."""
        if not self.chain or self._open >= MOST_AT_ONCE or not self._store.is_available(now):
            return flights
        wanted = [flight for flight in flights if flight.slot is not None and self._may_be_final(flight)]
        if not wanted:
            return flights
        self._open += 1
        self._tasks.start(f"shelf {next(_serial)}", lambda: self._look(wanted))
        return [flight for flight in flights if flight not in wanted]

    def _may_be_final(self, flight: Flight) -> bool:
        method = flight.policy.method
        if method.cache in ("static", "hash"):
            return True
        if method.cache != "block":
            return False
        ref = flight.policy.family.block_ref(method, flight.params)
        return ref.kind == "hash" or ref.tag == "earliest" or 0 <= ref.number <= self._route.heads.final

    async def _look(self, flights: Sequence[Flight]) -> None:
        try:
            found = await self._store.get([self._name(flight.slot) for flight in flights])
        finally:
            self._open -= 1
        missed = []
        for flight, result in zip(flights, found, strict=True):
            if flight.done:
                continue  # Nobody waits any more.
            if result is None:
                missed.append(flight)
            else:
                self._land(flight, result)
        now = time.monotonic()
        if len(missed) == 1:
            self._route.launch(missed[0], now)
        elif missed:
            self._route.launch_many(missed, now)

    def _land(self, flight: Flight, result: bytes) -> None:
        assert flight.slot is not None
        self._route.replies.put(flight.slot, result, "forever")
        self._route.landed(flight)
        flight.slot = None  # It is kept already.
        waiter: Any
        for waiter in flight.waiters:
            if getattr(waiter, "cache", "") == "miss":
                waiter.cache = "hit"
        flight.land(result)

    def put(self, slot: bytes, result: bytes) -> None:
        if self.chain:
            self._store.put(self._name(slot), result)

    def _name(self, slot: bytes | None) -> str:
        assert slot is not None
        return f"{self._route.network.id}:{self.chain}:{slot.hex()}"
