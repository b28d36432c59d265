"""Filters (`eth_newFilter` and similar) exist only in the upstream that created them, so polls must go to that upstream.

The id that a caller receives identifies it: a tag that only this service can compute, for this key and this upstream, followed
by the upstream's own id and the packed params of the filter. Any worker can route a poll, also after a restart with other
settings. A key cannot poll the filter of another key, although the ids of upstreams that merely count are the same everywhere.
The params are needed where an upstream refuses to return all logs of a filter at once, or does not have the last blocks: the
logs are then read as `eth_getLogs`, which is split and sent to any upstream.

The tokens of pages (`Method.page_token`) are treated alike: `TAG.TOKEN`, where TOKEN is the upstream's own.
"""

from __future__ import annotations

import hmac
import time
import zlib

import msgspec

from proxy.chains.family import PageToken
from proxy.chains.lookups import text_of, value_at, with_value
from proxy.core import jsonrpc, upstream_errors
from proxy.core.access import Key
from proxy.core.directives import Directives
from proxy.errors import Fault
from proxy.services.accounts.metering import Meters
from proxy.services.rpc.flights import Call, Caller, all_but
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.networks import Route
from proxy.services.rpc.waiters import Waiter, WholeResultWaiter
from proxy.wire.upstream import Upstream

# In hex digits: 64 bits cannot be guessed within a rate limit.
_TAG = 16
# Longer params do not become part of the id: the filter works, but its logs are not split. Their size is checked before they
# are packed, which takes 0.1 ms for this much and would take 50 ms for the largest body.
_MOST_PACKED_BYTES = 8192
_MOST_DIGITS = 2048
# The params of a poll: an id, which has up to 256 digits more than the params in it.
_MOST_ID_BYTES = 4096
# Appended to the text that is signed if the id contains params, so that ids with and without params have different tags. No id
# contains a space.
_WITH_PARAMS = " with params"
NOT_FOUND = jsonrpc.error(-32000, "filter not found")
# Tokens of nodes have some dozens of characters.
_MOST_TOKEN = 1024
_UNKNOWN_PAGE = "the token is not one of this key, or its upstream is gone: read from the first page again"


class FilterIds:
    def __init__(self, pepper: str, meters: Meters | None = None) -> None:
        """`meters`: charge clients for the second call that a poll may need."""
        self._pepper = pepper.encode()
        self._meters = meters

    def forward(
        self,
        caller: Caller,
        route: Route,
        key: Key,
        policy: MethodPolicy,
        params: bytes,
        now: float,
        *,
        directives: Directives | None = None,
    ) -> None:
        dispatcher = route.dispatcher
        if policy.method.page_token is not None:
            self._forward_page((caller, policy, params), policy.method.page_token, route, key, now, directives)
            return
        if policy.method.creates_filter:
            call = Call(policy, params, client=key.account.id, payer=key, directives=directives)
            flight = dispatcher.new_flight(call, _TagWriter(self, caller, key, params), now)
            caller.on_flight(flight)
            dispatcher.launch(flight, now)
            return
        filter_ = self._read(params, route, key)
        if filter_ is None:
            caller.on_error(NOT_FOUND)
            return
        upstream, own_id, asked = filter_
        same = route.policies.get(policy.method.same_as)
        waiter: Waiter = caller
        if same is not None and asked:
            waiter = _LogsPoll(caller, route, same, asked, upstream, payer=key, meters=self._meters)
        call = Call(
            policy,
            b'["0x%b"]' % own_id.encode(),
            client=key.account.id,
            payer=key,
            directives=directives,
            # No other upstream has the filter, even if this one cannot be reached.
            excluded=all_but(upstream),
        )
        flight = dispatcher.new_flight(call, waiter, now)
        caller.on_flight(flight)
        dispatcher.send(flight, upstream, now)

    def _forward_page(
        self,
        asked: tuple[Caller, MethodPolicy, bytes],
        token: PageToken,
        route: Route,
        key: Key,
        now: float,
        directives: Directives | None,
    ) -> None:
        """The first page may come from any upstream, and the next ones from the same."""
        caller, policy, params = asked
        place = next((path for path in token.params if text_of(value_at(params, path))), "")
        upstream: Upstream | None = None
        if place:
            tag, _, own = text_of(value_at(params, place)).partition(".")
            if (upstream := self._giver(tag, own, route, key)) is None:
                caller.on_error(jsonrpc.error(token.code, _UNKNOWN_PAGE))
                return
            params = with_value(params, place, msgspec.json.encode(own))
        excluded = 0 if upstream is None else all_but(upstream)
        call = Call(policy, params, client=key.account.id, payer=key, directives=directives, excluded=excluded)
        flight = route.dispatcher.new_flight(call, _PageTagger(self, caller, key, token.result), now)
        caller.on_flight(flight)
        if upstream is None:
            route.dispatcher.launch(flight, now)
        else:
            route.dispatcher.send(flight, upstream, now)

    def _giver(self, tag: str, token: str, route: Route, key: Key) -> Upstream | None:
        """The upstream that gave this token to this key."""
        if not token or len(token) > _MOST_TOKEN or not tag.isascii():
            return None
        givers = [each for each in route.upstreams if hmac.compare_digest(tag, self._tag(each, key, token))]
        return givers[0] if givers else None

    def with_token(self, result: bytes, path: str, key: Key, upstream: Upstream) -> bytes:
        """The result with a tag before the token of its next page, if it has one."""
        token = text_of(value_at(result, path))
        if not token:
            return result
        return with_value(result, path, msgspec.json.encode(f"{self._tag(upstream, key, token)}.{token}"))

    def tagged(self, result: bytes, key: Key, upstream: Upstream, params: bytes) -> bytes:
        """The upstream's id with the tag before it. Raises ValueError if `_read` would not accept the id."""
        own_id = msgspec.json.decode(result, type=str).removeprefix("0x")
        if not own_id.isalnum() or not own_id.isascii():
            raise ValueError("not a filter's id")
        packed = zlib.compress(params).hex() if len(b"[]") < len(params) <= _MOST_PACKED_BYTES else ""
        if not packed or len(packed) > _MOST_DIGITS or len(own_id) > 0xFF:
            return b'"0x%b%b"' % (self._tag(upstream, key, own_id).encode(), own_id.encode())
        rest = f"{len(own_id):02x}{own_id}{packed}"
        return b'"0x%b%b"' % (self._tag(upstream, key, rest + _WITH_PARAMS).encode(), rest.encode())

    def _read(self, params: bytes, route: Route, key: Key) -> tuple[Upstream, str, bytes] | None:
        """The filter's upstream, its id there and, if the id carries them, its params."""
        if len(params) > _MOST_ID_BYTES:
            return None
        try:
            (text,) = msgspec.json.decode(params, type=list[str])
        except (msgspec.DecodeError, ValueError):
            return None
        tag, rest = text[2 : 2 + _TAG], text[2 + _TAG :]
        if not rest.isalnum() or not text.isascii():
            return None
        for upstream in route.upstreams:
            if hmac.compare_digest(tag, self._tag(upstream, key, rest + _WITH_PARAMS)):
                end = 2 + int(rest[:2], 16)
                return upstream, rest[2:end], zlib.decompress(bytes.fromhex(rest[end:]))
            if hmac.compare_digest(tag, self._tag(upstream, key, rest)):
                return upstream, rest, b""
        return None

    def _tag(self, upstream: Upstream, key: Key, text: str) -> str:
        """The upstream's id is a digest of its network and address, so it does not change with the upstream's index. A key
        whose contracts have changed cannot poll the filters that it has created for others."""
        limits = key.restrictions
        contracts = "" if limits is None else "".join(sorted(limits.uses.contracts))
        signed = f"{upstream.health.upstream_id} {key.lineage}{contracts} {text}".encode()
        return hmac.digest(self._pepper, signed, "sha256").hex()[:_TAG]


class _TagWriter(WholeResultWaiter):
    """Adds the tag to the id of a new filter before the caller receives it."""

    def __init__(self, filters: FilterIds, caller: Caller, key: Key, params: bytes) -> None:
        self._filters = filters
        self._caller = caller
        self._key = key
        self._params = params

    def on_result(self, result: bytes | msgspec.Raw) -> None:
        flight = self._caller.flight
        assert flight is not None
        assert flight.answered_by is not None
        try:
            tagged = self._filters.tagged(bytes(result), self._key, flight.answered_by, self._params)
        except (msgspec.DecodeError, ValueError):
            self._caller.on_result(result)
            return
        self._caller.on_result(tagged)

    def on_error(self, error: bytes) -> None:
        self._caller.on_error(error)

    def on_fault(self, fault: Fault) -> None:
        self._caller.on_fault(fault)


class _PageTagger(WholeResultWaiter):
    """Adds the tag to the token of the next page before the caller receives it."""

    def __init__(self, filters: FilterIds, caller: Caller, key: Key, path: str) -> None:
        self._filters = filters
        self._caller = caller
        self._key = key
        self._path = path

    def on_result(self, result: bytes | msgspec.Raw) -> None:
        flight = self._caller.flight
        assert flight is not None
        assert flight.answered_by is not None
        self._caller.on_result(self._filters.with_token(bytes(result), self._path, self._key, flight.answered_by))

    def on_error(self, error: bytes) -> None:
        self._caller.on_error(error)

    def on_fault(self, fault: Fault) -> None:
        self._caller.on_fault(fault)


class _LogsPoll(WholeResultWaiter):
    """Reads the logs of a filter with an ordinary call if its upstream refuses to return that many at once, or may not have the
    last blocks."""

    def __init__(
        self,
        caller: Caller,
        route: Route,
        same: MethodPolicy,
        params: bytes,
        upstream: Upstream,
        *,
        payer: Key,
        meters: Meters | None,
    ) -> None:
        self._caller = caller
        self._payer = payer
        self._meters = meters
        self._route = route
        self._same = same
        self._params = params
        self._upstream = upstream

    def on_result(self, result: bytes | msgspec.Raw) -> None:
        if self._may_lack_blocks():
            self._read_logs()
        else:
            self._caller.on_result(result)

    def on_error(self, error: bytes) -> None:
        if upstream_errors.classify(error).kind in ("range_too_large", "missing_data"):
            self._read_logs()
        else:
            self._caller.on_error(error)

    def on_fault(self, fault: Fault) -> None:
        self._caller.on_fault(fault)

    def _may_lack_blocks(self) -> bool:
        heads, health = self._route.heads, self._upstream.health
        last = self._same.last_block(self._params, heads.tip)
        return len(self._route.upstreams) > 1 and health.head < last and heads.is_plausible(last, time.monotonic())

    def _read_logs(self) -> None:
        dispatcher, now = self._route.dispatcher, time.monotonic()
        assert self._caller.flight is not None
        if self._meters is not None:
            price = self._route.state.price(self._same, self._params)
            if (refusal := self._meters.open(self._payer).pay_now(price)) is not None:
                self._caller.on_fault(refusal)
                return
            self._caller.on_charged(price)
        tip = self._route.heads.tip
        call = Call(
            self._same,
            self._params,
            client=self._caller.flight.client,
            payer=self._payer,
            least_head=min(tip, self._same.last_block(self._params, tip)),
        )
        flight = dispatcher.new_flight(call, self._caller, now)
        self._caller.on_flight(flight)
        dispatcher.launch(flight, now)
