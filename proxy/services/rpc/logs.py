"""`eth_getLogs` and `trace_filter` over more blocks, addresses or topics than an upstream accepts or has: split into pieces and
joined in order, none left out and none twice.

The whole range is sent first. Only if the upstream refuses it is the range split: into pieces of the size that the refusal
names, or of the configured size. A piece that is refused again is halved. If a refusal is about addresses or topics, the
longest of these lists is halved instead. A few pieces are in flight at a time. If one fails,
the whole call fails, because a caller must never take part of the logs for all of them. A range that needs too many pieces, or
whose logs are too large, is refused with a range that is likely to work.

The call has paid for one upstream call, which was the refused one. Each piece is charged at the list price before it is
requested (`services/accounts/metering.py`), and waits for the account's units to be refilled. A range whose pieces the account
cannot pay for in time is refused at once.

An upstream omits the logs of blocks that it does not have yet, without an error. So where a range ends beyond the head that was
last seen, the upstreams are polled first, and each piece must come from one that has the piece's last block.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

from proxy.chains.evm import log_range
from proxy.chains.evm.log_range import LogRange
from proxy.chains.family import BlockRef
from proxy.core import upstream_errors
from proxy.core.access import Key
from proxy.errors import Fault, InternalError, RateLimited, Unavailable, UpstreamTimeout
from proxy.services.accounts.metering import Meter, Meters
from proxy.services.rpc.calls import PendingReply, RpcError, call_upstream
from proxy.services.rpc.dispatcher import Dispatcher
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.tracker import Tracker
from proxy.settings import RpcSettings as Limits
from proxy.tasks import Tasks, report_failure
from proxy.wire.upstream import MAX_REPLY_BYTES, Upstream

AT_ONCE = 4
# Dense chains can refuse any range: at this size the refusal is passed on.
SMALLEST = 1
# Upper bounds on the work of one call: pieces, and calls to upstreams including those for halves.
MAX_PIECES = 1000
MAX_CALLS = 4 * MAX_PIECES
_serial = itertools.count(1)
# The part of a call's time in which its pieces may be paid for: one that is paid for at the end would come too late.
PAYING_PART = 0.9


@dataclass(slots=True)
class PiecePayments:
    """Pays for the pieces of one call. `free`: pieces that are not charged, because the call has paid for them or because we
    need them ourselves. `units`: the price of the pieces that were requested."""

    meter: Meter
    price: int
    free: int = 0
    units: int = 0

    async def pay(self) -> None:
        if self.free:
            self.free -= 1
            return
        await self.meter.pay(self.price)
        self.units += self.price

    def not_requested(self) -> None:
        """A piece was paid for, and its caller has left meanwhile."""
        if self.units:
            self.units -= self.price
            self.meter.unused(self.price)


Collect = Callable[[PiecePayments | None], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class RangeQuery:
    """A call that can be split: its range, and the part of the joined results that it asks for."""

    range: LogRange
    after: int = 0
    count: int | None = None
    of_traces: bool = False

    @classmethod
    def of(cls, flight: Flight, tip: int) -> RangeQuery | None:
        """The query of a call; None if it cannot be split."""
        query = log_range.parse(flight.params, tip)
        if query is None or flight.policy.method.data != "traces":
            return None if query is None else cls(query)
        # Nodes differ in the block where a range of traces without a beginning begins.
        paged = query.unpaged() if b'"fromBlock"' in flight.params else None
        return None if paged is None else cls(*paged, of_traces=True)

    def halves(self, part: LogRange, error: bytes) -> tuple[LogRange, LogRange] | None:
        """Two parts in place of one that was refused; None if it cannot be divided."""
        return (self.filter_halves(part, error) if self.is_by_filter(error) else None) or part.halves()

    def is_by_filter(self, error: bytes) -> bool:
        """Whether a refusal is about the addresses or topics."""
        return log_range.is_about_filter(upstream_errors.classify(error).message)

    def filter_halves(self, part: LogRange, error: bytes) -> tuple[LogRange, LogRange] | None:
        return part.filter_halves() if self.is_by_filter(error) else None

    def places(self, results: bytes) -> list[tuple[log_range.Place, bytes]]:
        """The results of a part, each with its place in the whole."""
        return log_range.trace_places(results) if self.of_traces else log_range.places(results)


class LogQueries:
    """The queries of one network. `tracker`: polls the heads at the moment of a call."""

    def __init__(self, tasks: Tasks, limits: Limits, tracker: Tracker, meters: Meters) -> None:
        self._tasks = tasks
        self._limits = limits
        self._tracker = tracker
        self._meters = meters

    def __repr__(self) -> str:
        return f"<LogQueries of {self._tracker.network_id}>"

    def split(self, dispatcher: Dispatcher, flight: Flight, error: bytes) -> bool:
        """Take over a call whose range was refused, if it can be split."""
        # Only logs and traces are the sum of their pieces. A filter is a single object.
        if not flight.policy.by_range:
            return False
        whole = RangeQuery.of(flight, dispatcher.state.heads.tip)
        if whole is None or whole.halves(whole.range, error) is None:
            return False
        self._start(dispatcher, flight, lambda paying: self._split(dispatcher, flight, whole, error, paying))
        return True

    def complete(self, dispatcher: Dispatcher, flight: Flight, result: bytes, upstream: Upstream) -> None:
        """Take over a call whose result may lack the last blocks: its upstream was not known to have them. The second call is
        not charged: it makes up for the upstream."""
        had = upstream.health.head
        self._start(dispatcher, flight, lambda paying: self._complete(dispatcher, flight, result, had, paying), free=1)

    def _start(self, dispatcher: Dispatcher, flight: Flight, collect: Collect, *, free: int = 0) -> None:
        self._tasks.start_once("logs", lambda: self._run(dispatcher, flight, collect, free=free), of=next(_serial))

    async def _run(self, dispatcher: Dispatcher, flight: Flight, collect: Collect, *, free: int) -> None:
        paying = self._payments(dispatcher, flight, free)
        outcome = await _outcome(dispatcher, flight, partial(collect, paying))
        if paying is not None:
            _charge(flight, outcome, paying)
        if flight.done:
            return  # Its waiters have left.
        match outcome:
            case bytes():
                dispatcher.complete(flight, outcome)
            case RpcError():
                dispatcher.complete_with_error(flight, outcome.error)
            case Fault():
                dispatcher.complete_with_fault(flight, outcome)

    def _payments(self, dispatcher: Dispatcher, flight: Flight, free: int) -> PiecePayments | None:
        """None for our own calls."""
        if flight.call.payer is None:
            return None
        price = dispatcher.state.price(flight.policy, flight.params)
        if isinstance(flight.call.payer, Meter):
            return PiecePayments(flight.call.payer, price, free)
        within_s = flight.began + PAYING_PART * dispatcher.call_timeout_s - time.monotonic()
        return PiecePayments(self._meters.open(flight.call.payer, within_s=within_s), price, free)

    async def _split(
        self,
        dispatcher: Dispatcher,
        flight: Flight,
        query: RangeQuery,
        error: bytes,
        paying: PiecePayments | None,
    ) -> bytes:
        if query.range.last >= dispatcher.state.heads.tip:
            newest = await self._tracker.newest()
            query = _up_to(newest, RangeQuery.of(flight, newest) or query)
        whole = query.range
        if query.filter_halves(whole, error) is not None:
            return await SplitLogQuery(dispatcher, flight, query, whole.blocks, paying).collect(error)
        chunk = self._chunk(whole, error)
        most = min(self._limits.max_logs_blocks, chunk * MAX_PIECES)
        if whole.blocks > most:
            raise RpcError(log_range.refusal(whole.first, whole.first + most - 1))
        if paying is not None and whole.blocks > chunk * (most := paying.meter.affords(paying.price)):
            reason = f"it takes {-(-whole.blocks // chunk)} upstream calls of {paying.price} compute units each"
            raise _unaffordable(whole, chunk * most // 2, reason)
        return await SplitLogQuery(dispatcher, flight, query, chunk, paying).collect()

    async def _complete(
        self,
        dispatcher: Dispatcher,
        flight: Flight,
        result: bytes,
        had: int,
        paying: PiecePayments | None,
    ) -> bytes:
        """The result, unless an upstream has more of the blocks than the one that sent it."""
        query = RangeQuery.of(flight, dispatcher.state.heads.tip)
        if query is None:
            return result
        newest = await self._tracker.newest()
        if had >= min(query.range.last, newest):
            return result
        blocks = query.range.blocks
        return await SplitLogQuery(dispatcher, flight, _up_to(newest, query), blocks, paying).collect()

    def _chunk(self, whole: LogRange, error: bytes) -> int:
        """The size that the refusal names; else the configured size, or half of the range if that is less."""
        named = log_range.allowed_blocks(upstream_errors.classify(error).message)
        if named is not None and named < whole.blocks:
            return named
        return min(self._limits.logs_chunk_blocks, (whole.blocks + 1) // 2)


def _up_to(newest: int, query: RangeQuery) -> RangeQuery:
    """There are no logs beyond the newest block."""
    whole = query.range
    return replace(query, range=whole.part(whole.first, newest)) if whole.first <= newest < whole.last else query


def _charge(flight: Flight, outcome: bytes | RpcError | Fault, paying: PiecePayments) -> None:
    """Count the pieces in the price of the call, or in the account's usage if its callers have left. A request with a meter of
    its own counts them itself."""
    if not isinstance(flight.call.payer, Key):
        return
    units = paying.meter.settle(paying.units)
    flight.add_cost(paying.meter.cost)
    flight.on_waited(paying.meter.waited_s)
    flight.charge(flight.call.payer, units, outcome if isinstance(outcome, Fault) else None)


def _unaffordable(whole: LogRange, blocks: int, reason: str) -> RpcError:
    """A refusal that suggests as many blocks as the account can pay for."""
    last = whole.first + min(max(blocks, 1), whole.blocks) - 1
    return RpcError(log_range.limit_refusal(whole.first, last, f"this account's rate does not allow it: {reason}"))


async def _outcome(
    dispatcher: Dispatcher, flight: Flight, collect: Callable[[], Awaitable[bytes]]
) -> bytes | RpcError | Fault:
    """Collect the logs within the deadline of the whole call."""
    limit_s = dispatcher.call_timeout_s
    try:
        async with asyncio.timeout(max(0.0, flight.began + limit_s - time.monotonic())):
            return await collect()
    except (RpcError, Fault) as exc:
        return exc
    except ValueError:
        return InternalError("an upstream sent logs that are not an array", reason="upstream")
    except TimeoutError:
        return UpstreamTimeout(f"the logs did not arrive within {limit_s:g} s: request fewer blocks")
    except Exception as exc:
        report_failure("logs", exc, None)
        return InternalError("internal error; the logs were not collected")


class SplitLogQuery:
    """A call in pieces: those that are left, and the logs of the others."""

    def __init__(
        self, dispatcher: Dispatcher, flight: Flight, query: RangeQuery, chunk: int, paying: PiecePayments | None
    ) -> None:
        """`paying`: None for our own calls."""
        self._paying = paying
        self._dispatcher = dispatcher
        self._flight = flight
        self._query = query
        self._whole = whole = query.range
        # In reverse order: the next piece is popped from the end.
        self._left = list(whole.chunks(chunk))[::-1]
        self._reorgs = dispatcher.state.reorgs
        # The logs of the pieces by their first block, or, once filters were divided, by the place of each log.
        self._logs: dict[int, bytes] = {}
        self._placed: dict[log_range.Place, bytes] = {}
        self._is_by_filter = False
        self._bytes = 0
        self._blocks = 0
        self._calls = 0
        self._workers = 0

    def __repr__(self) -> str:
        return f"<SplitLogQuery of {self._whole.blocks} blocks: {self._blocks} received, {len(self._left)} pieces left>"

    async def collect(self, error: bytes = b"") -> bytes:
        """`error`: the refusal of the whole, if its filter is to be divided."""
        if error:
            self._divide(self._left.pop(), error)
        try:
            async with asyncio.TaskGroup() as group:
                self._start_workers(group)
        except BaseExceptionGroup as failed:
            # The first failure: it cancelled the other workers.
            raise failed.exceptions[0] from None
        state = self._dispatcher.state
        if state.reorgs != self._reorgs and self._whole.last > state.heads.final:
            raise Unavailable("the chain was reorganised while its logs were read: try again")
        merged = await self._merged()
        await asyncio.sleep(0)  # Megabytes are joined in one step, then cached and sent in another.
        return log_range.page(merged, self._query.after, self._query.count)

    async def _merged(self) -> bytes:
        """The results of all pieces in order, each once."""
        logs, self._logs = self._logs, {}
        if not self._is_by_filter:
            return log_range.merge(each for _, each in sorted(logs.items()))
        for each in logs.values():
            self._placed.update(self._query.places(each))
            await asyncio.sleep(0)
        return log_range.in_order(self._placed)

    def _divide(self, part: LogRange, error: bytes) -> bool:
        """Put two parts in place of a refused one. Returns False if it cannot be divided."""
        halves = self._query.halves(part, error)
        if halves is None:
            return False
        self._is_by_filter |= self._query.filter_halves(part, error) is not None
        self._left += reversed(halves)
        return True

    def _start_workers(self, group: asyncio.TaskGroup) -> None:
        for turns in range(min(AT_ONCE - self._workers, len(self._left))):
            self._workers += 1
            group.create_task(self._work(group, turns))

    async def _work(self, group: asyncio.TaskGroup, turns: int) -> None:
        """Request pieces until none is left. Workers begin a turn apart: each piece copies the filter, which may be large."""
        for _ in range(turns):
            await asyncio.sleep(0)
        while self._left:
            part = self._left.pop()
            try:
                logs, answered_by = await self._piece(part)
            except RpcError as exc:
                if upstream_errors.classify(exc.error).kind != "range_too_large" or not self._divide(part, exc.error):
                    raise
                self._start_workers(group)
            else:
                self._check(part, answered_by)
                self._take(part, logs)
                await asyncio.sleep(0)
        self._workers -= 1

    async def _piece(self, part: LogRange) -> tuple[bytes, Upstream | None]:
        """The logs of a piece, in its account's turn and paid for, and the upstream that they came from."""
        if self._paying is None:
            return await _answer_of(self._call(part))
        async with self._paying.meter.pieces:
            try:
                await self._paying.pay()
            except RateLimited:
                reason = f"{self._blocks} of {self._whole.blocks} blocks were read when its compute units ran out"
                raise _unaffordable(self._whole, self._blocks, reason) from None
            return await _answer_of(self._call(part))

    def _check(self, part: LogRange, upstream: Upstream | None) -> None:
        """An upstream that does not have the last block of the piece has left out its logs."""
        if upstream is None or upstream.health.head < part.last:
            raise Unavailable(f"no upstream has all logs up to block {part.last} at the moment: try again")

    def _take(self, part: LogRange, logs: bytes) -> None:
        if self._is_by_filter:
            self._placed.update(self._query.places(logs))
        else:
            self._logs[part.first] = logs
        self._blocks = min(self._blocks + part.blocks, self._whole.blocks)
        self._bytes += len(logs)
        if self._bytes > MAX_REPLY_BYTES:
            raise self._too_large()

    def _call(self, part: LogRange) -> PendingReply:
        """Request one piece, in a separate flight that is not split again."""
        whole = self._flight
        if whole.done:
            if self._paying is not None:
                self._paying.not_requested()
            raise InternalError("the caller has left")
        self._calls += 1
        if self._calls > MAX_CALLS:
            raise self._too_large()
        # Its first block says how old it is. Reading that from the params would take a millisecond if the filter is large.
        first, state = BlockRef("number", part.first), self._dispatcher.state
        return call_upstream(
            self._dispatcher,
            whole.policy,
            part.params(),
            least_head=part.last,
            archive=whole.policy.family.is_archive(first, state.heads.tip),
            oldest=part.first if part.first < state.floor else -1,
            is_piece=True,
            client=whole.client,
            payer=None if self._paying is None else self._paying.meter,
            trace=None if whole.call.directives is None else whole.call.directives.trace,
        )

    def _too_large(self) -> RpcError:
        """A refusal that suggests half of the blocks received so far: that is likely to work."""
        fewer = max(self._blocks // 2, 1)
        return RpcError(log_range.refusal(self._whole.first, self._whole.first + fewer - 1))


async def _answer_of(pending: PendingReply) -> tuple[bytes, Upstream | None]:
    logs = await pending.result()
    answered_by = pending.answered_by
    pending.forget_flight()
    return logs, answered_by
