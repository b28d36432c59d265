"""Token buckets, as one number each.

A bucket holds one second's worth: `rate` tokens, refilled at `rate` per second. Its whole state is its *edge*, the
time at which it would have been empty: at time `now` it holds `(now - edge) * rate` tokens, at most `rate`. Taking
an amount moves the edge later by `amount / rate` seconds; it fits while the edge stays in the past. An edge of
zero is a full bucket, so fresh memory needs no initialisation, and a changed rate needs no migration.

Amounts are therefore given in seconds of refill. The edges live in a mutable sequence that the caller owns and
guards (store/shared_memory/rate_buckets shares one among the workers of a host): a pair's request edge, then its unit edge.

A bucket admits its capacity at once, and then what is refilled: of many requests within 20 ms, a rate of 100 per second
admits 102. No interval admits more than capacity and refill, over all workers of a host together.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import Final, Protocol, final

# Sums of a tenth are not exact in binary: without this a bucket of ten would refuse its tenth request.
TOLERANCE_S: Final = 1e-6
# A process may be suspended between reading the clock and taking, so other workers' edges may be ahead of its time. An edge
# further ahead than this can only come from another clock. It would refuse every request until then, so it counts as a full
# bucket.
MOST_AHEAD_S: Final = 60.0
EDGES_PER_BUCKET: Final = 2


@final
class BucketRates:
    """The rates of an account or a key, and the index of their buckets. `request_s` and `unit_s` are the cost of one
    request and of one unit, in seconds of refill."""

    __slots__ = ("bucket_index", "limit_line", "request_s", "requests_per_second", "unit_s", "units_per_second")

    def __init__(self, bucket_index: int, requests_per_second: int, units_per_second: int) -> None:
        self.bucket_index = bucket_index
        self.requests_per_second = requests_per_second
        self.units_per_second = units_per_second
        self.request_s = 1.0 / requests_per_second
        self.unit_s = 1.0 / units_per_second
        self.limit_line = b"\r\nX-RateLimit-Limit: %d\r\nX-RateLimit-Remaining: " % requests_per_second

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BucketRates) and (
            (self.bucket_index, self.requests_per_second, self.units_per_second)
            == (other.bucket_index, other.requests_per_second, other.units_per_second)
        )

    def __hash__(self) -> int:
        return hash((self.bucket_index, self.requests_per_second, self.units_per_second))

    def __repr__(self) -> str:
        rates = f"{self.requests_per_second} requests/s, {self.units_per_second} units/s"
        return f"<BucketRates {rates}, bucket {self.bucket_index}>"


class CallRate(Protocol):
    """An upstream's limit on calls: checked while an upstream is chosen, and charged when the call is sent."""

    def admits(self, now: float) -> bool: ...
    def take(self, now: float) -> None: ...
    def slow_to(self, cost_s: float) -> None:
        """From now on, a call costs at least this many seconds of refill."""


@final
class ProcessRate:
    """A `CallRate` that only this process uses."""

    __slots__ = ("_cost_s", "_edge", "_own_s")

    def __init__(self, per_second: float) -> None:
        self._cost_s = self._own_s = 1.0 / per_second
        self._edge = 0.0

    def __repr__(self) -> str:
        return f"<ProcessRate {1.0 / self._cost_s:g}/s>"

    def admits(self, now: float) -> bool:
        return edge_after_call(self._edge, now, self._cost_s) <= now + TOLERANCE_S

    def take(self, now: float) -> None:
        self._edge = edge_after_call(self._edge, now, self._cost_s)

    def slow_to(self, cost_s: float) -> None:
        self._cost_s = max(self._own_s, cost_s)


def edge_after_call(edge: float, now: float, cost_s: float) -> float:
    """The edge after one more call. The bucket holds a second's calls, at least one."""
    return max(edge, now - max(1.0, cost_s)) + cost_s


class BucketEdges(Protocol):
    """The interface of the memory that holds the buckets. A `memoryview` of doubles implements it."""

    def __getitem__(self, place: int, /) -> float: ...
    def __setitem__(self, place: int, edge: float, /) -> None: ...


def take(edges: BucketEdges | MutableSequence[float], at: int, now: float, request_s: float, unit_s: float) -> float:
    """Take from both buckets or from neither. Returns 0.0, or the seconds to wait if nothing was taken."""
    full = now - 1.0
    requests = edges[at]
    units = edges[at + 1]
    if requests < full or requests > now + MOST_AHEAD_S:
        requests = full
    if units < full or units > now + MOST_AHEAD_S:
        units = full
    requests += request_s
    units += unit_s
    wait = (requests if requests > units else units) - now
    if wait > TOLERANCE_S:
        return wait
    edges[at] = requests
    edges[at + 1] = units
    return 0.0


def take_both(
    edges: BucketEdges | MutableSequence[float],
    rate: BucketRates,
    own: BucketRates,
    now: float,
    *,
    requests: int,
    units: int,
) -> float:
    """Take from an account's buckets and from those of one of its keys, or from none. Returns 0.0, or the longer wait."""
    wait = take(edges, rate.bucket_index * EDGES_PER_BUCKET, now, requests * rate.request_s, units * rate.unit_s)
    own_wait = take(edges, own.bucket_index * EDGES_PER_BUCKET, now, requests * own.request_s, units * own.unit_s)
    if wait and not own_wait:
        give_back(edges, own.bucket_index * EDGES_PER_BUCKET, requests * own.request_s, units * own.unit_s)
    elif own_wait and not wait:
        give_back(edges, rate.bucket_index * EDGES_PER_BUCKET, requests * rate.request_s, units * rate.unit_s)
    return own_wait if own_wait > wait else wait


def give_back(edges: BucketEdges | MutableSequence[float], at: int, request_s: float, unit_s: float) -> None:
    """Undo a take, for a call that failed because of us."""
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
    """Whether a full bucket could hold the amount. If not, waiting does not help."""
    return request_s <= 1.0 + TOLERANCE_S and unit_s <= 1.0 + TOLERANCE_S
