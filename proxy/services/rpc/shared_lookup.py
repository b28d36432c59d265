"""Looking for replies in the shared cache before calls are sent to upstreams."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from proxy.services.rpc.dispatcher import Dispatcher
from proxy.services.rpc.flights import Caller, Flight
from proxy.services.rpc.shared_cache import SharedCache
from proxy.services.rpc.upstream_batch import launch_all

# Lookups in flight. Above this, calls go to upstreams at once.
MAX_LOOKUPS = 256


class SharedLookup:
    def __init__(self, dispatcher: Dispatcher, cache: SharedCache) -> None:
        self._dispatcher = dispatcher
        self._cache = cache
        self._open = 0

    def __repr__(self) -> str:
        return f"<SharedLookup {self._cache!r}, {self._open} open>"

    def take(self, flights: Sequence[Flight], now: float) -> Sequence[Flight]:
        """Look up the flights whose results may be cached. Returns the others, to be launched at once."""
        if self._open >= MAX_LOOKUPS or not self._cache.is_available(now):
            return flights
        wanted = [flight for flight in flights if flight.call.cache_key is not None and self._may_be_final(flight)]
        if not wanted:
            return flights
        self._open += 1
        cache_keys = [flight.call.cache_key for flight in wanted if flight.call.cache_key is not None]
        self._cache.look(cache_keys, partial(self._on_found, wanted, self._dispatcher.state.reorgs))
        return [flight for flight in flights if flight not in wanted]

    def _may_be_final(self, flight: Flight) -> bool:
        method = flight.policy.method
        if method.cache in ("static", "hash"):
            return True
        if method.cache != "block":
            return False
        ref = flight.policy.family.block_ref(method, flight.params)
        return ref.kind == "hash" or ref.tag == "earliest" or 0 <= ref.number <= self._dispatcher.state.heads.final

    def _on_found(self, flights: Sequence[Flight], reorgs: int, results: Sequence[bytes | None]) -> None:
        """`reorgs`: as it was when the lookup began. A result from before a reorganisation may be wrong."""
        self._open -= 1
        is_current = reorgs == self._dispatcher.state.reorgs
        missed = []
        for flight, result in zip(flights, results, strict=True):
            if flight.done:
                continue  # Its waiters have left.
            if result is None or not is_current:
                missed.append(flight)
            else:
                self._complete(flight, result)
        now = time.monotonic()
        if len(missed) == 1:
            self._dispatcher.launch(missed[0], now)
        elif missed:
            launch_all(self._dispatcher, missed, now)

    def _complete(self, flight: Flight, result: bytes) -> None:
        assert flight.call.cache_key is not None
        self._dispatcher.state.replies.put(flight.call.cache_key, result, "forever", flight.client)
        for waiter in flight.waiters:
            if getattr(waiter, "cache", "") == "miss":
                caller: Caller = waiter  # type: ignore[assignment]
                caller.on_source("hit", flight.block)
        self._dispatcher.complete_cached(flight, result)
