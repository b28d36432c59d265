"""Usage: gathered from the keys' sheets, flushed to the store, read as charts.

Whatever calls used since the last flush is in memory, by series and minute; every few seconds it becomes a batch with a
number and is written. A batch whose end nobody knows is sent again under its number. While Postgres is away counts go on and
wait; when more wait than is good, the oldest minutes are given up, and the log says how many requests that were. A worker that
is killed loses what it had not flushed.
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

from proxy.core.access import Key
from proxy.core.usage import STEPS, ChartLine, Tally, TouchedTallies, UsageStep, UsageSums, gather
from proxy.errors import Fault, InvalidRequest, Unavailable
from proxy.store.usage import NO_NETWORK, UsageQuery, UsageSeries, UsageStore, used_in

__all__ = ("UsageQuery", "UsageService")

_T = TypeVar("_T")

log = logging.getLogger("penstock.usage")

# How often sheets are gathered: a call is counted in the minute in which it is gathered.
GATHER_S = 1.0
# Rows that may wait for Postgres: 60 MB or so.
MOST_WAITING = 100_000
# What a database says that is there, but does not take a batch: it is sent again all the same.
_REFUSED = (Fault, asyncpg.PostgresError)
# How often what is too old is looked for.
KEEP_EVERY_S = 300.0
# Rows of a table that somebody takes with them.
MOST_ROWS = 100_000
# Charts and tables that are made at once in one worker: each takes memory, a thread and a connection that calls need too.
READ_AT_ONCE = 2
# How long one waits for its turn.
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
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self._store = store
        self._touched = touched
        self._keep_s = keep_s
        self._most_waiting = most_waiting
        self._worker = secrets.token_hex(8)
        self._waiting: UsageBatch = {}
        # The batch that was sent, and whose end is not known.
        self._sent: UsageBatch | None = None
        self._number = 0
        # What is not JSON-RPC has no tally of all keys that metrics would show.
        self._operations: dict[tuple[str, str], Tally] = {}
        self._reading = asyncio.Semaphore(READ_AT_ONCE)
        self.flush_s = flush_s

    def __repr__(self) -> str:
        return f"<UsageService {len(self._waiting)} rows waiting, {self._number} batches written>"

    # Counting

    def of_operation(self, key: Key, network: str, operation: str) -> Tally:
        """Where a request is counted that is no JSON-RPC call; network empty where it has none."""
        whole = self._operations.get((network, operation))
        if whole is None:
            whole = self._operations[network, operation] = Tally(network, operation)
        return key.sheet[whole]

    def gather(self) -> None:
        minute = int(time.time()) // 60
        for account, key, tally in gather(self._touched):
            network, method = tally.labels
            place = (account, key, network or NO_NETWORK, method), minute
            have = self._waiting.get(place)
            if have is None:
                have = self._waiting[place] = UsageSums()
            have.add(tally)

    async def run(self) -> None:
        """A supervised loop."""
        flush_at = time.monotonic() + self.flush_s
        while True:
            await asyncio.sleep(min(GATHER_S, self.flush_s))
            self.gather()
            if time.monotonic() >= flush_at:
                flush_at = time.monotonic() + self.flush_s
                try:
                    await self.flush()
                except Unavailable:
                    self._give_up_oldest()
                except _REFUSED as exc:
                    log.error("usage is refused by the database", extra={"reason": str(exc)})
                    self._give_up_oldest()

    async def flush(self) -> None:
        """Write what waits; first the batch before it, if its end is not known."""
        while self._sent is not None or self._waiting:
            if self._sent is None:
                self._sent, self._waiting = self._waiting, {}
                self._number += 1
            await self._store.write(self._worker, self._number, self._sent)
            self._sent = None

    def _give_up_oldest(self) -> None:
        while len(self._waiting) > self._most_waiting:
            oldest = min(minute for _, minute in self._waiting)
            given_up = [place for place in self._waiting if place[1] == oldest]
            lost = sum(self._waiting.pop(place).requests for place in given_up)
            log.error("usage given up: it could not be written for too long", extra={"requests": lost})

    async def close(self) -> None:
        """All that was counted is written."""
        self.gather()
        try:
            await self.flush()
        except _REFUSED:
            log.warning("usage could not be written", extra={"rows": len(self._waiting) + len(self._sent or ())})

    async def keep(self) -> None:
        """A supervised loop: what is older than it is kept for goes. Of all workers of the fleet one does it at a time."""
        while True:
            now = datetime.datetime.now(datetime.UTC)
            until = {step: now - datetime.timedelta(seconds=keep_s) for step, keep_s in self._keep_s.items() if keep_s}
            try:
                await self._store.keep(until)
            except Unavailable:
                pass
            await asyncio.sleep(KEEP_EVERY_S)

    # Reading

    async def chart(self, wanted: UsageQuery) -> list[ChartLine]:
        _check(wanted)
        async with self._turn():
            return await self._store.chart(wanted)

    async def table(self, wanted: UsageQuery, write: Callable[[UsageRows], _T]) -> _T:
        """Every row of an account's span, as `write` has it: in a thread, since there may be many."""
        _check(wanted)
        async with self._turn():
            found = await self._store.rows(wanted, MOST_ROWS + 1)
            if len(found) > MOST_ROWS:
                raise InvalidRequest(
                    f"the span has more than {MOST_ROWS} rows: ask for a larger step, or for less of it at once"
                )
            return await asyncio.to_thread(lambda: write((dict(row), used_in(row)) for row in found))

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(TURN_S):
                await self._reading.acquire()
        except TimeoutError:
            raise Unavailable("too much usage is being read at the moment; try again shortly") from None
        try:
            yield
        finally:
            self._reading.release()

    async def last_used(self, account: str) -> dict[str, datetime.datetime]:
        return await self._store.last_used(account)

    async def requests_of_day(self, account: str, day: datetime.date) -> int:
        return await self._store.requests_of_day(account, day)


def _check(wanted: UsageQuery) -> None:
    size, most = STEPS[wanted.step]
    if wanted.last <= wanted.first:
        raise InvalidRequest("parameter 'to': must be after 'from'")
    if (wanted.last - wanted.first).total_seconds() > size * most:
        raise InvalidRequest(f"parameter 'step': in steps of a {wanted.step} a span may have {most} of them")
