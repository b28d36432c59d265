"""Filters (`eth_newFilter` and similar) exist only in the upstream that created them, so polls must go to that upstream.

The id that a caller receives identifies it: a tag that only this service can compute, for this key and this upstream, followed
by the upstream's own id. Any worker can route a poll, also after a restart with other settings. A key cannot poll the filter of
another key, although the ids of upstreams that merely count are the same everywhere.
"""

from __future__ import annotations

import hmac

import msgspec

from proxy.core import jsonrpc
from proxy.core.access import Key
from proxy.errors import Fault
from proxy.services.rpc.flights import Caller
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.networks import Route
from proxy.services.rpc.waiters import WholeResultWaiter
from proxy.wire.upstream import Upstream

# In hex digits: 64 bits cannot be guessed within a rate limit.
_TAG = 16
NOT_FOUND = jsonrpc.error(-32000, "filter not found")


class FilterIds:
    def __init__(self, pepper: str) -> None:
        self._pepper = pepper.encode()

    def forward(self, caller: Caller, route: Route, key: Key, policy: MethodPolicy, params: bytes, now: float) -> None:
        dispatcher = route.dispatcher
        if policy.method.creates_filter:
            caller.flight = flight = dispatcher.new_flight(policy, params, _TagWriter(self, caller, key), now)
            flight.client = key.account.id
            dispatcher.launch(flight, now)
            return
        found = self._read(params, route, key)
        if found is None:
            caller.on_error(NOT_FOUND)
            return
        upstream, own_id = found
        caller.flight = flight = dispatcher.new_flight(policy, b'["0x%b"]' % own_id.encode(), caller, now)
        flight.client = key.account.id
        flight.tried = -1  # All bits are set: no other upstream has the filter, even if this one cannot be reached.
        dispatcher.send(flight, upstream, now)

    def tagged(self, result: bytes, key: Key, upstream: Upstream) -> bytes:
        """The upstream's id with the tag before it. Raises ValueError if `_read` would not accept the id."""
        own_id = msgspec.json.decode(result, type=str).removeprefix("0x")
        if not own_id.isalnum() or not own_id.isascii():
            raise ValueError("not a filter's id")
        return b'"0x%b%b"' % (self._tag(upstream, key, own_id).encode(), own_id.encode())

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
        """The upstream's mark is a digest of its network and address, so it does not change with the upstream's index."""
        text = f"{upstream.health.mark} {key.lineage} {own_id}".encode()
        return hmac.digest(self._pepper, text, "sha256").hex()[:_TAG]


class _TagWriter(WholeResultWaiter):
    """Adds the tag to the id of a new filter before the caller receives it."""

    def __init__(self, filters: FilterIds, caller: Caller, key: Key) -> None:
        self._filters = filters
        self._caller = caller
        self._key = key

    def on_result(self, result: bytes | msgspec.Raw) -> None:
        flight = self._caller.flight
        assert flight is not None
        assert flight.answered_by is not None
        try:
            tagged = self._filters.tagged(bytes(result), self._key, flight.answered_by)
        except (msgspec.DecodeError, ValueError):
            self._caller.on_result(result)
            return
        self._caller.on_result(tagged)

    def on_error(self, error: bytes) -> None:
        self._caller.on_error(error)

    def on_fault(self, fault: Fault) -> None:
        self._caller.on_fault(fault)
