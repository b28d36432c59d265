"""Which upstream a flight is sent to: one that takes calls, has the method and the block, and that its directives allow."""

from __future__ import annotations

from proxy.core.directives import Directives
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.network_state import NetworkState
from proxy.wire.upstream import Upstream


def choose_upstream(state: NetworkState, flight: Flight, now: float, tried: int) -> Upstream | None:
    """The best upstream, if there is one. `tried`: those to leave out, as a bit set of their indexes."""
    name = flight.policy.method.name
    if flight.directives is not None:
        tried |= _left_out(state, flight.directives)
    if (only := state.only) is not None:
        health = only.health
        takes_calls = health.takes_calls(now) or health.allows_fallback(now)
        return only if takes_calls and not tried and health.may_serve(name) else None
    if not flight.policy.may_repeat and (doubtful := state.group.doubtful_for_writes(now) & ~tried):
        found = state.group.choose(now, name, tried=tried | doubtful)
        if found is not None:
            return state.upstreams[found.index]
    found = state.group.choose(now, name, tried=tried, head=flight.least_head, archive=flight.archive)
    return None if found is None else state.upstreams[found.index]


def _left_out(state: NetworkState, directives: Directives) -> int:
    """A bit set of the upstreams to exclude: all but the named one, and those that have not reached the block."""
    found = 0
    for upstream in state.upstreams:
        health = upstream.health
        is_other = directives.upstream not in ("", upstream.label)
        if is_other or (directives.min_block and health.head < directives.min_block):
            found |= 1 << health.index
    return found


def needs_block(flight: Flight) -> bool:
    """Whether only an upstream that has reached a block may be asked."""
    return flight.directives is not None and flight.directives.min_block > 0


def lacks_block(flight: Flight, upstream: Upstream) -> bool:
    """Whether an upstream is behind the block that the call needs."""
    return 0 < upstream.health.head < flight.least_head
