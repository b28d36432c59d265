"""Results that an upstream may have sent because it does not have the newest blocks: empty ones, and logs of a range."""

from __future__ import annotations

import msgspec

from proxy.services.rpc.flights import Flight
from proxy.services.rpc.network_state import NetworkState
from proxy.wire.upstream import Upstream


def is_doubtful(state: NetworkState, flight: Flight, upstream: Upstream, result: msgspec.Raw) -> bool:
    """Whether a result is empty and its upstream may not have the block yet."""
    policy = flight.policy
    return upstream.health.head < state.heads.tip and policy.family.is_empty(policy.method, bytes(result))


def may_lack_blocks(
    state: NetworkState, flight: Flight, upstream: Upstream, now: float, result: bytes | msgspec.Raw = b""
) -> bool:
    """Whether a range ends beyond the head of the upstream that sent its logs, while another one may have more. A range that
    ends far beyond any head means all blocks up to the latest. Without the result, it is not looked at."""
    if state.only is not None or flight.is_piece or flight.handed_over:
        return False
    last = flight.policy.last_block(flight.params, state.heads.tip)
    if last <= upstream.health.head or not state.heads.is_plausible(last, now):
        return False
    newest = state.head_reader.newest_block(bytes(result))
    return newest is None or newest < last
