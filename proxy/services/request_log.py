"""The log of requests: records wait in memory for a moment and are written to the database in the background.

Recording never blocks a call. The memory is bounded, in all and for each account, and records beyond that are dropped and
counted: a client that fails a thousand times a second leaves room for the records of others.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import asyncpg

from proxy import telemetry
from proxy.core.access import Account, Key
from proxy.core.directives import Directives
from proxy.core.paging import Page
from proxy.core.request_records import (
    EVENT_PREFIX,
    MOST_ERROR,
    MOST_PARAMS,
    ErrorGroup,
    RecordedAttempt,
    RecordReason,
    RequestFilter,
    RequestRecord,
    Surface,
    blame_of,
    code_of,
    shown_text,
)
from proxy.errors import NotFound, Unavailable
from proxy.services.rpc.batches import BatchItem, CallBatch
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.short_batch import ShortBatch
from proxy.store.request_store import RequestStore

log = logging.getLogger("penstock.requests")

FLUSH_S = 1.0
# Records that wait in a worker, in all: about 8 MB.
MOST_WAITING = 8192
# Records of one account in this worker: this many at once, and then this many a second. A client that is refused a
# thousand times a second must not fill the disk.
MOST_OF_ACCOUNT = 512
MORE_PER_S = 10
# Items of one batch: more of them would delay other clients by milliseconds.
MOST_OF_BATCH = 64
# Interval between removals of old days.
KEEP_EVERY_S = 600.0


class RequestLog:
    def __init__(self, store: RequestStore, *, slow_s: float, keep_days: int) -> None:
        """With `keep_days` 0 nothing is recorded."""
        self._store = store
        self._keep_days = keep_days
        self.is_on = keep_days > 0
        self.slow_s = slow_s if self.is_on else math.inf
        self._waiting: list[RequestRecord] = []
        # The records that each account has used of its allowance, and since when.
        self._of_account: Counter[str] = Counter()
        self._since = time.monotonic()

    def __repr__(self) -> str:
        return f"<RequestLog {len(self._waiting)} waiting>"

    # Recording

    def reason(
        self, account: Account, took_s: float, directives: Directives | None, *, failed: bool
    ) -> RecordReason | None:
        """Why a request is recorded; None if it is not."""
        account.unsampled -= 1
        is_sampled = account.unsampled <= 0
        if is_sampled:
            account.unsampled = account.sample_every or 1 << 60
        if not self.is_on:
            return None
        if failed:
            return "failed"
        if took_s > self.slow_s:
            return "slow"
        if directives is not None and directives.explain:
            return "asked"
        return "sampled" if is_sampled and account.sample_every else None

    def note(
        self,
        request_id: str,
        key: Key,
        reason: RecordReason,
        *,
        surface: Surface,
        network: str,
        method: str,
        status: int,
        took_s: float,
        flight: Flight | None = None,
        params: bytes = b"",
        error: str = "",
        **more: Any,
    ) -> None:
        """Record one request. `more`: further members of the record."""
        if not self._has_room(key.account.id):
            telemetry.request_records_dropped_total.inc()
            return
        if flight is not None:
            more = {"attempts": _attempts(flight), "block": flight.block, **more}
            params = params or flight.params
        self._waiting.append(
            RequestRecord(
                id=request_id,
                at=time.time(),
                account=key.account.id,
                key=key.id,
                network=network,
                surface=surface,
                method=method,
                status=status,
                reason=reason,
                took_s=took_s,
                **_failure(status, error, was_sent=bool(more.get("attempts"))),
                params=_params(params) if key.records_params and params else None,
                **more,
            )
        )

    def note_batch(
        self,
        request_id: str,
        key: Key,
        batch: CallBatch | ShortBatch,
        *,
        network: str,
        took_s: float,
        directives: Directives | None,
        **more: Any,
    ) -> None:
        """Record a batch, and its items that failed. With a batch that is recorded for another reason, all its items. Of many
        items the first are recorded."""
        items = batch.items if isinstance(batch, CallBatch) else []
        failed = [place for place, item in enumerate(items) if item.failure]
        reason = self.reason(key.account, took_s, directives, failed=bool(failed))
        if reason is None:
            return
        more = {"network": network, "took_s": took_s, **more}
        self.note(request_id, key, reason, surface="batch", method="batch", status=200, block=batch.reached, **more)
        chosen = failed if reason == "failed" else range(len(items))
        for place in chosen[: self._room_for(key.account.id, len(chosen))]:
            self._note_item(f"{request_id}.{place}", key, items[place], reason, network=network)
        if isinstance(batch, ShortBatch):
            sent = batch.sent()
            for place, (policy, label) in enumerate(sent[: self._room_for(key.account.id, len(sent))]):
                self.note(
                    f"{request_id}.{place}",
                    key,
                    reason,
                    surface="item",
                    method=policy.method.name,
                    status=200,
                    units=policy.units,
                    attempts=((label, 0.0, took_s, "answered"),),
                    block=batch.reached,
                    network=network,
                    took_s=took_s,
                )

    def _note_item(self, request_id: str, key: Key, item: BatchItem, reason: RecordReason, *, network: str) -> None:
        self.note(
            request_id,
            key,
            reason,
            surface="item",
            network=network,
            method=item.policy.method.name if item.policy is not None else "",
            status=item.fault.status if item.fault is not None else 200,
            took_s=item.took_s,
            flight=item.flight,
            error=item.failure,
            units=item.units if item.fault is None else 0,
            cache=item.cache,
            block=item.reached,
            bytes=len(item.reply),
        )

    def _has_room(self, account: str) -> bool:
        if not self._room(account):
            return False
        self._of_account[account] += 1
        return True

    def _room(self, account: str) -> int:
        return max(0, min(MOST_WAITING - len(self._waiting), MOST_OF_ACCOUNT - self._of_account[account]))

    def _room_for(self, account: str, items: int) -> int:
        """How many of a batch's items are recorded. The others count as dropped, in one step."""
        room = min(items, MOST_OF_BATCH, self._room(account))
        if room < items:
            telemetry.request_records_dropped_total.inc(items - room)
        return room

    # Writing

    async def run(self) -> None:
        """Supervised loop: write what was recorded."""
        while True:
            await asyncio.sleep(FLUSH_S)
            try:
                await self.flush()
            except Unavailable:
                pass  # They wait for the next time; what has no room meanwhile is dropped.
            except asyncpg.PostgresError as exc:
                log.error("the database refused records of requests", extra={"reason": str(exc)})
                self._forget()

    async def flush(self) -> None:
        self._allow_more(time.monotonic())
        if not self._waiting:
            return
        records = [*self._waiting]
        await self._store.write(records)
        del self._waiting[: len(records)]

    def _allow_more(self, now: float) -> None:
        more = int((now - self._since) * MORE_PER_S)
        if more:
            self._since += more / MORE_PER_S
            self._of_account = Counter({name: used - more for name, used in self._of_account.items() if used > more})

    def _forget(self) -> None:
        telemetry.request_records_dropped_total.inc(len(self._waiting))
        self._waiting.clear()

    async def keep(self) -> None:
        """Supervised loop: remove days past their retention."""
        while True:
            before = datetime.datetime.now(datetime.UTC).date() - datetime.timedelta(days=max(0, self._keep_days - 1))
            try:
                await self._store.close_days(before)
            except Unavailable:
                pass
            await asyncio.sleep(KEEP_EVERY_S)

    async def close(self) -> None:
        """Write what was recorded last."""
        try:
            await self.flush()
        except (Unavailable, asyncpg.PostgresError):
            log.warning("records of requests were not written", extra={"records": len(self._waiting)})

    # Reading

    async def read(self, request_id: str, account: str | None) -> RequestRecord:
        """The newest record with this id, of the account or, for None, of any. An event's id means its webhook delivery."""
        is_delivery = request_id.startswith(EVENT_PREFIX)
        found = await (self._store.read_delivery if is_delivery else self._store.read)(request_id, account)
        if found is None:
            raise NotFound(
                f"there is no record of the request {request_id}: it is not an id of yours, was not recorded, or is too old"
            )
        return found

    async def page(self, wanted: RequestFilter, account: str | None, page: Page) -> tuple[Sequence[RequestRecord], int]:
        return await self._store.page(wanted, account, page)

    async def errors(self, wanted: RequestFilter, account: str | None) -> list[ErrorGroup]:
        """Failed requests by status, code, method and key. `wanted`: its reason, status and code are not used."""
        return await self._store.count_errors(wanted, account)


def _attempts(flight: Flight) -> list[RecordedAttempt]:
    """In the order in which they began."""
    return sorted(flight.attempts(time.monotonic()), key=itemgetter(1))


def _failure(status: int, error: str, *, was_sent: bool) -> dict[str, Any]:
    """The members of a record that describe an error; empty for a good reply."""
    if not error:
        return {"error": "", "blame": "", "code": ""}
    blame = blame_of(status, was_sent=was_sent)
    return {"error": shown_text(error, MOST_ERROR), "blame": blame, "code": code_of(status, error)}


def _params(params: bytes) -> str:
    return shown_text(params.decode("utf-8", "replace"), MOST_PARAMS)
