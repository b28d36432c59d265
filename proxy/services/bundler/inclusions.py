"""The follower's sink that records which operations a block executed, and which a reorganisation reverted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from proxy.chains.evm import operations
from proxy.chains.evm.facts import BlockFacts
from proxy.chains.evm.operations import IncludedOperation
from proxy.chains.registry import Registry
from proxy.store.postgres import operations as store_room
from proxy.store.postgres.blocks import BlockId, Followed
from proxy.store.postgres.pool import DatabaseConnection


class InclusionSink:
    topics: frozenset[str] | None = frozenset((operations.INCLUDED,))
    blocks = False
    transactions = False
    receipts = False

    def __init__(self, chains: Registry) -> None:
        # Any contract can emit such an event: only those of an EntryPoint count.
        self._entry_points: Mapping[str, frozenset[bytes]] = {
            network.id: frozenset(bytes.fromhex(text[2:]) for text in network.chain.entry_points.values())
            for network in chains.networks()
        }

    async def write(self, connection: DatabaseConnection, network: Followed, facts: Sequence[BlockFacts]) -> None:
        events = self.events_of(network.id, facts)
        if events:
            await store_room.mark_included(connection, network.id, events)

    def events_of(self, network: str, facts: Sequence[BlockFacts]) -> list[IncludedOperation]:
        trusted = self._entry_points.get(network, frozenset())
        events = (operations.included(log) for piece in facts for log in piece.logs)
        return [event for event in events if event is not None and event.position.contract in trusted]

    async def undo(
        self, connection: DatabaseConnection, network: Followed, stays: BlockId, removed: Sequence[BlockId]
    ) -> None:
        await store_room.take_back(connection, network.id, stays.number)

    async def settle(self, connection: DatabaseConnection, network: Followed, below: int) -> None:
        """This sink keeps no data for reverting blocks."""

    async def forget(self, connection: DatabaseConnection, network: Followed) -> None:
        await store_room.take_back(connection, network.id, -1)
