"""Answering calls: from the cache, by joining an equal call in flight, or by sending them to an upstream."""

from __future__ import annotations

from collections.abc import Iterable

from proxy.core.access import Key
from proxy.core.caching import key_of
from proxy.services.rpc.broadcasts import Broadcast
from proxy.services.rpc.filter_ids import FilterIds
from proxy.services.rpc.flights import Caller, Flight
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.networks import Route
from proxy.services.rpc.upstream_batch import launch_all


class Forwarder:
    """Answers calls of clients that were admitted, and of services, which need no admission and have no key."""

    __slots__ = ("_filters",)

    def __init__(self, filters: FilterIds) -> None:
        self._filters = filters

    def forward(
        self,
        caller: Caller,
        route: Route,
        key: Key | None,
        policy: MethodPolicy,
        params: bytes,
        now: float,
        *,
        fresh: bool = False,
        slot: bytes | None = None,
    ) -> None:
        """Answer one call. `fresh` bypasses the cache. `slot` is the cache key, if it was computed already."""
        flight = self._flight(caller, route, key, policy, params, now, fresh=fresh, slot=slot)
        if flight is not None and (route.shared_lookup is None or fresh or route.shared_lookup.take([flight], now)):
            route.dispatcher.launch(flight, now)

    def forward_all(
        self,
        calls: Iterable[tuple[Caller, MethodPolicy, bytes]],
        route: Route,
        key: Key | None,
        now: float,
        *,
        fresh: bool = False,
    ) -> None:
        """Answer several calls. Those that need an upstream are sent together."""
        flights: list[Flight] = []
        for caller, policy, params in calls:
            flight = self._flight(caller, route, key, policy, params, now, fresh=fresh)
            if flight is not None:
                flights.append(flight)
        if flights:
            lookup = None if fresh else route.shared_lookup
            launch_all(route.dispatcher, flights if lookup is None else lookup.take(flights, now), now)

    def _flight(
        self,
        caller: Caller,
        route: Route,
        key: Key | None,
        policy: MethodPolicy,
        params: bytes,
        now: float,
        *,
        fresh: bool,
        slot: bytes | None = None,
    ) -> Flight | None:
        """A flight to launch; None if the call needs none."""
        state = route.state
        if state.shared_head.moves != state.seen_moves:
            state.catch_up()
        if policy.by_range or policy.method.creates_filter:
            params = policy.within_head(params, route.heads.tip)
        if policy.shared:
            slot = slot or key_of(policy.request_tail, params)
            if not fresh and _is_known(caller, route, slot):
                return None
            caller.cache = "miss"
        elif policy.is_checked and route.guard is not None:
            assert key is not None  # Services make no calls that a guard checks.
            return route.guard.flight(caller, key, policy, params, now)
        elif policy.method.kind == "filter":
            assert key is not None  # A filter belongs to a key: services make none here.
            self._filters.forward(caller, route, key, policy, params, now)
            return None
        elif policy.answer:
            caller.on_result(policy.answer)
            return None
        elif route.broadcast > 1 and policy.may_broadcast:
            Broadcast(caller).send(route, policy, params, now, client=key.account.id if key else "")
            return None
        flight = route.dispatcher.new_flight(policy, params, caller, now)
        if key is not None:
            flight.client = key.account.id
        caller.flight = flight
        if slot is not None:
            flight.slot = slot
            if route.coalesces:
                state.flights[slot] = flight
        if not policy.is_plain:
            _set_block(flight, route, policy, params)
        elif policy.is_head_number:
            flight.reports_head = True
            flight.least_head = route.heads.tip
        return flight


def _is_known(caller: Caller, route: Route, slot: bytes) -> bool:
    """Answer the call from the cache, or let it join an equal one. False if neither is possible."""
    state = route.state
    result = state.replies.get(slot) if state.caches else None
    if result is not None:
        caller.cache = "hit"
        caller.on_result(result)
        return True
    flight = state.flights.get(slot)
    if flight is None:
        return False
    caller.cache = "join"
    caller.flight = flight
    flight.waiters.append(caller)
    return True


def _set_block(flight: Flight, route: Route, policy: MethodPolicy, params: bytes) -> None:
    """Set what the block of the call requires of its upstream."""
    ref, tip = policy.family.block_ref(policy.method, params), route.heads.tip
    if ref.moves:
        flight.least_head = tip
        flight.reports_head = policy.may_show_head and ref.tag == policy.family.latest
    elif tip:
        flight.archive = policy.family.is_archive(ref, tip)
        # An upstream without the last block of a range would silently leave that block out.
        flight.least_head = min(tip, policy.last_block(params, tip) if policy.by_range else ref.number)
