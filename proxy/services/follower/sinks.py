"""What is made of the facts: each sink writes its part in the follower's own transaction.

A sink may count on this: blocks come in order, each once, and none is left out. What it writes stands or falls with the
cursor. When the chain drops blocks, `undo` takes back all above the last one that stays, before the new ones come. Once a
block is `settled` it stays for good. A sink must not talk to anything but the connection it is given: the transaction waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from proxy import telemetry
from proxy.chains.evm.facts import TOPICS, BlockFacts
from proxy.core.holdings import HoldingChanges
from proxy.store import holdings
from proxy.store.blocks import BlockMark, Followed
from proxy.store.pool import DatabaseConnection


class StaleRead(Exception):
    """What a sink wants has changed since the blocks were read: they are to be read again, and the transaction is undone."""


class FollowerSink(Protocol):
    """`topics`: the first topics of the logs it wants; None: all logs. `blocks`: whether it wants every block alone, with its
    header; without such a sink old blocks come in ranges. `transactions`: whether headers come with whole transactions. All of
    these may change at any time."""

    @property
    def topics(self) -> frozenset[str] | None: ...
    @property
    def blocks(self) -> bool: ...
    @property
    def transactions(self) -> bool: ...

    async def write(self, connection: DatabaseConnection, network: Followed, found: Sequence[BlockFacts]) -> None:
        """Facts of blocks, in order. One with a header may be undone later, a range never is."""

    async def undo(
        self, connection: DatabaseConnection, network: Followed, stays: BlockMark, removed: Sequence[BlockMark]
    ) -> None:
        """The blocks `removed`, the newest first, are gone; `stays` is the newest that is left."""

    async def settle(self, connection: DatabaseConnection, network: Followed, below: int) -> None:
        """Blocks below this one will not be undone. Not told for every block, but for each at some time."""

    async def forget(self, connection: DatabaseConnection, network: Followed) -> None:
        """The network is begun anew: as if none of its blocks had ever come."""


class HoldingsSink:
    """Who holds what."""

    topics: frozenset[str] | None = TOPICS
    blocks = False
    transactions = False

    async def write(self, connection: DatabaseConnection, network: Followed, found: Sequence[BlockFacts]) -> None:
        whole = HoldingChanges()
        packed = []
        for piece in found:
            if piece.header is None:
                whole.add(piece.transfers)
            else:
                changes = HoldingChanges()
                changes.add(piece.transfers)
                whole.include(changes)
                if len(changes):
                    packed.append((piece.last, changes.pack()))
            telemetry.odd_logs_total.labels(network.id).inc(piece.odd)
            telemetry.transfers_total.labels(network.id).inc(len(piece.transfers))
        await holdings.add(connection, network.number, whole)
        await holdings.record_changes(connection, network.number, packed)

    async def undo(
        self, connection: DatabaseConnection, network: Followed, stays: BlockMark, removed: Sequence[BlockMark]
    ) -> None:
        await holdings.take_back(connection, network.number, stays.number)

    async def settle(self, connection: DatabaseConnection, network: Followed, below: int) -> None:
        await holdings.delete_changes_below(connection, network.number, below)

    async def forget(self, connection: DatabaseConnection, network: Followed) -> None:
        await holdings.delete_network(connection, network.number)


def topics_of(sinks: Sequence[FollowerSink]) -> frozenset[str] | None:
    """All that anybody wants to see."""
    found: set[str] = set()
    for sink in sinks:
        if sink.topics is None:
            return None
        found |= sink.topics
    return frozenset(found)
