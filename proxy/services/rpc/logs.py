"""`eth_getLogs` over more blocks than an upstream gives at once: split, asked in pieces, joined in order.

The upstream is asked for the whole first. Only when it refuses the range does this room cut it: at the size that the refusal
names, else at ours, and a piece that is refused again is halved. A few pieces are under way at a time; one that fails, fails
the whole: a caller must never take part of the logs for all of them. What would take too many pieces, or comes to too many
bytes, is refused with a range that is likely to work.
"""

from __future__ import annotations

import asyncio
import itertools
import time

from proxy.chains.evm import log_range
from proxy.chains.evm.log_range import LogRange
from proxy.core import dialect
from proxy.errors import Fault, InternalError, UpstreamTimeout
from proxy.services.rpc.calls import PendingReply, RpcError
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.networks import Route
from proxy.settings import RpcSettings as Limits
from proxy.tasks import Tasks
from proxy.wire.upstream import MAX_REPLY_BYTES

AT_ONCE = 4
# A dense chain can refuse any size: below this many blocks the refusal is passed on.
SMALLEST = 1
# One call's price pays for no more calls to upstreams than this, those for halves counted.
MOST_PIECES = 1000
MOST_ASKED = 4 * MOST_PIECES
_serial = itertools.count(1)


class LogQueries:
    def __init__(self, tasks: Tasks, limits: Limits) -> None:
        self._tasks = tasks
        self._limits = limits

    def serve(self, route: Route) -> None:
        route.on_split = self.split

    def split(self, flight: Flight, error: bytes) -> bool:
        """Take over a call whose range was refused, if it can be cut; its waiters are answered here."""
        # Only logs are the sum of their pieces: a filter is one, and traces may be asked for by their place in the whole.
        if not flight.policy.by_range:
            return False
        tip = flight.route.heads.tip
        asked = log_range.parse(flight.params, tip)
        if asked is None or asked.blocks <= SMALLEST:
            return False
        if asked.first <= tip < asked.last:  # Beyond the head there is nothing to be cut.
            asked = asked.part(asked.first, tip)
        chunk = self._chunk(asked, error)
        most = min(self._limits.max_logs_blocks, chunk * MOST_PIECES)
        if asked.blocks > most:
            flight.land_error(log_range.refusal(asked.first, asked.first + most - 1))
            return True
        self._tasks.start(f"logs {next(_serial)}", lambda: _answer(flight, SplitLogQuery(flight, asked, chunk)))
        return True

    def _chunk(self, asked: LogRange, error: bytes) -> int:
        """The size that the refusal names; without one ours, or half of what was asked."""
        named = log_range.allowed_blocks(dialect.classify(error).message)
        if named is not None and named < asked.blocks:
            return named
        return min(self._limits.logs_chunk_blocks, (asked.blocks + 1) // 2)


async def _answer(flight: Flight, split: SplitLogQuery) -> None:
    outcome = await _outcome(flight, split)
    if flight.done:
        return  # Nobody waits any more.
    match outcome:
        case bytes():
            flight.land(outcome)
        case RpcError():
            flight.land_error(outcome.error)
        case Fault():
            flight.land_fault(outcome)


async def _outcome(flight: Flight, split: SplitLogQuery) -> bytes | RpcError | Fault:
    """The pieces have the time that the whole has."""
    limit_s = flight.route.call_timeout_s
    try:
        async with asyncio.timeout(max(0.0, flight.began + limit_s - time.monotonic())):
            return await split.collect()
    except (RpcError, Fault) as exc:
        return exc
    except ValueError:
        return InternalError("an upstream sent logs that are no array")
    except TimeoutError:
        return UpstreamTimeout(f"the logs did not come within {limit_s:g} s: ask for fewer blocks")


class SplitLogQuery:
    """One question in pieces: those that are left, and what has come of the others."""

    def __init__(self, flight: Flight, asked: LogRange, chunk: int) -> None:
        self._flight = flight
        self._asked = asked
        # The next one last.
        self._left = list(asked.chunks(chunk))[::-1]
        self._logs: dict[int, bytes] = {}
        self._bytes = 0
        self._blocks = 0
        self._calls = 0
        self._askers = 0

    def __repr__(self) -> str:
        return f"<SplitLogQuery of {self._asked.blocks} blocks: {self._blocks} here, {len(self._left)} pieces left>"

    async def collect(self) -> bytes:
        try:
            async with asyncio.TaskGroup() as group:
                self._start_askers(group)
        except BaseExceptionGroup as failed:
            # The first that failed: the others were cancelled for it.
            raise failed.exceptions[0] from None
        return log_range.merge(logs for _, logs in sorted(self._logs.items()))

    def _start_askers(self, group: asyncio.TaskGroup) -> None:
        for _ in range(min(AT_ONCE - self._askers, len(self._left))):
            self._askers += 1
            group.create_task(self._ask_on(group))

    async def _ask_on(self, group: asyncio.TaskGroup) -> None:
        """Piece after piece, until none is left."""
        while self._left:
            part = self._left.pop()
            asked = self._ask(part)
            try:
                logs = await asked.result()
            except RpcError as exc:
                if dialect.classify(exc.error).kind != "range_too_large" or (halves := part.halves()) is None:
                    raise
                self._left += reversed(halves)
                self._start_askers(group)
            else:
                self._take(part, logs)
        self._askers -= 1

    def _take(self, part: LogRange, logs: bytes) -> None:
        self._logs[part.first] = logs
        self._blocks += part.blocks
        self._bytes += len(logs)
        if self._bytes > MAX_REPLY_BYTES:
            raise self._too_much()

    def _ask(self, part: LogRange) -> PendingReply:
        """One piece, as a flight of its own that is not cut again on the way."""
        whole = self._flight
        if whole.done:
            raise InternalError("nobody waits for these logs any more")
        self._calls += 1
        if self._calls > MOST_ASKED:
            raise self._too_much()
        pending = PendingReply()
        now = time.monotonic()
        flight = Flight(whole.route, whole.policy, part.params(), pending, now)
        flight.is_piece = True
        flight.archive = whole.archive
        flight.least_head = min(part.last, whole.route.heads.tip)
        pending.flight = flight
        whole.route.launch(flight, now)
        return pending

    def _too_much(self) -> RpcError:
        """Half of the blocks that were too many is likely to work."""
        fewer = max(self._blocks // 2, 1)
        return RpcError(log_range.refusal(self._asked.first, self._asked.first + fewer - 1))
