"""Answering calls: from the cache, by joining an equal call in flight, or by sending them to an upstream."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final, Protocol, TypeAlias

from proxy.core import jsonrpc
from proxy.core.access import Key
from proxy.core.caching import key_of
from proxy.core.directives import NO_DIRECTIVES, Directives
from proxy.core.verification import Verification
from proxy.errors import InvalidRequest
from proxy.services.accounts.metering import Meter, Meters
from proxy.services.rpc.broadcasts import Broadcast, HighestResult
from proxy.services.rpc.filter_ids import FilterIds
from proxy.services.rpc.flights import Call, Caller, Flight, Payer
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.networks import Route
from proxy.services.rpc.upstream_batch import launch_all
from proxy.wire.upstream import Upstream

# A filter of 1,000 addresses and 4,000 topics, which nodes accept at most, takes 320,000 bytes.
MOST_FILTER_BYTES: Final = 393_216
FILTER_TOO_LARGE: Final = jsonrpc.error(jsonrpc.INVALID_PARAMS, f"the filter has more than {MOST_FILTER_BYTES} bytes")

# A call that was admitted: its caller, the policy of its method, and its params.
AdmittedCall: TypeAlias = tuple[Caller, MethodPolicy, bytes]
# Callers that wait for one flight: one turn of the loop answers them all, or sends each its own call.
MOST_JOINED: Final = 128


class CallVerifier(Protocol):
    """Answers calls whose replies must be verified."""

    def start(
        self, call: AdmittedCall, route: Route, how: Verification, *, key: Key, directives: Directives
    ) -> None: ...


class OwnMethodRunner(Protocol):
    """Answers calls of methods that no upstream has."""

    def start(self, call: AdmittedCall, route: Route, *, key: Key, directives: Directives | None) -> None: ...


class PrivateSender(Protocol):
    """Sends transactions to private relays."""

    def takes(self, policy: MethodPolicy, route: Route, key: Key, directives: Directives | None) -> bool:
        """Whether a write must not be sent to the upstreams."""

    def start(self, call: AdmittedCall, route: Route, *, key: Key, directives: Directives | None) -> None: ...


class Forwarder:
    """Answers calls of clients that were admitted, and of services, which need no admission and have no key.

    `client` is the account that a call without a key is made for, if there is one, and `meter` pays for the pieces of such a
    call if it is split.
    """

    __slots__ = ("_filters", "_meters", "_own", "_private", "_verifier")

    def __init__(
        self,
        filters: FilterIds,
        verifier: CallVerifier | None = None,
        own: OwnMethodRunner | None = None,
        private: PrivateSender | None = None,
        meters: Meters | None = None,
    ) -> None:
        self._filters = filters
        self._meters = meters
        self._verifier = verifier
        self._own = own
        self._private = private

    def forward(
        self,
        call: AdmittedCall,
        route: Route,
        key: Key | None,
        now: float,
        *,
        directives: Directives | None = None,
        client: str = "",
        meter: Meter | None = None,
    ) -> None:
        """Answer one call."""
        flight = self._flight(call, route, key, now, directives=directives, client=client, meter=meter)
        if flight is None:
            return
        lookup = route.shared_lookup if _may_read_cache(route, directives) else None
        if lookup is None or lookup.take([flight], now):
            route.dispatcher.launch(flight, now)

    def forward_all(
        self,
        calls: Iterable[AdmittedCall],
        route: Route,
        key: Key | None,
        now: float,
        *,
        directives: Directives | None = None,
        client: str = "",
        meter: Meter | None = None,
    ) -> None:
        """Answer several calls. Those that need an upstream are sent together."""
        if directives is not None and directives.steers:
            for call in calls:
                self.forward(call, route, key, now, directives=directives, client=client, meter=meter)
            return
        flights: list[Flight] = []
        for call in calls:
            flight = self._flight(call, route, key, now, directives=directives, client=client, meter=meter)
            if flight is not None:
                flights.append(flight)
        if flights:
            lookup = route.shared_lookup if _may_read_cache(route, directives) else None
            launch_all(route.dispatcher, flights if lookup is None else lookup.take(flights, now), now)

    def _flight(
        self,
        call: AdmittedCall,
        route: Route,
        key: Key | None,
        now: float,
        *,
        directives: Directives | None,
        client: str,
        meter: Meter | None,
    ) -> Flight | None:
        """A flight to launch; None if the call needs none."""
        caller, policy, params = call
        route.state.stay_current()
        caller.on_source("", route.state.tip)
        if policy.fixed is not None and (reply := policy.fixed.find(params)) is not None:
            result, error = reply
            if result:
                caller.on_result(result)
            else:
                caller.on_error(error)
            return None
        if key is not None:
            client = key.account.id
            if policy.method.own and self._own is not None:
                self._own.start(call, route, key=key, directives=directives)
                return None
            if (
                policy.method.kind == "write"
                and self._private is not None
                and self._private.takes(policy, route, key, directives)
            ):
                self._private.start(call, route, key=key, directives=directives)
                return None
            how = policy.verify if directives is None or directives.verify is None else directives.verify
            if how is not None and self._verifier is not None:
                self._verify(call, route, how, key, directives)
                return None
        if policy.by_range or policy.method.creates_filter:
            if len(params) > MOST_FILTER_BYTES:
                caller.on_error(FILTER_TOO_LARGE)
                return None
            params = policy.within_head(params, route.heads.tip)
        payer = meter if key is None else key
        if policy.takes_highest(params, directives):
            caller.on_source("miss", route.state.tip)
            highest, most = HighestResult(caller), policy.most_asked
            forwarded = Call(policy, params, client=client, payer=payer, directives=directives)
            asked = highest.choose(route, forwarded, now, most)
            if asked < most:
                self._refund(caller, payer, (most - asked) * route.state.price(policy, params))
            highest.send_chosen(route.dispatcher, now)
            return None
        holder = _holder(policy, params, route, client, now) if policy.about_write else None
        if holder is not None and policy.may_repeat:
            # Pending state of this upstream is neither cached nor shared: others may get the state of another one.
            caller.on_source("miss", route.state.tip)
        cache_key = key_of(policy.request_tail, params) if policy.shared and holder is None else None
        if cache_key is not None:
            if _may_read_cache(route, directives) and _is_known(
                caller, route, cache_key, now, client=client, payer=payer, directives=directives
            ):
                return None
            caller.on_source("miss", route.state.tip)
        elif policy.is_checked and route.guard is not None:
            assert key is not None  # Services make no calls that a guard checks.
            return route.guard.flight(caller, key, policy, params, now, directives)
        elif policy.method.kind == "filter":
            assert key is not None  # A filter belongs to a key: services make none here.
            self._filters.forward(caller, route, key, policy, params, now, directives=directives)
            return None
        elif _needs_no_flight((caller, policy, params), route, now, directives, client=client, payer=payer):
            return None
        forwarded = _call(
            policy, params, route, client=client, payer=payer, directives=directives, cache_key=cache_key, holder=holder
        )
        flight = route.dispatcher.new_flight(forwarded, caller, now)
        caller.on_flight(flight)
        if forwarded.cache_key is not None and route.coalesces and (directives is None or directives.may_join):
            route.state.register(flight)
        return flight

    def _refund(self, caller: Caller, payer: Payer | None, units: int) -> None:
        """Fewer upstreams than were paid for can be asked."""
        if isinstance(payer, Meter):
            payer.unused(units)
        elif payer is not None and self._meters is not None:
            self._meters.open(payer, prepaid=units).settle(0)
            caller.on_charged(-units)

    def _verify(
        self, call: AdmittedCall, route: Route, how: Verification, key: Key, directives: Directives | None
    ) -> None:
        caller, policy, _ = call
        if policy.method.kind != "read" or self._verifier is None:
            caller.on_fault(
                InvalidRequest(
                    f"X-Verify: {policy.method.name} is not a read, so it cannot be verified", param="X-Verify"
                )
            )
        elif directives is not None and directives.upstream:
            reason = f"X-Upstream: {policy.method.name} is verified, which takes more than one upstream"
            caller.on_fault(InvalidRequest(reason))
        else:
            self._verifier.start(call, route, how, key=key, directives=directives or NO_DIRECTIVES)


def _holder(policy: MethodPolicy, params: bytes, route: Route, client: str, now: float) -> Upstream | None:
    """The upstream that has received the write of this client that the call is about, if there is one."""
    writes = route.state.writes
    return None if writes is None else writes.holder(policy, params, client, now)


def _needs_no_flight(
    call: AdmittedCall,
    route: Route,
    now: float,
    directives: Directives | None,
    *,
    client: str,
    payer: Payer | None,
) -> bool:
    """Answer a call with a fixed result, or send a signed transaction to several upstreams. False if it is neither."""
    caller, policy, params = call
    if policy.answer:
        caller.on_result(policy.answer)
        return True
    if route.broadcast > 1 and policy.may_broadcast and (directives is None or not directives.upstream):
        broadcast = Broadcast(caller)
        forwarded = Call(policy, params, client=client, payer=payer, directives=directives)
        broadcast.choose(route, forwarded, now, route.broadcast)
        broadcast.send_chosen(route.dispatcher, now)
        return True
    return False


def _may_read_cache(route: Route, directives: Directives | None) -> bool:
    """Whether the call may be answered by a cached reply, which is true at the tip."""
    return directives is None or (directives.reads_cache and directives.min_block <= route.state.tip)


def _is_known(
    caller: Caller,
    route: Route,
    cache_key: bytes,
    now: float,
    *,
    client: str,
    payer: Payer | None,
    directives: Directives | None = None,
) -> bool:
    """Answer the call from the cache, or let it join an equal one. False if neither is possible."""
    state = route.state
    result = state.replies.get(cache_key) if state.caches else None
    if result is not None:
        caller.on_source("hit", state.tip)
        caller.on_result(result)
        return True
    if directives is not None:
        if (
            directives.max_stale
            and not directives.min_block
            and _is_stale_known(caller, route, cache_key, directives.max_stale)
        ):
            return True
        if not directives.may_join:
            return False
    flight = state.flights.get(cache_key)
    # A flight that hangs is not joined: it would end with a timeout, long before the caller's own time is up.
    if flight is None or now - flight.began > route.dispatcher.call_timeout_s / 2:
        return False
    # A call that may be split is not shared with other accounts: its pieces are paid for by one.
    if len(flight.waiters) >= MOST_JOINED or (flight.policy.by_range and flight.client != client):
        return False
    caller.on_source("join", flight.block)
    caller.on_flight(flight)
    flight.join(caller, client, payer)
    return True


def _is_stale_known(caller: Caller, route: Route, cache_key: bytes, max_stale_s: int) -> bool:
    """Answer the call with a reply that was true a moment ago. False if there is none."""
    result = route.state.replies.stale(cache_key, time.monotonic() - max_stale_s) if route.state.caches else None
    if result is None:
        return False
    caller.on_source("stale", 0)
    caller.on_result(result)
    return True


def _call(
    policy: MethodPolicy,
    params: bytes,
    route: Route,
    *,
    client: str,
    payer: Payer | None,
    directives: Directives | None,
    cache_key: bytes | None,
    holder: Upstream | None,
) -> Call:
    """The call, with what its block requires of its upstream."""
    if directives is not None and directives.upstream:
        # The result is that of one upstream, whatever the others have: it is not shared.
        is_old = route.heads.tip and not policy.is_plain and not policy.names_latest(params)
        archive = is_old and policy.family.is_archive(policy.family.block_ref(policy.method, params), route.heads.tip)
        return Call(policy, params, client=client, payer=payer, directives=directives, archive=bool(archive))
    least_head, oldest, reports_head, archive = 0, -1, False, False
    tip = route.heads.tip
    if policy.is_plain:
        if policy.is_head_number:
            least_head, reports_head = tip, True
    elif policy.has_block and policy.names_latest(params):
        least_head, reports_head = tip, policy.may_show_head
    else:
        ref = policy.family.block_ref(policy.method, params)
        if ref.moves:
            least_head = tip
            reports_head = policy.may_show_head and ref.tag == policy.family.latest
        elif tip:
            archive = policy.family.is_archive(ref, tip)
            if archive:
                route.state.old_data_read(policy.data)
            if 0 <= ref.number < route.state.floor:
                oldest = ref.number
            # An upstream without the last block of a range would silently leave that block out.
            least_head = min(tip, policy.last_block(params, tip) if policy.by_range else ref.number)
    return Call(
        policy,
        params,
        client=client,
        payer=payer,
        directives=directives,
        cache_key=cache_key,
        least_head=least_head,
        reports_head=reports_head,
        archive=archive,
        oldest=oldest,
        holder=holder,
    )
