"""Transfers of coins inside transactions, which only a trace tells of.

Tracing is slow and not every upstream can do it, so the follower only notes which blocks are to be looked into, and only while
somebody watches. Each block is asked for in the cheapest way that the network's upstreams know: the whole block by geth's
tracer, the whole block by Parity's, or transaction by transaction. Its events and the end of its note are one transaction; a
block that the chain has dropped meanwhile has no note any more, and makes no events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from proxy.chains.evm import activity
from proxy.core import dialect, matching
from proxy.core.matching import Call
from proxy.errors import Fault
from proxy.services.events.bell import Bell, heard
from proxy.services.events.composing import CHANNEL
from proxy.services.events.composition import Composition
from proxy.services.events.watch import Watch
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.questions import Questions
from proxy.store import events as store
from proxy.store.events import Job
from proxy.store.pool import PATIENT_S, Pool

log = logging.getLogger("penstock.events")

# Notes that are looked at together.
BATCH = 8
LOOK_S, AGAIN_S = 20.0, 2.0
# So often a block is tried whose traces nobody has; then it is given up, and the log says so.
TRIES = 200
_TRACER = {"tracer": "callTracer"}
# What an upstream says that cannot do it at all.
_CANNOT: frozenset[dialect.Kind] = frozenset({"unsupported"})


class Tracing:
    def __init__(self, watch: Watch, composition: Composition, pool: Pool, questions: Questions) -> None:
        self._watch = watch
        self._composition = composition
        self._network = composition.network
        self._pool = pool
        self._questions = questions
        self._ways: tuple[Callable[[Job], Awaitable[list[Call]]], ...] = (
            self._by_tracer,
            self._by_list,
            self._one_by_one,
        )

    def __repr__(self) -> str:
        return f"<Tracing {self._network.id} by {self._ways[0].__name__}>"

    async def run(self, bell: Bell, leads: Callable[[], bool]) -> None:
        """A supervised loop, while this process is the network's follower."""
        wake = bell.of(CHANNEL, self._network.id)
        while True:
            wake.clear()
            again = False
            if leads():
                again = not await self.look()
            await heard(wake, AGAIN_S if again else LOOK_S)
            if again:
                await asyncio.sleep(AGAIN_S)

    async def look(self) -> bool:
        """All notes that there are; whether they could be done."""
        while True:
            async with self._pool.connection(within_s=PATIENT_S) as connection:
                jobs = await store.jobs(connection, self._network.id, limit=BATCH)
            for job in jobs:
                try:
                    await self._write(job, await self._calls(job))
                except (Fault, RpcError, ValueError, KeyError, TypeError) as exc:
                    await self._fail(job, str(exc))
                    return False
            if len(jobs) < BATCH:
                return True

    async def _write(self, job: Job, calls: list[Call]) -> None:
        async with self._pool.connection(within_s=PATIENT_S) as connection, connection.transaction():
            await self._watch.hold(connection)
            if not await store.end_job(connection, self._network.id, job):
                return
            matches = matching.matched_calls(self._watch.index.tables, calls)
            new = self._composition.events(matches, block=job.block, block_hash=job.hash)
            await self._composition.add(connection, new)

    async def _fail(self, job: Job, reason: str) -> None:
        log.warning(
            "a block is not traced",
            extra={"network": self._network.id, "block": job.block, "tries": job.tries, "reason": reason[:300]},
        )
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            if job.tries < TRIES:
                await store.count_try(connection, self._network.id, job)
                return
            log.error("no traces are to be had, transfers are missed", extra={"network": self._network.id})
            await store.end_job(connection, self._network.id, job)

    async def _calls(self, job: Job) -> list[Call]:
        """By the first way that works; that one is tried first from then on."""
        for place, way in enumerate(self._ways):
            try:
                found = await way(job)
            except RpcError as exc:
                if place + 1 < len(self._ways) and dialect.classify(exc.error).kind in _CANNOT:
                    continue
                raise
            self._ways = self._ways[place:] + self._ways[:place]
            return found
        raise AssertionError  # the last way returns or raises

    async def _by_tracer(self, job: Job) -> list[Call]:
        block = "0x" + job.hash.hex()
        traces = await self._questions.ask(self._network, "debug_traceBlockByHash", block, _TRACER, fresh=True)
        return [call for each in traces for call in activity.calls_of_tree(each["txHash"], each["result"])]

    async def _by_list(self, job: Job) -> list[Call]:
        traces = await self._questions.ask(self._network, "trace_block", hex(job.block), fresh=True)
        if any(trace["blockHash"] != "0x" + job.hash.hex() for trace in traces):
            raise ValueError("the traces are another block's")
        return activity.calls_of_list(traces)

    async def _one_by_one(self, job: Job) -> list[Call]:
        block = await self._questions.ask(self._network, "eth_getBlockByHash", "0x" + job.hash.hex(), False)
        if block is None:
            raise ValueError("the block is not there")
        found: list[Call] = []
        for name in block["transactions"]:
            tree = await self._questions.ask(self._network, "debug_traceTransaction", name, _TRACER, fresh=True)
            found += activity.calls_of_tree(name, tree)
        return found
