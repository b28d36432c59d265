"""Transactions of watched addresses while they wait to be included.

An upstream is asked for what is new in its mempool, by a filter that lives there: who polls it must go back to the same
upstream, and begins with another when that one forgets or fails. Nobody promises that every transaction is seen there: what
comes by another way into a block never was in this mempool. Only while somebody watches.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from proxy.chains.evm import activity, matching
from proxy.chains.evm.matching import MatchTransaction
from proxy.errors import Fault
from proxy.services.events.drafting import EventDrafter
from proxy.services.events.pending_filters import PendingFilters
from proxy.services.events.watch import WebhookWatch
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.store.pool import PATIENT_S, Pool

log = logging.getLogger("penstock.events")

# How often the mempool is looked at, by the time between blocks.
SHORTEST_S, LONGEST_S = 0.2, 1.0
IDLE_S, AGAIN_S = 2.0, 2.0
# Hashes that are asked for together; of more than so many in one look the rest is left out.
AT_ONCE, MOST = 100, 5_000


class MempoolWatcher:
    def __init__(
        self,
        watch: WebhookWatch,
        composition: EventDrafter,
        pool: Pool,
        internal_calls: InternalCalls,
        pinned: PendingFilters,
    ) -> None:
        self._watch = watch
        self._composition = composition
        self._network = composition.network
        self._pool = pool
        self._internal_calls = internal_calls
        self._pinned = pinned
        self._poll_s = min(max(self._network.facts.block_time_s / 4, SHORTEST_S), LONGEST_S)
        self._filter = ""

    def __repr__(self) -> str:
        return f"<MempoolWatcher {self._network.id}{' watched' if self._filter else ''}>"

    async def run(self, leads: Callable[[], bool]) -> None:
        """A supervised loop, while this process is the network's follower."""
        while True:
            if not leads() or not self._watch.index.has("pending"):
                self._filter = ""
                await asyncio.sleep(IDLE_S if self._poll_s > SHORTEST_S else self._poll_s)
                continue
            try:
                await self.look()
                await asyncio.sleep(self._poll_s)
            except (Fault, RpcError, ValueError) as exc:
                self._filter = ""
                log.warning("no mempool is seen", extra={"network": self._network.id, "reason": str(exc)[:300]})
                await asyncio.sleep(AGAIN_S)

    async def look(self) -> None:
        """What is new since the last look."""
        if not self._filter:
            self._filter = await self._pinned.make()
        hashes = [each for each in await self._pinned.changes(self._filter) if isinstance(each, str)][:MOST]
        for first in range(0, len(hashes), AT_ONCE):
            await self._write(await self._read(hashes[first : first + AT_ONCE]))

    async def _read(self, hashes: Sequence[str]) -> list[MatchTransaction]:
        calls = [("eth_getTransactionByHash", [each]) for each in hashes]
        found = await self._internal_calls.call_many(self._network, calls)
        return activity.read_transactions([each for each in found if isinstance(each, dict)])

    async def _write(self, transactions: list[MatchTransaction]) -> None:
        if not matching.matched_pending(self._watch.index.tables, transactions):
            return
        async with self._pool.connection(within_s=PATIENT_S) as connection, connection.transaction():
            await self._watch.hold(connection)
            matches = matching.matched_pending(self._watch.index.tables, transactions)
            await self._composition.add(connection, self._composition.events(matches))
