"""The number of blocks to query logs for at once: enough for a reply of a good size, and no more than upstreams allow.

The size doubles while replies are small, shrinks in proportion when they are large, and stays below the size that was last
refused. That limit is retried after a while, since it may have been specific to those blocks.
"""

from __future__ import annotations

# The logs to aim for in one reply: a few megabytes, stored in a database transaction of a fraction of a second.
GOOD_LOGS = 5_000
MOST_BLOCKS = 10_000
# A chain's density is unknown at first: the first reply must not be a gigabyte.
FIRST_BLOCKS = 8
# Good replies after which a limit is tried again.
PATIENCE = 64


class RangeSize:
    """The size of the next range."""

    __slots__ = ("_good", "_limit", "blocks")

    def __init__(self) -> None:
        self.blocks = FIRST_BLOCKS
        self._limit = MOST_BLOCKS
        self._good = 0

    def __repr__(self) -> str:
        return f"<RangeSize {self.blocks} of at most {self._limit}>"

    def refused(self, allowed: int) -> None:
        """A range was refused; `allowed` blocks may work."""
        self._limit = self.blocks = max(1, allowed)
        self._good = 0

    def read(self, blocks: int, logs: int) -> None:
        """Learn how many logs a range of blocks had."""
        self._good += 1
        if self._good >= PATIENCE:
            self._good = 0
            self._limit = min(self._limit * 2, MOST_BLOCKS)
        if logs > GOOD_LOGS:
            self.blocks = max(1, blocks * GOOD_LOGS // logs)
        elif logs * 2 < GOOD_LOGS and blocks >= self.blocks:
            self.blocks = max(1, min(self.blocks * 2, self._limit))
