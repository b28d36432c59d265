"""How old the data of a replica is.

Positions in the primary's write-ahead log are sampled with the time. A replica that has replayed a position has everything
that was committed before that position was sampled. This needs no synchronised clocks, and works for a replica that has lost
its primary, which by its own figures would look up to date.
"""

from __future__ import annotations

from collections import deque

# Bounds memory, with one sample a second. The age of a replica that lags by more than a minute keeps growing until it has
# caught up to within a minute.
MOST_SAMPLES = 60


class ReplicaAge:
    __slots__ = ("_current_at", "_samples")

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=MOST_SAMPLES)
        self._current_at = float("-inf")

    def __repr__(self) -> str:
        return f"<ReplicaAge current at {self._current_at:.1f}, {len(self._samples)} samples ahead>"

    def sample(self, at: float, *, written: int, replayed: int) -> None:
        """Record the primary's position at this time, and the replica's position as read after that."""
        self._samples.append((at, written))
        while self._samples and self._samples[0][1] <= replayed:
            self._current_at = self._samples.popleft()[0]

    def seconds(self, now: float) -> float:
        """The age of the replica's data; infinite before the first sample that it has replayed."""
        return now - self._current_at
