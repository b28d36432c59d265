"""Write the events of blocks in the follower's transaction (see services/follower/sinks).

Whether a block is read with its transactions or with all its logs depends on the webhooks, which may change between reading
and writing. If the data read is not enough, the follower reads the block again. Nothing here calls an upstream: missing data
is added later (see `enrichment`).
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.chains.evm import activity, matching
from proxy.chains.evm.facts import TOPICS, BlockFacts
from proxy.chains.evm.matching import MatchBlock
from proxy.services.events.drafting import EventDrafter
from proxy.services.events.watch import WebhookWatch
from proxy.services.follower.sinks import StaleRead
from proxy.store.postgres import events as store
from proxy.store.postgres import trace_jobs
from proxy.store.postgres.blocks import BlockId, Followed
from proxy.store.postgres.events import NewEvent
from proxy.store.postgres.pool import DatabaseConnection

_NONE: frozenset[str] = frozenset()


class EventSink:
    """Writes the events of one network."""

    def __init__(self, watch: WebhookWatch, drafter: EventDrafter) -> None:
        self._watch = watch
        self._drafter = drafter

    def __repr__(self) -> str:
        return f"<EventSink {self._watch!r}>"

    # Data to read

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
        return self._watch.index.has("activity", "mined", "log") or self._watch.index.has_selectors

    @property
    def receipts(self) -> bool:
        return False

    # Writing

    async def write(self, connection: DatabaseConnection, network: Followed, facts: Sequence[BlockFacts]) -> None:
        await self._watch.hold(connection)
        if not self.blocks:
            await store.release(connection, network.id, facts[-1].last)
            return
        self._check(facts)
        new: list[NewEvent] = []
        for piece in facts:
            new += self._events(piece)
        await self._drafter.add(connection, new)
        if self._watch.index.has("internal"):
            await trace_jobs.add(connection, network.id, [(piece.last, piece.hash) for piece in facts])
        await store.release(connection, network.id, facts[-1].last)

    def _check(self, facts: Sequence[BlockFacts]) -> None:
        """Raise StaleRead if the blocks were read with less data than the webhooks need now."""
        for piece in facts:
            header = piece.header
            if header is None or (self.topics is None and not piece.has_all_logs):
                raise StaleRead
            if self.transactions and not activity.is_whole(header):
                raise StaleRead

    def _events(self, piece: BlockFacts) -> list[NewEvent]:
        assert piece.header is not None
        transactions = activity.transactions_of(piece.header) if self.transactions else ()
        matches = matching.matched(self._watch.index.tables, MatchBlock(transactions, piece.transfers, piece.logs))
        return self._drafter.events(
            matches, block=piece.last, block_hash=piece.hash, header=piece.header, time=piece.time
        )

    async def undo(
        self, connection: DatabaseConnection, network: Followed, stays: BlockId, removed: Sequence[BlockId]
    ) -> None:
        await self._watch.hold(connection)
        withdrawn = await store.withdraw(connection, network.id, stays.number)
        await self._drafter.correct(connection, withdrawn)

    async def settle(self, connection: DatabaseConnection, network: Followed, below: int) -> None:
        """Nothing to do: no data is kept only for reorganisations."""

    async def forget(self, connection: DatabaseConnection, network: Followed) -> None:
        await store.reset(connection, network.id)
