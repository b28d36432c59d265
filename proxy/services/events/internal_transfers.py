"""Find transfers of the native coin inside transactions, which only traces show.

Tracing is slow (see services/rpc/traces), so the follower only stores a trace job for each block, and only while a webhook
needs it. A block's events and the end of its job are one transaction. When the chain drops a block, its job is removed and
it makes no events. While upstreams are unavailable, jobs wait as long as necessary.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from proxy.chains.evm import matching
from proxy.chains.evm.matching import InternalTransfer
from proxy.core import upstream_errors
from proxy.errors import Fault
from proxy.services.events.drafting import EventDrafter
from proxy.services.events.enrichment import CHANNEL
from proxy.services.events.notifications import Notifications
from proxy.services.events.watch import WebhookWatch
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.traces import MalformedTrace, TraceReader
from proxy.store.postgres import events as store
from proxy.store.postgres.bad_rows import BadRows, is_bad_row
from proxy.store.postgres.events import TraceJob
from proxy.store.postgres.pool import PATIENT_S, Pool
from proxy.tasks import until_set

log = logging.getLogger("penstock.events")

# Jobs fetched together, and the most that may fail in one pass: upstreams that cannot trace are not asked for every block.
BATCH = 8
CHECK_S, RETRY_S = 20.0, 2.0
# Attempts at a block whose traces upstreams do not have, or that cannot be parsed. Then the job is dropped and logged.
TRIES = 200


class InternalTransfers:
    def __init__(self, watch: WebhookWatch, drafter: EventDrafter, pool: Pool, traces: TraceReader) -> None:
        self._watch = watch
        self._drafter = drafter
        self._network = drafter.network
        self._pool = pool
        self._traces = traces
        self._bad = BadRows("trace")

    def __repr__(self) -> str:
        return f"<InternalTransfers {self._traces!r}>"

    async def run(self, notifications: Notifications, is_leader: Callable[[], bool]) -> None:
        """Supervised loop. It works only while this process is the network's follower."""
        wake = notifications.event_for(CHANNEL, self._network.id)
        while True:
            wake.clear()
            has_failed = False
            if is_leader():
                has_failed = not await self.trace()
            await until_set(wake, within_s=RETRY_S if has_failed else CHECK_S)
            if has_failed:
                await asyncio.sleep(RETRY_S)

    async def trace(self) -> bool:
        """Process all trace jobs and return whether all succeeded. Blocks that cannot be traced come last, so that they do not
        hold up the others."""
        failed = set[int]()
        while True:
            async with self._pool.connection(within_s=PATIENT_S) as connection:
                jobs = await store.jobs(connection, self._network.id, limit=BATCH)
            for job in jobs:
                if job.block in failed:
                    return False
                try:
                    await self._write(job, await self._traces.calls(job.block, job.hash))
                except Exception as exc:
                    if is_bad := is_bad_row(exc) and not isinstance(exc, RpcError | MalformedTrace):
                        self._bad.set_aside(exc, block=job.block)
                    elif not isinstance(exc, Fault | RpcError | MalformedTrace):
                        raise
                    counts = is_bad or not _is_temporary(exc)
                    await self._fail(job, str(exc), counts=counts)
                    failed.add(job.block)
                    if not counts or len(failed) == BATCH:
                        return False
            if len(jobs) < BATCH:
                return not failed

    async def _write(self, job: TraceJob, calls: list[InternalTransfer]) -> None:
        async with self._pool.connection(within_s=PATIENT_S) as connection, connection.transaction():
            await self._watch.hold(connection)
            if not await store.end_job(connection, self._network.id, job):
                return
            matches = matching.matched_calls(self._watch.index.tables, calls)
            new = self._drafter.events(matches, block=job.block, block_hash=job.hash)
            await self._drafter.add(connection, new)

    async def _fail(self, job: TraceJob, reason: str, *, counts: bool) -> None:
        log.warning(
            "cannot trace a block",
            extra={"network": self._network.id, "block": job.block, "tries": job.tries, "reason": reason[:300]},
        )
        if not counts:
            return
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            if job.tries < TRIES:
                await store.count_try(connection, self._network.id, job)
                return
            log.error(
                "gave up tracing a block: webhooks miss its internal transfers",
                extra={"network": self._network.id, "block": job.block},
            )
            await store.end_job(connection, self._network.id, job)


def _is_temporary(exc: Exception) -> bool:
    """Whether the upstreams have a problem, which passes. Otherwise the cause is the block or its traces."""
    if isinstance(exc, RpcError):
        return upstream_errors.classify(exc.error).blame
    return isinstance(exc, Fault)
