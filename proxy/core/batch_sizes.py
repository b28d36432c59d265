"""How many calls one request to an upstream may contain, by client.

An upstream that refuses a whole batch gets smaller ones for a while. The refusal may also be about one call in the batch, which
its client chose, and both cases look the same. So a refusal only affects the batches of that client. The same is done if the
reply was too large to be read.
"""

from __future__ import annotations

from dataclasses import dataclass

# After a refusal, smaller batches are sent for this long. The time doubles if a batch is refused again after it has passed.
SMALLER_S = 60.0
LONGEST_SMALLER_S = 3600.0
# Bounds memory. Beyond this, the client whose first refusal is the oldest gets its full batch size back.
MAX_CLIENTS = 10_000


@dataclass(slots=True)
class SmallerBatches:
    size: int
    until: float
    for_s: float


class BatchSizes:
    __slots__ = ("_now", "_smaller", "most")

    def __init__(self, most: int) -> None:
        """`most` is the size for clients without a refusal; 1 disables batches."""
        self.most = most
        self._smaller: dict[str, SmallerBatches] = {}
        self._now = 0.0

    def __repr__(self) -> str:
        return f"<BatchSizes {self.most}, smaller for {len(self._smaller)} clients>"

    def of(self, client: str) -> int:
        smaller = self._smaller.get(client) if self._smaller else None
        return self.most if smaller is None or self._now >= smaller.until else smaller.size

    def refused(self, client: str, count: int, now: float) -> None:
        """A batch of this size was refused: send batches of half the size for a while."""
        smaller = self._smaller.setdefault(client, SmallerBatches(self.most, 0.0, 0.0))
        if now >= smaller.until:
            smaller.for_s = min(smaller.for_s * 2 or SMALLER_S, LONGEST_SMALLER_S)
        smaller.size = max(1, count // 2)
        smaller.until = now + smaller.for_s
        if len(self._smaller) > MAX_CLIENTS:
            del self._smaller[next(iter(self._smaller))]

    def refresh(self, now: float) -> None:
        self._now = now
