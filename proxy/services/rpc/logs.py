"""`eth_getLogs` over more blocks than an upstream gives at once: split, asked in pieces, joined in order.

The upstream is asked for the whole first. Only when it refuses the range does this room cut it: at the size that the refusal
names, else at ours, and a piece that is refused again is halved. A few pieces are under way at a time; one that fails, fails
the whole: a caller must never take part of the logs for all of them.
"""

from __future__ import annotations

import asyncio
import itertools
import time

from proxy.core import dialect, logrange
from proxy.core.logrange import LogRange
from proxy.errors import Fault, InternalError, UpstreamTimeout
from proxy.process import Tasks
from proxy.services.rpc.calls import Pending, RpcError
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.networks import Route
from proxy.settings import Rpc as Limits

AT_ONCE = 4
# A dense chain can refuse any size: below this many blocks the refusal is passed on.
SMALLEST = 1
_serial = itertools.count(1)


class Logs:
    def __init__(self, tasks: Tasks, limits: Limits) -> None:
        self._tasks = tasks
        self._limits = limits

    def serve(self, route: Route) -> None:
        route.on_split = self.split

    def split(self, flight: Flight, error: bytes) -> bool:
        """Take over a call whose range was refused, if it can be cut; its waiters are answered here."""
        asked = logrange.parse(flight.params, flight.route.heads.tip)
        if asked is None or asked.blocks <= SMALLEST:
            return False
        if asked.blocks > self._limits.max_logs_blocks:
            flight.land_error(logrange.refusal(asked.first, asked.first + self._limits.max_logs_blocks - 1))
            return True
        chunk = self._chunk(asked, error)
        self._tasks.start(f"logs {next(_serial)}", lambda: self._answer(flight, asked, chunk))
        return True

    def _chunk(self, asked: LogRange, error: bytes) -> int:
        """The size that the refusal names; without one ours, or half of what was asked."""
        named = logrange.narrowed(asked, dialect.classify(error).message)
        if named is not None and 0 < named.blocks < asked.blocks:
            return named.blocks
        return min(self._limits.logs_chunk_blocks, (asked.blocks + 1) // 2)

    async def _answer(self, flight: Flight, asked: LogRange, chunk: int) -> None:
        outcome = await self._outcome(flight, asked, chunk)
        if flight.done:
            return  # Nobody waits any more.
        match outcome:
            case bytes():
                flight.land(outcome)
            case RpcError():
                flight.land_error(outcome.error)
            case Fault():
                flight.land_fault(outcome)

    async def _outcome(self, flight: Flight, asked: LogRange, chunk: int) -> bytes | RpcError | Fault:
        """The pieces have the time that the whole has."""
        limit_s = flight.route.call_timeout_s
        try:
            async with asyncio.timeout(max(0.0, flight.began + limit_s - time.monotonic())):
                return await self._collect(flight, asked, chunk, asyncio.Semaphore(AT_ONCE))
        except (RpcError, Fault) as exc:
            return exc
        except ValueError:
            return InternalError("an upstream sent logs that are no array")
        except TimeoutError:
            return UpstreamTimeout(f"the logs did not come within {limit_s:g} s: ask for fewer blocks")

    async def _collect(self, flight: Flight, asked: LogRange, chunk: int, gate: asyncio.Semaphore) -> bytes:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._part(flight, part, gate)) for part in asked.chunks(chunk)]
        except BaseExceptionGroup as failed:
            # The first that failed: the others were cancelled for it.
            raise failed.exceptions[0] from None
        return logrange.merge(task.result() for task in tasks)

    async def _part(self, flight: Flight, part: LogRange, gate: asyncio.Semaphore) -> bytes:
        try:
            async with gate:
                if flight.done:
                    raise InternalError("nobody waits for these logs any more")
                return await _ask(flight, part).result()
        except RpcError as exc:
            if dialect.classify(exc.error).kind != "range_too_large" or part.blocks <= SMALLEST:
                raise
        return await self._collect(flight, part, (part.blocks + 1) // 2, gate)


def _ask(whole: Flight, part: LogRange) -> Pending:
    """One piece, as a flight of its own that is not cut again on the way."""
    pending = Pending()
    now = time.monotonic()
    flight = Flight(whole.route, whole.plan, part.params(), pending, now)
    flight.is_piece = True
    flight.archive = whole.archive
    flight.least_head = min(part.last, whole.route.heads.tip)
    pending.flight = flight
    whole.route.launch(flight, now)
    return pending
