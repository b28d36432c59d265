"""Walk from the last published block to a new head over every block in between, fetching the blocks that `core/head_chain`
needs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from proxy.chains.evm.head_reader import UNKNOWN_PARENT
from proxy.core.head_chain import BrokenPath, ChainBlock, HeadChain
from proxy.services.feed.blocks import BlockSource, BlockUnavailable
from proxy.wire.upstream import Upstream

# Blocks of a gap that are fetched and published together.
STRIDE = 32

OnChange = Callable[[Sequence[ChainBlock], Sequence[ChainBlock]], None]


class ChainWalk:
    """Calls `on_change` after each change of the chain, with the removed blocks (newest first) and the added ones (oldest
    first)."""

    def __init__(self, blocks: BlockSource, on_change: OnChange, guide: HeadChain | None = None) -> None:
        """`guide` is a chain that was walked before. Its blocks are not fetched again."""
        self.chain = HeadChain()
        self._blocks = blocks
        self._on_change = on_change
        self._guide = guide or self.chain

    def __repr__(self) -> str:
        return f"<ChainWalk {self.chain!r}>"

    async def towards(self, head: ChainBlock, source: Upstream | None = None) -> bool:
        """Walk one stride and return whether the head is reached. Raises BlockUnavailable if a block in between is missing."""
        if self.chain.knows(head.hash):
            return True
        tip = self.chain.tip
        if tip is None or head.number - tip.number <= STRIDE:
            await self._connect(head, source)
            return True
        await self._connect(await self._at(tip.number + STRIDE, source), source)
        return False

    async def begin(self, number: int) -> None:
        """Start the chain at this block."""
        await self._connect(await self._at(number, None), None)

    async def _at(self, number: int, source: Upstream | None) -> ChainBlock:
        return self._guide.at(number) or await self._blocks.by_number(number, source)

    async def _connect(self, head: ChainBlock, source: Upstream | None) -> None:
        tip = self.chain.tip
        if tip is not None and head.number - tip.number > 2:
            await self._blocks.prefetch(range(tip.number + 1, head.number), source)
        path = deque([head])
        while await self._reach_back(path, source):
            pass
        try:
            removed, added = self.chain.apply(path)
        except BrokenPath as exc:
            raise BlockUnavailable(str(exc)) from exc
        if added:
            self._on_change(removed, added)

    async def _reach_back(self, path: deque[ChainBlock], source: Upstream | None) -> bool:
        """Put one more block in front of the path or under the chain, and return whether there is more to do."""
        first = path[0]
        if first.parent == UNKNOWN_PARENT and first.number:
            before = await self._blocks.by_number(first.number - 1, source)
            path[0] = first = msgspec.structs.replace(first, parent=before.hash)
        if (missing := self.chain.next_missing(path)) is not None:
            parent = await self._blocks.by_hash(missing, source)
            if parent.number != first.number - 1:
                raise BlockUnavailable(f"block {first.number} does not follow block {parent.number}")
            path.appendleft(parent)
            return True
        if (older := self.chain.next_older(path)) is not None:
            floor = self.chain.floor
            try:
                self.chain.put_under([await self._blocks.by_hash(older, source)])
            except BlockUnavailable:
                return False  # No upstream has the old blocks any more: the chain was reset.
            return self.chain.floor < floor
        return False
