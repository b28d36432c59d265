"""From the last block that was told to a new head, over every block between: the steps of `core/head_chain` with the
fetching."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from proxy.core.head_chain import BrokenPath, ChainBlock, HeadChain
from proxy.services.feed.blocks import BlockSource, BlockUnavailable
from proxy.wire.upstream import Upstream

# Blocks of a gap that are fetched and told together.
STRIDE = 32

OnChange = Callable[[Sequence[ChainBlock], Sequence[ChainBlock]], None]


class ChainWalk:
    """`on_change` is told what was taken back, newest first, and what is new, oldest first: after that the chain holds it."""

    def __init__(self, blocks: BlockSource, on_change: OnChange, guide: HeadChain | None = None) -> None:
        """The guide is a chain that was walked before: where it knows the way, it is not asked for again."""
        self.chain = HeadChain()
        self._blocks = blocks
        self._on_change = on_change
        self._guide = guide or self.chain

    def __repr__(self) -> str:
        return f"<ChainWalk {self.chain!r}>"

    async def towards(self, head: ChainBlock, source: Upstream | None = None) -> bool:
        """One stride; whether the head is reached. Unanswered where a block between cannot be had."""
        if self.chain.knows(head.hash):
            return True
        tip = self.chain.tip
        if tip is None or head.number - tip.number <= STRIDE:
            await self._connect(head, source)
            return True
        await self._connect(await self._at(tip.number + STRIDE, source), source)
        return False

    async def begin(self, number: int) -> None:
        """The first block of the chain."""
        await self._connect(await self._at(number, None), None)

    async def _at(self, number: int, source: Upstream | None) -> ChainBlock:
        return self._guide.at(number) or await self._blocks.by_number(number, source)

    async def _connect(self, head: ChainBlock, source: Upstream | None) -> None:
        tip = self.chain.tip
        if tip is not None and head.number - tip.number > 2:
            await self._blocks.warm(range(tip.number + 1, head.number), source)
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
        """Put one more block in front of the path, or under the chain; whether there is more to do."""
        if (missing := self.chain.next_missing(path)) is not None:
            parent = await self._blocks.by_hash(missing, source)
            if parent.number != path[0].number - 1:
                raise BlockUnavailable(f"block {path[0].number} does not follow block {parent.number}")
            path.appendleft(parent)
            return True
        if (older := self.chain.next_older(path)) is not None:
            floor = self.chain.floor
            try:
                self.chain.put_under([await self._blocks.by_hash(older, source)])
            except BlockUnavailable:
                return False  # Nobody has the old blocks any more: a reset.
            return self.chain.floor < floor
        return False
