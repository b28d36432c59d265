"""When to ask a network for its newest block: as often as three times per block, and at the moment a block is due.

Most chains make blocks at regular times, so the next block can be expected. Polls at a fixed interval miss it by up to that
interval. Here polls come at that interval until a block is expected: then one comes just before it, and the next ones follow
quickly. They all go on at the interval if the block does not come, and if the chain's blocks are not regular.
"""

from __future__ import annotations

import math
from collections import deque

SHORTEST_POLL_S, LONGEST_POLL_S = 0.25, 2.0
# Blocks are expected once this many intervals are known, by the shortest of the last ones, if it is not much shorter than the
# network's block time. It is a whole number of seconds, because the times of blocks are.
KNOWN, LAST, REGULAR = 4, 16, 0.75
# Quick polls after the one before a block is due, and how many there are in a block time at most.
QUICK_POLLS, QUICK_PER_BLOCK = 2, 16


class HeadRhythm:
    """The times of a network's polls."""

    __slots__ = ("_block_time_s", "_due_at", "_head", "_intervals", "_quick_s", "interval_s")

    def __init__(self, block_time_s: float) -> None:
        self.interval_s = min(max(block_time_s / 3, SHORTEST_POLL_S), LONGEST_POLL_S)
        self._quick_s = min(max(block_time_s / QUICK_PER_BLOCK, SHORTEST_POLL_S), self.interval_s)
        self._block_time_s = block_time_s
        self._intervals: deque[float] = deque(maxlen=LAST)
        # The newest block so far, with its time, and when the first quick poll for the next one is due.
        self._head: tuple[int, int] | None = None
        self._due_at = -math.inf

    def __repr__(self) -> str:
        return f"<HeadRhythm every {self.interval_s:g} s, {'regular' if self._is_regular else 'irregular'}>"

    @property
    def _is_regular(self) -> bool:
        return len(self._intervals) >= KNOWN and min(self._intervals) >= REGULAR * self._block_time_s

    def polled(self, number: int, time: int, began: float) -> None:
        """A poll that was sent at `began` has returned this block, which has this time."""
        if self._head is not None and number <= self._head[0]:
            return
        if self._head is not None:
            self._intervals.append((time - self._head[1]) / (number - self._head[0]))
        self._head = number, time
        expected_s = min(self._intervals) if self._is_regular else -math.inf
        self._due_at = began + expected_s - self._quick_s

    def pause_s(self, now: float) -> float:
        """How long to wait for the next poll. A time that is almost reached counts as reached."""
        late_s, quick_s = now - self._due_at, self._quick_s
        if late_s < -quick_s / 4:
            return -late_s / max(1, int(-late_s / self.interval_s))
        if late_s < QUICK_POLLS * quick_s:
            return (int(late_s / quick_s + 0.25) + 1) * quick_s - late_s
        return self.interval_s
