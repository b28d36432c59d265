"""Transfers of coins inside transactions, which only a trace tells of.

Tracing is slow (see services/rpc/traces), so the follower only notes which blocks are to be looked into, and only while
somebody watches. A block's events and the end of its note are one transaction; a block that the chain has dropped meanwhile has
no note any more, and makes no events. While upstreams are away notes wait, however long that is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from proxy.chains.evm import matching
from proxy.chains.evm.matching import InternalTransfer
from proxy.core import dialect
from proxy.errors import Fault
from proxy.services.events.drafting import EventDrafter
from proxy.services.events.enrichment import CHANNEL
from proxy.services.events.notifications import Notifications
from proxy.services.events.watch import WebhookWatch
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.traces import MalformedTrace, TraceReader
from proxy.store import events as store
from proxy.store.events import TraceJob
from proxy.store.pool import PATIENT_S, Pool
from proxy.tasks import until_set

log = logging.getLogger("penstock.events")

# Notes that are looked at together.
BATCH = 8
LOOK_S, AGAIN_S = 20.0, 2.0
# So often a block is tried whose traces upstreams say they do not have, or that cannot be read; then it is given up, and the
# log says so.
TRIES = 200


class InternalTransfers:
    def __init__(self, watch: WebhookWatch, composition: EventDrafter, pool: Pool, traces: TraceReader) -> None:
        self._watch = watch
        self._composition = composition
        self._network = composition.network
        self._pool = pool
        self._traces = traces

    def __repr__(self) -> str:
        return f"<InternalTransfers {self._traces!r}>"

    async def run(self, bell: Notifications, leads: Callable[[], bool]) -> None:
        """A supervised loop, while this process is the network's follower."""
        wake = bell.of(CHANNEL, self._network.id)
        while True:
            wake.clear()
            again = False
            if leads():
                again = not await self.look()
            await until_set(wake, within_s=AGAIN_S if again else LOOK_S)
            if again:
                await asyncio.sleep(AGAIN_S)

    async def look(self) -> bool:
        """All notes that there are; whether they could be done."""
        while True:
            async with self._pool.connection(within_s=PATIENT_S) as connection:
                jobs = await store.jobs(connection, self._network.id, limit=BATCH)
            for job in jobs:
                try:
                    await self._write(job, await self._traces.calls(job.block, job.hash))
                except (Fault, RpcError, MalformedTrace) as exc:
                    await self._fail(job, str(exc), counts=not _is_theirs(exc))
                    return False
            if len(jobs) < BATCH:
                return True

    async def _write(self, job: TraceJob, calls: list[InternalTransfer]) -> None:
        async with self._pool.connection(within_s=PATIENT_S) as connection, connection.transaction():
            await self._watch.hold(connection)
            if not await store.end_job(connection, self._network.id, job):
                return
            matches = matching.matched_calls(self._watch.index.tables, calls)
            new = self._composition.events(matches, block=job.block, block_hash=job.hash)
            await self._composition.add(connection, new)

    async def _fail(self, job: TraceJob, reason: str, *, counts: bool) -> None:
        log.warning(
            "a block is not traced",
            extra={"network": self._network.id, "block": job.block, "tries": job.tries, "reason": reason[:300]},
        )
        if not counts:
            return
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            if job.tries < TRIES:
                await store.count_try(connection, self._network.id, job)
                return
            log.error("no traces are to be had, transfers are missed", extra={"network": self._network.id})
            await store.end_job(connection, self._network.id, job)


def _is_theirs(exc: Fault | RpcError | MalformedTrace) -> bool:
    """Whether nobody answers, or an upstream has trouble of its own: that passes. Else it is the block, or its traces."""
    if isinstance(exc, RpcError):
        return dialect.classify(exc.error).blame
    return isinstance(exc, Fault)
