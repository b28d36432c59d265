"""How long the recent calls of an upstream took."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

# Upper edges of the buckets, in seconds; one more bucket holds the rest.
EDGES_S: Final[tuple[float, ...]] = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)
_FIRST: Final[float] = EDGES_S[0]
_SECOND: Final[float] = EDGES_S[1]
_THIRD: Final[float] = EDGES_S[2]
# Samples below which a quantile says nothing.
ENOUGH_SAMPLES = 20
# The histogram forgets half of itself when it holds this many: it speaks of the recent past.
FORGET_AT = 2048


class LatencyHistogram:
    """`counts` is how many calls each bucket holds, `samples` how many all of them do."""

    __slots__ = ("counts", "samples")

    def __init__(self) -> None:
        self.counts = [0] * (len(EDGES_S) + 1)
        self.samples = 0

    def __repr__(self) -> str:
        return f"<LatencyHistogram of {self.samples}>"

    def add(self, took_s: float) -> None:
        self.counts[bucket_of(took_s)] += 1
        self.samples += 1
        if self.samples >= FORGET_AT:
            self.counts = [count // 2 for count in self.counts]
            self.samples = sum(self.counts)

    def quantile_s(self, share: float) -> float | None:
        """The upper edge of the bucket that holds this quantile; None while too few calls were seen."""
        if self.samples < ENOUGH_SAMPLES:
            return None
        wanted = share * self.samples
        for place, count in enumerate(self.counts):
            wanted -= count
            if wanted <= 0:
                return EDGES_S[place] if place < len(EDGES_S) else EDGES_S[-1]
        return EDGES_S[-1]


def bucket_of(seconds: float) -> int:
    """The index of the bucket for this time. Most calls belong to one of the first three, which need no search."""
    if seconds <= _THIRD:
        return 0 if seconds <= _FIRST else 1 if seconds <= _SECOND else 2
    return bisect_left(EDGES_S, seconds)
