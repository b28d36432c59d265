"""Trace blocks for the coins that move inside their transactions, which only traces show.

Tracing is slow (see services/rpc/traces), so the follower only stores a trace job for each block, and only while something
needs it. All writers of a block's internal transfers and the end of its job are one transaction. When the chain drops a block,
its job is removed. While upstreams are unavailable, jobs wait as long as necessary.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from proxy.chains.evm.matching import InternalTransfer
from proxy.core import upstream_errors
from proxy.errors import Fault
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.traces import MalformedTrace, TraceReader
from proxy.store.postgres import trace_jobs
from proxy.store.postgres.bad_rows import BadRows, is_bad_row
from proxy.store.postgres.pool import PATIENT_S, DatabaseConnection, Pool
from proxy.store.postgres.trace_jobs import TraceJob
from proxy.tasks import until_set

log = logging.getLogger("penstock.follower")

# Jobs fetched together, and the most that may fail in one pass: upstreams that cannot trace are not asked for every block.
BATCH = 8
CHECK_S, RETRY_S = 20.0, 2.0
# Attempts at a block whose traces upstreams do not have, or that cannot be parsed. Then the job is dropped and logged.
TRIES = 200


class TraceWriter(Protocol):
    """Writes the internal transfers of a block."""

    async def hold(self, connection: DatabaseConnection) -> None:
        """Take the locks that must be taken before that of the job."""

    async def write_calls(
        self, connection: DatabaseConnection, network: str, job: TraceJob, calls: Sequence[InternalTransfer]
    ) -> None: ...


class BlockTracer:
    """Traces the blocks of one network whose jobs are in this database."""

    def __init__(self, network: str, pool: Pool, traces: TraceReader, writers: Sequence[TraceWriter]) -> None:
        self._network = network
        self._pool = pool
        self._traces = traces
        self._writers = writers
        self._bad = BadRows("trace")

    def __repr__(self) -> str:
        return f"<BlockTracer {self._traces!r}>"

    async def run(self, wake: asyncio.Event, is_leader: Callable[[], bool], *, check_s: float = CHECK_S) -> None:
        """Supervised loop. It works only while this process is the network's follower."""
        while True:
            wake.clear()
            has_failed = False
            if is_leader():
                has_failed = not await self.trace()
            await until_set(wake, within_s=RETRY_S if has_failed else check_s)
            if has_failed:
                await asyncio.sleep(RETRY_S)

    async def trace(self) -> bool:
        """Process all trace jobs and return whether all succeeded. Blocks that cannot be traced come last, so that they do not
        hold up the others."""
        failed = set[int]()
        while True:
            async with self._pool.connection(within_s=PATIENT_S) as connection:
                jobs = await trace_jobs.waiting(connection, self._network, limit=BATCH)
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
            for writer in self._writers:
                await writer.hold(connection)
            if not await trace_jobs.finish(connection, self._network, job):
                return
            for writer in self._writers:
                await writer.write_calls(connection, self._network, job, calls)

    async def _fail(self, job: TraceJob, reason: str, *, counts: bool) -> None:
        log.warning(
            "cannot trace a block",
            extra={"network": self._network, "block": job.block, "tries": job.tries, "reason": reason[:300]},
        )
        if not counts:
            return
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            if job.tries < TRIES:
                await trace_jobs.count_try(connection, self._network, job)
                return
            log.error(
                "gave up tracing a block: its internal transfers are missing in webhooks and in the history",
                extra={"network": self._network, "block": job.block},
            )
            await trace_jobs.finish(connection, self._network, job)


def _is_temporary(exc: Exception) -> bool:
    """Whether the upstreams have a problem, which passes. Otherwise the cause is the block or its traces."""
    if isinstance(exc, RpcError):
        return upstream_errors.classify(exc.error).blame
    return isinstance(exc, Fault)
