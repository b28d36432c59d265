"""The last blocks that listeners received, and the effect of a new head on them.

A new head continues the chain, or is already part of it, or its parent is missing. In the last case (a gap or a
reorganisation) the blocks between have to be fetched, one parent after the other, until one follows a known block. This
module decides and the caller fetches: a *path* is a list of blocks, each of which follows the one before it, and
`next_missing` names the block to put in front of it, until none is missing. Then `apply` returns which blocks are
removed, newest first, and which are new, oldest first. A listener that applies these steps always holds one unbroken
chain.

The *floor* is the oldest remembered block. A path that goes below it may still meet the chain's own past: `next_older`
names the block to put under the floor to find out. If that block is not available, or there is no room for more, the
chain was reset, and all remembered blocks are removed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

# Deeper than any reorganisation that we know of.
DEPTH = 256


class ChainBlock(msgspec.Struct, frozen=True, gc=False):
    """`head` is the notification for listeners. `has_logs`: its bloom filter reports some."""

    number: int
    hash: str
    parent: str
    head: bytes = b""
    has_logs: bool = False


class BrokenPath(ValueError):
    """Blocks that do not follow each other: the upstream is faulty or lies."""


class HeadChain:
    def __init__(self, depth: int = DEPTH) -> None:
        self._depth = depth
        self._blocks: deque[ChainBlock] = deque()
        self._by_hash: dict[str, ChainBlock] = {}

    def __repr__(self) -> str:
        tip = self.tip
        return f"<HeadChain of {len(self._blocks)}, tip {tip.number} {tip.hash[:10]}>" if tip else "<HeadChain empty>"

    @property
    def tip(self) -> ChainBlock | None:
        return self._blocks[-1] if self._blocks else None

    @property
    def floor(self) -> int:
        return self._blocks[0].number if self._blocks else 0

    def knows(self, block_hash: str) -> bool:
        """Whether the block is part of the remembered chain."""
        return block_hash in self._by_hash

    def at(self, number: int) -> ChainBlock | None:
        place = number - self.floor
        return self._blocks[place] if 0 <= place < len(self._blocks) else None

    def clear(self) -> None:
        self._blocks.clear()
        self._by_hash.clear()

    def next_missing(self, path: Sequence[ChainBlock]) -> str | None:
        """The hash of the block that has to come before this path; None if it can be applied."""
        first = path[0]
        if not self._blocks or first.parent in self._by_hash or first.number <= self.floor:
            return None
        return first.parent

    def next_older(self, path: Sequence[ChainBlock]) -> str | None:
        """The hash of the block under the floor, if a path reaches down to it without meeting the chain; otherwise None."""
        if not self._blocks or len(self._blocks) >= self._depth or path[0].parent in self._by_hash:
            return None
        first, floor = path[0], self._blocks[0]
        if (
            first.parent == floor.parent
            or not floor.number - self._depth < first.number <= floor.number
            or not floor.number
        ):
            return None
        return floor.parent

    def put_under(self, older: Sequence[ChainBlock]) -> None:
        """Remember more of the past: blocks, newest first, each the parent of the one before it; others are left out."""
        for block in older:
            floor = self._blocks[0] if self._blocks else None
            if floor is None or len(self._blocks) >= self._depth:
                return
            if block.hash == floor.parent and block.number == floor.number - 1:
                self._blocks.appendleft(block)
                self._by_hash[block.hash] = block

    def newest_first(self) -> Iterator[ChainBlock]:
        return reversed(self._blocks)

    def apply(self, path: Sequence[ChainBlock]) -> tuple[list[ChainBlock], list[ChainBlock]]:
        """The removed blocks, newest first, and the new ones, oldest first. Both are empty for a known path."""
        self._check(path)
        added = [block for block in path if block.hash not in self._by_hash]
        if not added:
            return [], []
        removed = []
        while self._blocks and self._blocks[-1].hash != added[0].parent:
            gone = self._blocks.pop()
            del self._by_hash[gone.hash]
            removed.append(gone)
        for block in added:
            self._append(block)
        return removed, added

    def _append(self, block: ChainBlock) -> None:
        self._blocks.append(block)
        self._by_hash[block.hash] = block
        if len(self._blocks) > self._depth:
            del self._by_hash[self._blocks.popleft().hash]

    def _check(self, path: Sequence[ChainBlock]) -> None:
        before = self._by_hash.get(path[0].parent)
        for block in path:
            if before is not None and (block.parent != before.hash or block.number != before.number + 1):
                raise BrokenPath(f"block {block.number} does not follow block {before.number}")
            before = block
