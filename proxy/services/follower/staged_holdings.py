"""Sums of back-filled transfers on their way into the holdings.

The rows of holders are far apart, and each range of blocks has many of the same holders as the one before. So ranges are not
added to the holdings one by one. The transaction of a range *stages* its sums: it writes them to a table of their own, packed.
They are also added up in memory, and merged once there are many.

A merge goes through the holders in parts, by their first byte, each in a transaction of its own: it must be short, because the
follower waits for the rows that it writes. The transaction also records that the part is merged, for all sums that were staged
before the merge began, and the last one deletes them. So after a kill at any point each sum is either staged or merged, and the
next run continues with those that are staged.
"""

from __future__ import annotations

from collections import deque

from proxy.core.holdings import HoldingChanges
from proxy.store.postgres import holdings
from proxy.store.postgres.blocks import LeaderSession
from proxy.store.postgres.pool import DatabaseConnection

# The sums at which a merge begins. Bounds memory: about 200 bytes each, of those being merged and those that follow.
MOST_SUMS = 150_000
# Parts of a merge: each locks some 10,000 rows, for about a tenth of a second.
PARTS = 16
_BYTES = 256 // PARTS


class StagedHoldings:
    """What a back-fill has staged. `most`: the sums at which a merge begins."""

    def __init__(self, term: LeaderSession, *, most: int | None = None) -> None:
        self._term = term
        self._most = MOST_SUMS if most is None else most
        self._sums = HoldingChanges()
        # The number of the newest staged sums in memory; 0 if there are none.
        self._newest = 0
        # The merge under way: the parts that are left, each with the first byte after it, and the number of the newest sums.
        self._parts: deque[tuple[int, HoldingChanges]] = deque()
        self._merging = 0

    def __repr__(self) -> str:
        return f"<StagedHoldings of {len(self._sums)} sums, {len(self._parts)} parts to merge>"

    async def load(self) -> None:
        """Continue with what an earlier run has left."""
        async with self._term.transaction() as connection:
            rows = await holdings.staged(connection, self._term.number)
        for number, merged, packed in rows:
            self.include(HoldingChanges.unpack(packed).from_byte(merged), number)

    async def stage(self, connection: DatabaseConnection, packed: bytes) -> int:
        """Write sums in the caller's transaction. Returns their number, for `include` once that is committed."""
        return await holdings.stage(connection, self._term.number, packed) if packed else 0

    def include(self, changes: HoldingChanges, number: int) -> None:
        """The sums with this number are staged."""
        self._sums.include(changes)
        self._newest = max(self._newest, number)

    async def merge_some(self) -> None:
        """Merge as many parts as are due: a merge keeps pace with the sums that are gathered for the next one."""
        while self._parts and len(self._parts) * self._most > PARTS * (self._most - len(self._sums)):
            await self._merge_part()
        if not self._parts and len(self._sums) >= self._most:
            self._begin()

    async def merge_all(self) -> None:
        while self._parts or self._newest:
            if not self._parts:
                self._begin()
            await self._merge_part()

    def _begin(self) -> None:
        parts = [HoldingChanges() for _ in range(PARTS)]
        for key, delta in self._sums.tokens.items():
            parts[key[0] // _BYTES].tokens[key] = delta
        for key, delta in self._sums.nfts.items():
            parts[key[0] // _BYTES].nfts[key] = delta
        for part in parts:
            part.standards = self._sums.standards
        self._parts = deque((_BYTES * nth, part) for nth, part in enumerate(parts, 1))
        self._sums, self._merging, self._newest = HoldingChanges(), self._newest, 0

    async def _merge_part(self) -> None:
        below, part = self._parts[0]
        network = self._term.number
        async with self._term.transaction() as connection:
            await holdings.add(connection, network, part)
            if len(self._parts) > 1:
                await holdings.mark_merged(connection, network, self._merging, below=below)
            else:
                await holdings.delete_staged(connection, network, self._merging)
        self._parts.popleft()
