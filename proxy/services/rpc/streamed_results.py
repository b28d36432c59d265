"""Large results, which are passed on to their waiter in pieces as they arrive."""

from __future__ import annotations

import time

from proxy.services.rpc.flights import Flight, result_at
from proxy.services.rpc.network_state import NetworkState
from proxy.wire.http1 import ReplyHead
from proxy.wire.upstream import Piece, UpstreamConnection

_monotonic = time.monotonic


def start_of_stream(flight: Flight, head: ReplyHead, beginning: Piece) -> int:
    """The offset of the result, if its only waiter can take it in pieces and it starts like a reply to our call; else 0."""
    waiters = flight.waiters
    if len(waiters) != 1 or not waiters[0].streams or flight.reports_head or flight.handed_over:
        return 0
    return result_at(flight.policy, flight.id, head, beginning)


def begin_stream(
    state: NetworkState, flight: Flight, connection: UpstreamConnection, beginning: memoryview, left: int | None
) -> None:
    """Pass on the beginning of the result. `left`: its length, if it is known."""
    flight.streaming = True
    flight.answered_by = connection.upstream
    state.unregister(flight)  # No caller may join a reply that has started.
    flight.leave_others(connection.upstream)
    flight.waiters[0].on_stream(beginning, left, connection)


def end_stream(state: NetworkState, flight: Flight, connection: UpstreamConnection) -> None:
    began = flight.ended(connection.upstream)
    now = _monotonic()
    connection.upstream.health.succeeded(now - began)
    flight.blame_suspects(now)
    _close_stream(state, flight)
    flight.waiters[0].on_stream_end()


def break_stream(state: NetworkState, flight: Flight) -> None:
    """The upstream failed in the middle of the result."""
    _close_stream(state, flight)
    flight.waiters[0].on_stream_broken()


def _close_stream(state: NetworkState, flight: Flight) -> None:
    flight.streaming = False
    flight.done = True
    state.unregister(flight)
