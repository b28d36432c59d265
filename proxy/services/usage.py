"""Usage: gathered from the tallies of keys, flushed to the store, read as charts.

Usage since the last flush is held in memory, by series and minute. Every second it is put into the host's spool as a numbered
batch, and every few seconds one worker of the host sends the batches of all. A batch whose outcome is unknown is sent again
under the same number. While Postgres is down, counts accumulate up to a limit; beyond it the oldest minutes are dropped, and
the log says how many requests they held. A killed worker loses what it had not put into the spool.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import asyncpg

from proxy.connection_queue import ConnectionQueue, TooManyWaiting
from proxy.core.access import Key
from proxy.core.usage import STEPS, ChartLine, Tally, TouchedTallies, UsageStep, UsageSums, gather
from proxy.errors import Fault, InvalidRequest, RateLimited, Unavailable
from proxy.store.postgres.usage import NO_NETWORK, UsageQuery, UsageSeries, UsageStore, used_in
from proxy.store.postgres.usage_spool import UsageSpool
from proxy.tasks import repeat

__all__ = ("UsageQuery", "UsageService")

_T = TypeVar("_T")

log = logging.getLogger("penstock.usage")

# Interval at which tallies are gathered. A call counts in the minute in which it is gathered.
GATHER_S = 1.0
# Rows held while Postgres is down: about 60 MB.
MOST_WAITING = 100_000
# Errors of a reachable database that refuses a batch. The batch is sent again nevertheless.
_REFUSED = (Fault, asyncpg.PostgresError)
# Interval between removals of expired rows.
KEEP_EVERY_S = 300.0
# A worker sums up if it was not done for this share of the interval: clocks and pauses are never exact.
UPKEEP_SHARE = 0.9
# Rows in one export.
MOST_ROWS = 100_000
# Tallies that are taken over in one step, which takes half a millisecond.
GATHERED_AT_ONCE = 100
# Concurrent charts and exports per worker: each takes memory, a thread and a database connection.
READ_AT_ONCE = 2
# Queries of one account that run or wait. A page of the dashboard makes a few at a time.
READ_PER_ACCOUNT = 16
# Longest wait for one of them.
TURN_S = 10.0

UsageBatch = dict[tuple[UsageSeries, int], UsageSums]
UsageRows = Iterable[tuple[Mapping[str, Any], UsageSums]]


class UsageService:
    def __init__(
        self,
        store: UsageStore,
        touched: TouchedTallies,
        *,
        flush_s: float,
        keep_s: dict[UsageStep, float],
        rollup_s: float = 60.0,
        spool: UsageSpool | None = None,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        """`spool`: where the host's workers put their batches; without one this process writes its own."""
        self._store = store
        self._spool = spool
        self._rollup_s = rollup_s
        self._touched = touched
        self._keep_s = keep_s
        self._most_waiting = most_waiting
        self._worker = secrets.token_hex(8)
        self._waiting: UsageBatch = {}
        # The batch that was sent and whose outcome is unknown.
        self._sent: UsageBatch | None = None
        self._number = 0
        # Tallies of operations that are not JSON-RPC methods, by network and operation.
        self._operations: dict[tuple[str, str], Tally] = {}
        self._reading = ConnectionQueue(READ_AT_ONCE, per_client=READ_PER_ACCOUNT)
        self.flush_s = flush_s

    def __repr__(self) -> str:
        return f"<UsageService {len(self._waiting)} rows waiting, {self._number} batches written>"

    # Counting

    def of_operation(self, key: Key, network: str, operation: str) -> Tally:
        """The key's tally of a REST operation. `network` is empty if the operation has none."""
        whole = self._operations.get((network, operation))
        if whole is None:
            whole = self._operations[network, operation] = Tally(network, operation)
        return key.tallies[whole]

    async def gather_in_steps(self) -> None:
        """Take over what was counted, a few tallies at a time: a busy service has thousands."""
        for _ in range(0, len(self._touched), GATHERED_AT_ONCE):
            self.gather(GATHERED_AT_ONCE)
            await asyncio.sleep(0)

    def gather(self, most: int | None = None) -> None:
        """Take over all that was counted, or the first `most` tallies."""
        minute = int(time.time()) // 60
        for account, key, tally in gather(self._touched, most):
            network, method = tally.labels
            place = (account, key, network or NO_NETWORK, method), minute
            have = self._waiting.get(place)
            if have is None:
                have = self._waiting[place] = UsageSums()
            have.add(tally)

    async def run(self) -> None:
        """Supervised loop: gather and spool every second, send every `flush_s`."""
        flush_at = time.monotonic() + self.flush_s
        while True:
            await asyncio.sleep(min(GATHER_S, self.flush_s))
            await self.gather_in_steps()
            is_due = time.monotonic() >= flush_at
            if is_due:
                flush_at = time.monotonic() + self.flush_s
            try:
                if is_due or self._spool is not None:
                    await self.flush()
                if is_due and self._spool is not None:
                    await self._spool.send()
            except Unavailable:
                self._drop_oldest()
            except _REFUSED as exc:
                log.error("the database refused a usage batch", extra={"reason": str(exc)})
                self._drop_oldest()

    async def flush(self) -> None:
        """Write pending usage, after resending a batch whose outcome is unknown."""
        while self._sent is not None or self._waiting:
            if self._sent is None:
                self._sent, self._waiting = self._waiting, {}
                self._number += 1
            await (self._spool or self._store).write(self._worker, self._number, self._sent)
            self._sent = None

    def _drop_oldest(self) -> None:
        while len(self._waiting) > self._most_waiting:
            oldest = min(minute for _, minute in self._waiting)
            dropped = [place for place in self._waiting if place[1] == oldest]
            lost = sum(self._waiting.pop(place).requests for place in dropped)
            log.error("usage dropped: it could not be written for too long", extra={"requests": lost})

    async def close(self) -> None:
        """Write everything that was counted."""
        self.gather()
        try:
            await self.flush()
            if self._spool is not None:
                await self._spool.close()
        except _REFUSED:
            log.warning("usage was not written", extra={"rows": len(self._waiting) + len(self._sent or ())})

    async def keep(self) -> None:
        """Supervised loop: sum up hours and days, delete rows past their retention. One worker of the fleet does so for all."""
        await repeat(self._keep_once, every_s=self._rollup_s)

    async def _keep_once(self) -> None:
        now = datetime.datetime.now(datetime.UTC)
        until = {step: now - datetime.timedelta(seconds=keep_s) for step, keep_s in self._keep_s.items() if keep_s}
        await self._store.sum_up(self._rollup_s * UPKEEP_SHARE)
        await self._store.purge(until, every_s=KEEP_EVERY_S)

    # Reading

    async def chart(self, wanted: UsageQuery) -> list[ChartLine]:
        _check(wanted)
        async with self._reading_slot(wanted.account):
            return await self._store.chart(wanted)

    async def table(self, wanted: UsageQuery, write: Callable[[UsageRows], _T]) -> _T:
        """Export every row of an account in a time span. `write` formats them on a thread, since there may be many."""
        _check(wanted)
        async with self._reading_slot(wanted.account):
            rows = await self._store.rows(wanted, MOST_ROWS + 1)
            if len(rows) > MOST_ROWS:
                raise InvalidRequest(
                    f"the time span has more than {MOST_ROWS} rows: use a larger step or a shorter span"
                )
            return await asyncio.to_thread(lambda: write((dict(row), used_in(row)) for row in rows))

    @asynccontextmanager
    async def _reading_slot(self, account: str | None) -> AsyncIterator[None]:
        """Wait for a slot, in turn with other accounts. Operators, who see all accounts, are one client."""
        client = account or "operators"
        try:
            await self._reading.enter(client, within_s=TURN_S)
        except TooManyWaiting:
            raise RateLimited("too many usage queries at a time: wait for the others", retry_after_s=1) from None
        except TimeoutError:
            raise Unavailable("too many usage queries at the moment: try again shortly") from None
        try:
            yield
        finally:
            self._reading.leave(client)

    async def last_used(self, account: str) -> dict[str, datetime.datetime]:
        return await self._store.last_used(account)

    async def requests_of_day(self, account: str, day: datetime.date) -> int:
        return await self._store.requests_of_day(account, day)


def _check(wanted: UsageQuery) -> None:
    size, most = STEPS[wanted.step]
    if wanted.last <= wanted.first:
        raise InvalidRequest("parameter 'to': must be after 'from'", param="to")
    if (wanted.last - wanted.first).total_seconds() > size * most:
        raise InvalidRequest(f"parameter 'step': a span may have at most {most} steps of a {wanted.step}", param="step")
