"""Filters (`eth_newFilter` and its kin) live in the upstream that made them; whoever polls one must be led back there.

The id that a caller gets says where: a tag that only we can make, for this key and this upstream, and the upstream's own id. So
any worker finds the way, also after a restart with other settings, and nobody polls another key's filter: ids of upstreams
that merely count are the same everywhere.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Any

import msgspec

from proxy.core import jsonrpc
from proxy.core.access import Key
from proxy.errors import Fault
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.waiters import Waiter, WholeResultWaiter
from proxy.wire.upstream import Upstream

if TYPE_CHECKING:
    from proxy.services.rpc.method_policy import MethodPolicy
    from proxy.services.rpc.networks import Route

# In hex digits: 64 bits, which nobody guesses within a rate limit.
_TAG = 16
NOT_FOUND = jsonrpc.error(-32000, "filter not found")


class FilterIds:
    def __init__(self, pepper: str) -> None:
        self._pepper = pepper.encode()

    def ask(self, caller: Any, route: Route, key: Key, policy: MethodPolicy, params: bytes, now: float) -> None:
        if policy.method.creates_filter:
            flight = Flight(route, policy, params, _Naming(self, caller, route, key), now)
            caller.flight = flight
            route.launch(flight, now)
            return
        found = self._read(params, route, key)
        if found is None:
            caller.on_error(NOT_FOUND)
            return
        upstream, own_id = found
        flight = Flight(route, policy, b'["0x%b"]' % own_id.encode(), caller, now)
        caller.flight = flight
        flight.tried = -1  # Every bit: nobody else knows the filter, also where this one cannot be reached.
        flight.send(upstream, now)

    def name(self, result: bytes, route: Route, key: Key, index: int) -> bytes:
        """The upstream's id with the way back in front of it; ValueError where it is none that `_read` would take."""
        own_id = msgspec.json.decode(result, type=str).removeprefix("0x")
        if not own_id.isalnum() or not own_id.isascii():
            raise ValueError("not a filter's id")
        return b'"0x%b%b"' % (self._tag(route.upstreams[index], key, own_id).encode(), own_id.encode())

    def _read(self, params: bytes, route: Route, key: Key) -> tuple[Upstream, str] | None:
        try:
            (text,) = msgspec.json.decode(params, type=list[str])
        except (msgspec.DecodeError, ValueError):
            return None
        tag, own_id = text[2 : 2 + _TAG], text[2 + _TAG :]
        if not own_id.isalnum() or not text.isascii():
            return None
        for upstream in route.upstreams:
            if hmac.compare_digest(tag, self._tag(upstream, key, own_id)):
                return upstream, own_id
        return None

    def _tag(self, upstream: Upstream, key: Key, own_id: str) -> str:
        """The upstream's mark is of its network and its address: it stays where its place among the others changes."""
        text = f"{upstream.health.mark} {key.lineage} {own_id}".encode()
        return hmac.digest(self._pepper, text, "sha256").hex()[:_TAG]


class _Naming(WholeResultWaiter):
    """Between the upstream and the asker: writes the way back into the new filter's id."""

    def __init__(self, filters: FilterIds, caller: Waiter, route: Route, key: Key) -> None:
        self._filters = filters
        self._caller = caller
        self._route = route
        self._key = key

    def on_result(self, result: bytes | msgspec.Raw) -> None:
        flight: Flight = self._caller.flight  # type: ignore[attr-defined]
        try:
            named = self._filters.name(bytes(result), self._route, self._key, flight.answered_by)
        except (msgspec.DecodeError, ValueError):
            self._caller.on_result(result)
            return
        self._caller.on_result(named)

    def on_error(self, error: bytes) -> None:
        self._caller.on_error(error)

    def on_fault(self, fault: Fault) -> None:
        self._caller.on_fault(fault)
