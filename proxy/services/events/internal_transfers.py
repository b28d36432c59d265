"""The events of coins that move inside transactions. The follower's tracer finds these (see services/follower/block_tracer)."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.chains.evm import matching
from proxy.chains.evm.matching import InternalTransfer
from proxy.services.events.drafting import EventDrafter
from proxy.services.events.watch import WebhookWatch
from proxy.store.postgres.pool import DatabaseConnection
from proxy.store.postgres.trace_jobs import TraceJob


class InternalTransferEvents:
    def __init__(self, watch: WebhookWatch, drafter: EventDrafter) -> None:
        self._watch = watch
        self._drafter = drafter

    def __repr__(self) -> str:
        return f"<InternalTransferEvents {self._watch!r}>"

    async def hold(self, connection: DatabaseConnection) -> None:
        await self._watch.hold(connection)

    async def write_calls(
        self, connection: DatabaseConnection, network: str, job: TraceJob, calls: Sequence[InternalTransfer]
    ) -> None:
        matches = matching.matched_calls(self._watch.index.tables, calls)
        await self._drafter.add(connection, self._drafter.events(matches, block=job.block, block_hash=job.hash))
