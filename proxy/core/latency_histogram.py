"""How long the recent calls of an upstream took."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
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
# With fewer samples, a quantile is meaningless.
ENOUGH_SAMPLES = 20
# When there are this many samples, half of them are forgotten, so quantiles follow a change of the upstream's speed.
FORGET_AT = 2048
# Operators see the calls of the last five minutes, since a longer window would hide that an upstream is fast again. The window
# moves in steps.
WINDOW_S: Final = 300.0
STEP_S: Final = 15.0


class LatencyHistogram:
    """Counts calls by bucket. `totals` has all calls ever; quantiles subtract those that are forgotten, and `recent` those
    before the window, so adding a call changes one number. `samples`: the calls that quantiles are computed from."""

    __slots__ = ("_forgotten", "_steps", "samples", "totals")

    def __init__(self) -> None:
        self.totals = [0] * (len(EDGES_S) + 1)
        self.samples = 0
        self._forgotten = [0] * len(self.totals)
        # When a step of the window began, and the totals at that time.
        self._steps: deque[tuple[float, list[int]]] = deque()

    def __repr__(self) -> str:
        return f"<LatencyHistogram of {self.samples}>"

    def add(self, took_s: float) -> None:
        self.totals[bucket_of(took_s)] += 1
        self.samples += 1
        if self.samples >= FORGET_AT:
            self._forgotten = [
                total - (total - old) // 2 for total, old in zip(self.totals, self._forgotten, strict=True)
            ]
            self.samples = sum(self.totals) - sum(self._forgotten)

    def quantile_s(self, share: float) -> float | None:
        """The upper edge of the bucket that holds this quantile; None while too few calls were seen."""
        if self.samples < ENOUGH_SAMPLES:
            return None
        wanted = share * self.samples
        for index, total in enumerate(self.totals):
            wanted -= total - self._forgotten[index]
            if wanted <= 0:
                return EDGES_S[index] if index < len(EDGES_S) else EDGES_S[-1]
        return EDGES_S[-1]

    def recent(self, now: float) -> list[int]:
        """The calls in the window, by bucket. This must be called regularly, to move the window; the first result has all
        calls."""
        steps = self._steps
        if not steps or now - steps[-1][0] >= STEP_S:
            steps.append((now, list(self.totals) if steps else [0] * len(self.totals)))
        while now - steps[0][0] > WINDOW_S and len(steps) > 1:
            steps.popleft()
        return [total - old for total, old in zip(self.totals, steps[0][1], strict=True)]


def bucket_of(seconds: float) -> int:
    """The index of the bucket for this time. Most calls belong to one of the first three, which need no search."""
    if seconds <= _THIRD:
        return 0 if seconds <= _FIRST else 1 if seconds <= _SECOND else 2
    return bisect_left(EDGES_S, seconds)
