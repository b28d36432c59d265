"""Find pending transactions of watched addresses.

The watcher polls one upstream for new transactions in its mempool, with a filter that exists only at that upstream. When the
filter expires or the upstream fails, it creates a filter at another. A filter reports a transaction once, so transactions that
cannot be read or written at the moment are kept. Not every transaction is seen: one that reaches a block by another way was
never in this mempool. Polling runs only while a webhook needs it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Callable, Sequence

import msgspec

from proxy.chains.evm import activity, matching
from proxy.chains.evm.matching import MatchTransaction
from proxy.core import jsonrpc
from proxy.errors import Fault, Unavailable
from proxy.services.events.drafting import EventDrafter
from proxy.services.events.pending_filters import PendingFilters
from proxy.services.events.watch import WebhookWatch
from proxy.services.rpc.calls import RpcError
from proxy.store.postgres import events as store
from proxy.store.postgres.bad_rows import BadRows
from proxy.store.postgres.pool import PATIENT_S, Pool

log = logging.getLogger("penstock.events")

# The poll interval is a quarter of the block time within these bounds.
SHORTEST_S, LONGEST_S = 0.2, 1.0
# How often to check whether a webhook needs it, and the pause after a failure.
IDLE_S, RETRY_S = 0.2, 0.5
# Failures in a row before a filter is given up, and errors before transactions are: an overloaded upstream fails now and then.
TRIES = 3
# Transactions fetched in one batch, and the most that wait; further ones are left out.
BATCH, MAX_WAITING = 100, 5_000
_HASH = re.compile("0x[0-9a-fA-F]{64}")


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
        # Transactions that were reported and not handled yet.
        self._waiting: list[str] = []
        # Consecutive failures of the filter, and errors in reading the transactions that are next.
        self._failures = 0
        self._errors = 0
        self._bad = BadRows("pending_transaction")
        # The version of the webhooks that was recorded as watched, and when.
        self._recorded: int | None = None
        self._recorded_at = -math.inf

    def __repr__(self) -> str:
        return f"<MempoolWatcher {self._network.id}{' watched' if self._filter else ''}>"

    async def run(self, is_leader: Callable[[], bool]) -> None:
        """Supervised loop. It works only while this process is the network's follower."""
        while True:
            if not is_leader() or not self._watch.index.has("pending"):
                self._waiting = []
                await self._stop()
                await asyncio.sleep(IDLE_S)
                continue
            try:
                await self.poll()
                await asyncio.sleep(self._poll_s)
            except (Fault, RpcError, ValueError) as exc:
                if not self._filter:
                    await self._stop()
                log.warning("cannot read the mempool", extra={"network": self._network.id, "reason": str(exc)[:300]})
                await asyncio.sleep(RETRY_S)

    async def poll(self) -> None:
        """Handle the transactions that arrived since the last poll."""
        if not self._filter:
            self._filter = await self._filters.create()
        await self._record(self._watch.version)
        self._waiting = [*self._waiting, *await self._changes()][:MAX_WAITING]
        while self._waiting:
            await self._handle(self._waiting[:BATCH])
            del self._waiting[:BATCH]
            self._errors = 0

    async def _changes(self) -> list[str]:
        """The new transactions. A filter is given up if the upstream does not have it, or fails several times."""
        try:
            hashes = [each for each in await self._filters.changes(self._filter) if _is_hash(each)]
        except (Fault, RpcError, ValueError) as exc:
            self._failures += 1
            if self._failures >= TRIES or not isinstance(exc, Fault):
                self._filter = ""
            raise
        self._failures = 0
        return hashes

    async def _handle(self, hashes: Sequence[str]) -> None:
        """Create the events of these transactions. Those for which the upstream returns errors are given up in the end."""
        try:
            transactions = await self._read(hashes)
        except (RpcError, ValueError):
            self._errors += 1
            if self._errors < TRIES:
                raise
            log.warning("pending transactions could not be read", extra={"network": self._network.id})
            return
        await self._bad.write(transactions, self._write)

    async def _stop(self) -> None:
        self._filter = ""
        self._failures = 0
        try:
            await self._record(None)
        except Unavailable:
            pass

    async def _record(self, version: int | None) -> None:
        """Record for which webhooks the mempool is watched, so that their owners can see it, and confirm that now and then."""
        now = time.monotonic()
        if version != self._recorded or (version is not None and now - self._recorded_at >= store.CONFIRM_S):
            async with self._pool.connection(within_s=PATIENT_S) as connection:
                await store.set_mempool_watch(connection, self._network.id, version)
            self._recorded, self._recorded_at = version, now

    async def _read(self, hashes: Sequence[str]) -> list[MatchTransaction]:
        read = list[MatchTransaction]()
        for each in await self._filters.transactions(self._filter, hashes):
            if each != jsonrpc.NULL:
                with self._bad.skipped():
                    read += activity.decoded_transactions([msgspec.Raw(each)])
        return read

    async def _write(self, transactions: Sequence[MatchTransaction]) -> None:
        if not matching.matched_pending(self._watch.index.tables, transactions):
            return
        async with self._pool.connection(within_s=PATIENT_S) as connection, connection.transaction():
            await self._watch.hold(connection)
            matches = matching.matched_pending(self._watch.index.tables, transactions)
            await self._drafter.add(connection, self._drafter.events(matches))


def _is_hash(given: object) -> bool:
    return isinstance(given, str) and _HASH.fullmatch(given) is not None
