"""`eth_getLogs` over more blocks than an upstream accepts: split into pieces and joined in order.

The whole range is sent first. Only if the upstream refuses it is the range split: into pieces of the size that the refusal
names, or of the configured size. A piece that is refused again is halved. A few pieces are in flight at a time. If one fails,
the whole call fails, because a caller must never take part of the logs for all of them. A range that needs too many pieces, or
whose logs are too large, is refused with a range that is likely to work.
"""

from __future__ import annotations

import asyncio
import itertools
import time

from proxy.chains.evm import log_range
from proxy.chains.evm.log_range import LogRange
from proxy.core import dialect
from proxy.errors import Fault, InternalError, UpstreamTimeout
from proxy.services.rpc.calls import PendingReply, RpcError, call_upstream
from proxy.services.rpc.dispatcher import Dispatcher
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.networks import Route
from proxy.settings import RpcSettings as Limits
from proxy.tasks import Tasks
from proxy.wire.upstream import MAX_REPLY_BYTES

AT_ONCE = 4
# Dense chains can refuse any range: at this size the refusal is passed on.
SMALLEST = 1
# Upper bounds on what one call's price pays for: pieces, and calls to upstreams including those for halves.
MAX_PIECES = 1000
MAX_CALLS = 4 * MAX_PIECES
_serial = itertools.count(1)


class LogQueries:
    def __init__(self, tasks: Tasks, limits: Limits) -> None:
        self._tasks = tasks
        self._limits = limits

    def serve(self, route: Route) -> None:
        route.dispatcher.on_split = lambda flight, error: self.split(route.dispatcher, flight, error)

    def split(self, dispatcher: Dispatcher, flight: Flight, error: bytes) -> bool:
        """Take over a call whose range was refused, if it can be split."""
        # Only logs are the sum of their pieces. A filter is a single object, and traces may be addressed by their index.
        if not flight.policy.by_range:
            return False
        tip = dispatcher.state.heads.tip
        whole = log_range.parse(flight.params, tip)
        if whole is None or whole.blocks <= SMALLEST:
            return False
        if whole.first <= tip < whole.last:  # There are no logs beyond the head.
            whole = whole.part(whole.first, tip)
        chunk = self._chunk(whole, error)
        most = min(self._limits.max_logs_blocks, chunk * MAX_PIECES)
        if whole.blocks > most:
            dispatcher.land_error(flight, log_range.refusal(whole.first, whole.first + most - 1))
            return True
        query = SplitLogQuery(dispatcher, flight, whole, chunk)
        self._tasks.start(f"logs {next(_serial)}", lambda: _run(dispatcher, flight, query))
        return True

    def _chunk(self, whole: LogRange, error: bytes) -> int:
        """The size that the refusal names; else the configured size, or half of the range if that is less."""
        named = log_range.allowed_blocks(dialect.classify(error).message)
        if named is not None and named < whole.blocks:
            return named
        return min(self._limits.logs_chunk_blocks, (whole.blocks + 1) // 2)


async def _run(dispatcher: Dispatcher, flight: Flight, query: SplitLogQuery) -> None:
    outcome = await _outcome(dispatcher, flight, query)
    if flight.done:
        return  # Its waiters have left.
    match outcome:
        case bytes():
            dispatcher.land(flight, outcome)
        case RpcError():
            dispatcher.land_error(flight, outcome.error)
        case Fault():
            dispatcher.land_fault(flight, outcome)


async def _outcome(dispatcher: Dispatcher, flight: Flight, query: SplitLogQuery) -> bytes | RpcError | Fault:
    """Collect the pieces within the deadline of the whole call."""
    limit_s = dispatcher.call_timeout_s
    try:
        async with asyncio.timeout(max(0.0, flight.began + limit_s - time.monotonic())):
            return await query.collect()
    except (RpcError, Fault) as exc:
        return exc
    except ValueError:
        return InternalError("an upstream sent logs that are not an array")
    except TimeoutError:
        return UpstreamTimeout(f"the logs did not arrive within {limit_s:g} s: request fewer blocks")


class SplitLogQuery:
    """A call in pieces: those that are left, and the logs of the others."""

    def __init__(self, dispatcher: Dispatcher, flight: Flight, whole: LogRange, chunk: int) -> None:
        self._dispatcher = dispatcher
        self._flight = flight
        self._whole = whole
        # In reverse order: the next piece is popped from the end.
        self._left = list(whole.chunks(chunk))[::-1]
        self._logs: dict[int, bytes] = {}
        self._bytes = 0
        self._blocks = 0
        self._calls = 0
        self._workers = 0

    def __repr__(self) -> str:
        return f"<SplitLogQuery of {self._whole.blocks} blocks: {self._blocks} received, {len(self._left)} pieces left>"

    async def collect(self) -> bytes:
        try:
            async with asyncio.TaskGroup() as group:
                self._start_workers(group)
        except BaseExceptionGroup as failed:
            # The first failure: it cancelled the other workers.
            raise failed.exceptions[0] from None
        return log_range.merge(logs for _, logs in sorted(self._logs.items()))

    def _start_workers(self, group: asyncio.TaskGroup) -> None:
        for _ in range(min(AT_ONCE - self._workers, len(self._left))):
            self._workers += 1
            group.create_task(self._work(group))

    async def _work(self, group: asyncio.TaskGroup) -> None:
        """Request pieces until none is left."""
        while self._left:
            part = self._left.pop()
            pending = self._call(part)
            try:
                logs = await pending.result()
            except RpcError as exc:
                if dialect.classify(exc.error).kind != "range_too_large" or (halves := part.halves()) is None:
                    raise
                self._left += reversed(halves)
                self._start_workers(group)
            else:
                self._take(part, logs)
        self._workers -= 1

    def _take(self, part: LogRange, logs: bytes) -> None:
        self._logs[part.first] = logs
        self._blocks += part.blocks
        self._bytes += len(logs)
        if self._bytes > MAX_REPLY_BYTES:
            raise self._too_large()

    def _call(self, part: LogRange) -> PendingReply:
        """Request one piece, in a separate flight that is not split again."""
        whole = self._flight
        if whole.done:
            raise InternalError("the caller has left")
        self._calls += 1
        if self._calls > MAX_CALLS:
            raise self._too_large()
        return call_upstream(
            self._dispatcher,
            whole.policy,
            part.params(),
            least_head=min(part.last, self._dispatcher.state.heads.tip),
            archive=whole.archive,
            is_piece=True,
            client=whole.client,
        )

    def _too_large(self) -> RpcError:
        """A refusal that suggests half of the blocks received so far: that is likely to work."""
        fewer = max(self._blocks // 2, 1)
        return RpcError(log_range.refusal(self._whole.first, self._whole.first + fewer - 1))
