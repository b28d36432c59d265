"""The follower's part: the events of its blocks, in its own transaction (see services/follower/sinks).

What a block needs to be read for, its transactions or all its logs, depends on who watches, and that may change between the
reading and the writing. Then what was read is not enough, and the follower is told to read again. What is not known yet of an
event is found out later, by others: nothing here asks anybody.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.chains.evm import activity, matching
from proxy.chains.evm.facts import TOPICS, BlockFacts
from proxy.chains.evm.matching import MatchBlock
from proxy.services.events.drafting import EventDrafter
from proxy.services.events.watch import WebhookWatch
from proxy.services.follower.sinks import StaleRead
from proxy.store import events as store
from proxy.store.blocks import BlockMark, Followed
from proxy.store.events import NewEvent
from proxy.store.pool import DatabaseConnection

_NONE: frozenset[str] = frozenset()


class EventSink:
    """Of one network."""

    def __init__(self, watch: WebhookWatch, composition: EventDrafter) -> None:
        self._watch = watch
        self._composition = composition

    def __repr__(self) -> str:
        return f"<EventSink {self._watch!r}>"

    # What is to be read

    @property
    def topics(self) -> frozenset[str] | None:
        index = self._watch.index
        if index.has("log"):
            return None
        return TOPICS if index.has("activity", "token", "nft") else _NONE

    @property
    def blocks(self) -> bool:
        return len(self._watch.index) > 0

    @property
    def transactions(self) -> bool:
        return self._watch.index.has("activity", "mined", "log")

    # What is written

    async def write(self, connection: DatabaseConnection, network: Followed, found: Sequence[BlockFacts]) -> None:
        await self._watch.hold(connection)
        if not self.blocks:
            await store.release(connection, network.id, found[-1].last)
            return
        self._check(found)
        new: list[NewEvent] = []
        for piece in found:
            new += self._events(piece)
        await self._composition.add(connection, new)
        if self._watch.index.has("internal"):
            await store.add_jobs(connection, network.id, [(piece.last, piece.hash) for piece in found])
        await store.release(connection, network.id, found[-1].last)

    def _check(self, found: Sequence[BlockFacts]) -> None:
        """That what was read is what is wanted now."""
        for piece in found:
            header = piece.header
            if header is None or (self.topics is None and not piece.has_all_logs):
                raise StaleRead
            if self.transactions and not activity.is_whole(header):
                raise StaleRead

    def _events(self, piece: BlockFacts) -> list[NewEvent]:
        assert piece.header is not None
        transactions = activity.transactions_of(piece.header) if self.transactions else ()
        matches = matching.matched(self._watch.index.tables, MatchBlock(transactions, piece.transfers, piece.logs))
        return self._composition.events(
            matches, block=piece.last, block_hash=piece.hash, header=piece.header, time=piece.time
        )

    async def undo(
        self, connection: DatabaseConnection, network: Followed, stays: BlockMark, removed: Sequence[BlockMark]
    ) -> None:
        await self._watch.hold(connection)
        gone = await store.withdraw(connection, network.id, stays.number)
        await store.add(connection, network.id, self._composition.corrections(gone))

    async def settle(self, connection: DatabaseConnection, network: Followed, below: int) -> None:
        """Nothing is kept for taking back that is not kept anyway."""

    async def forget(self, connection: DatabaseConnection, network: Followed) -> None:
        await store.reset(connection, network.id)
