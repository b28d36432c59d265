"""Token buckets, as one number each.

A bucket holds one second's worth: `rate` tokens, refilled at `rate` per second. Its whole state is its *edge*, the
time at which it would have been empty: at time `now` it holds `(now - edge) * rate` tokens, at most `rate`. Taking
an amount moves the edge later by `amount / rate` seconds; it fits while the edge stays in the past. An edge of
zero is a full bucket, so fresh memory needs no initialisation, and a changed rate needs no migration.

Amounts are therefore given in seconds of refill. The edges live in a mutable sequence that the caller owns and
guards (store/windows shares one among the workers of a host): a key's request edge, then its unit edge.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import Final, Protocol

# Sums of a tenth are not exact in binary: without this a bucket of ten would refuse its tenth request.
TOLERANCE_S: Final = 1e-6


class BucketEdges(Protocol):
    """The interface of the memory that holds the buckets. A `memoryview` of doubles implements it."""

    def __getitem__(self, place: int, /) -> float: ...
    def __setitem__(self, place: int, edge: float, /) -> None: ...


def take(edges: BucketEdges | MutableSequence[float], at: int, now: float, request_s: float, unit_s: float) -> float:
    """Take from both buckets or from neither. Zero when taken, else the seconds to wait."""
    full = now - 1.0
    requests = edges[at]
    units = edges[at + 1]
    # An edge in the future can only be the memory of another clock: such a bucket is full again.
    if requests < full or requests > now + 1.0:
        requests = full
    if units < full or units > now + 1.0:
        units = full
    requests += request_s
    units += unit_s
    wait = (requests if requests > units else units) - now
    if wait > TOLERANCE_S:
        return wait
    edges[at] = requests
    edges[at + 1] = units
    return 0.0


def give_back(edges: BucketEdges | MutableSequence[float], at: int, request_s: float, unit_s: float) -> None:
    """Undo a take whose call we failed ourselves."""
    edges[at] -= request_s
    edges[at + 1] -= unit_s


def remaining(edge: float, now: float, rate: int) -> int:
    """Whole tokens in the bucket now."""
    held = (now - edge + TOLERANCE_S) * rate
    return rate if held >= rate else int(held) if held > 0.0 else 0


def full_in(edge: float, now: float) -> float:
    """Seconds until the bucket is full again: the end of its window."""
    wait = edge + 1.0 - now
    return wait if wait > 0.0 else 0.0


def fits_ever(request_s: float, unit_s: float) -> bool:
    """Whether even a full bucket could hold the amount: a batch that cannot is a mistake, not a matter of waiting."""
    return request_s <= 1.0 + TOLERANCE_S and unit_s <= 1.0 + TOLERANCE_S
