"""Find pending transactions of watched addresses.

The watcher polls one upstream for new transactions in its mempool, with a filter that exists only at that upstream. When the
filter expires or the upstream fails, it creates a filter at another. Not every transaction is seen: one that reaches a block
by another way was never in this mempool. Polling runs only while a webhook needs it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from proxy.chains.evm import activity, matching
from proxy.chains.evm.matching import MatchTransaction
from proxy.errors import Fault, Unavailable
from proxy.services.events.drafting import EventDrafter
from proxy.services.events.pending_filters import PendingFilters
from proxy.services.events.watch import WebhookWatch
from proxy.services.rpc.calls import RpcError
from proxy.store import events as store
from proxy.store.pool import PATIENT_S, Pool

log = logging.getLogger("penstock.events")

# The poll interval is a quarter of the block time within these bounds.
SHORTEST_S, LONGEST_S = 0.2, 1.0
# How often to check whether a webhook needs it.
IDLE_S, RETRY_S = 0.2, 2.0
# Transactions fetched in one batch, and the most handled per poll; further ones are left out.
BATCH, MAX_PER_POLL = 100, 5_000


class MempoolWatcher:
    def __init__(
        self,
        watch: WebhookWatch,
        drafter: EventDrafter,
        pool: Pool,
        filters: PendingFilters,
    ) -> None:
        self._watch = watch
        self._drafter = drafter
        self._network = drafter.network
        self._pool = pool
        self._filters = filters
        self._poll_s = min(max(self._network.facts.block_time_s / 4, SHORTEST_S), LONGEST_S)
        self._filter = ""
        # The version of the webhooks that was recorded as watched.
        self._recorded: int | None = None

    def __repr__(self) -> str:
        return f"<MempoolWatcher {self._network.id}{' watched' if self._filter else ''}>"

    async def run(self, is_leader: Callable[[], bool]) -> None:
        """Supervised loop. It works only while this process is the network's follower."""
        while True:
            if not is_leader() or not self._watch.index.has("pending"):
                await self._stop()
                await asyncio.sleep(IDLE_S)
                continue
            try:
                await self.poll()
                await asyncio.sleep(self._poll_s)
            except (Fault, RpcError, ValueError) as exc:
                await self._stop()
                log.warning("cannot read the mempool", extra={"network": self._network.id, "reason": str(exc)[:300]})
                await asyncio.sleep(RETRY_S)

    async def poll(self) -> None:
        """Handle the transactions that arrived since the last poll."""
        if not self._filter:
            self._filter = await self._filters.create()
        await self._record(self._watch.version)
        hashes = [each for each in await self._filters.changes(self._filter) if isinstance(each, str)][:MAX_PER_POLL]
        for first in range(0, len(hashes), BATCH):
            await self._write(await self._read(hashes[first : first + BATCH]))

    async def _stop(self) -> None:
        self._filter = ""
        try:
            await self._record(None)
        except Unavailable:
            pass

    async def _record(self, version: int | None) -> None:
        """Record for which webhooks the mempool is watched, so that their creation can wait for it."""
        if version != self._recorded:
            async with self._pool.connection(within_s=PATIENT_S) as connection:
                await store.set_mempool_watch(connection, self._network.id, version)
            self._recorded = version

    async def _read(self, hashes: Sequence[str]) -> list[MatchTransaction]:
        found = await self._filters.transactions(self._filter, hashes)
        return activity.read_transactions([each for each in found if isinstance(each, dict)])

    async def _write(self, transactions: list[MatchTransaction]) -> None:
        if not matching.matched_pending(self._watch.index.tables, transactions):
            return
        async with self._pool.connection(within_s=PATIENT_S) as connection, connection.transaction():
            await self._watch.hold(connection)
            matches = matching.matched_pending(self._watch.index.tables, transactions)
            await self._drafter.add(connection, self._drafter.events(matches))
