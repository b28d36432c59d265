"""When a call under way is late, and which upstream may have lost it."""

from __future__ import annotations

from proxy.core.routing import HEDGE_FLOOR_S
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.network_state import NetworkState
from proxy.wire.upstream import Upstream


def is_late(state: NetworkState, flight: Flight, now: float) -> bool:
    """Whether the newest attempt takes longer than its upstream usually does."""
    newest, age = flight.newest(now)
    if newest is None or age < HEDGE_FLOOR_S or not flight.policy.may_repeat:
        return False
    return age > state.group.hedge_after_s(newest.health)


def upstream_that_is_back(state: NetworkState, flight: Flight, now: float) -> Upstream | None:
    """An upstream that was silent after the call was sent and is back: it may have lost the call."""
    if flight.tries >= flight.most_tries and flight.directives is not None and flight.directives.steers:
        return None
    sent_at = now - flight.newest(now)[1]
    # A negative bit set has all bits: such a call may be sent to one upstream only.
    may_change = flight.tried >= 0
    for upstream in state.upstreams:
        is_back = upstream.health.back_at > sent_at and upstream.health.takes_calls(now)
        if is_back and (may_change or flight.is_carried_by(upstream)):
            return upstream
    return None
