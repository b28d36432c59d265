"""The log of requests: writes the records that wait in memory (`request_recorder.py`) in the background, and reads them."""

from __future__ import annotations

import asyncio
import datetime
import logging
import time
from collections.abc import Sequence

import asyncpg

from proxy import telemetry
from proxy.core.paging import Page
from proxy.core.request_records import ErrorGroup, FilterChoice, RecordReader, RequestFilter, RequestRecord
from proxy.errors import NotFound, Unavailable
from proxy.services.request_recorder import RequestRecorder
from proxy.store.postgres.bad_rows import BadRows
from proxy.store.postgres.request_store import ROWS, RequestStore
from proxy.tasks import repeat

log = logging.getLogger("penstock.requests")

FLUSH_S = 1.0
# Interval between removals of old days.
KEEP_EVERY_S = 600.0


class RequestLog:
    def __init__(self, recorder: RequestRecorder, store: RequestStore, *, keep_days: int) -> None:
        self._recorder = recorder
        self._store = store
        self._keep_days = keep_days
        self._bad = BadRows("request_record")

    def __repr__(self) -> str:
        return f"<RequestLog of {self._recorder!r}>"

    # Writing

    async def run(self) -> None:
        """Supervised loop: write the records that wait."""
        while True:
            await asyncio.sleep(FLUSH_S)
            try:
                await self.flush()
            except Unavailable:
                pass  # They wait for the next round; records for which there is no room are dropped.
            except asyncpg.PostgresError as exc:
                log.error("the database refused records of requests", extra={"error": type(exc).__name__})
                self._recorder.drop_waiting()

    async def flush(self) -> None:
        recorder = self._recorder
        recorder.allow_more(time.monotonic(), day=int(time.time() // 86400))
        telemetry.request_records_dropped_total.inc(recorder.take_dropped())
        for _ in range(0, len(recorder.waiting), ROWS):
            records = recorder.waiting[:ROWS]
            await self._bad.write(records, self._store.write)
            recorder.forget(len(records))

    async def keep(self) -> None:
        """Supervised loop: remove days past their retention."""
        await repeat(self._close_days, every_s=KEEP_EVERY_S)

    async def _close_days(self) -> None:
        today = datetime.datetime.now(datetime.UTC).date()
        await self._store.close_days(today - datetime.timedelta(days=max(0, self._keep_days - 1)))

    async def close(self) -> None:
        """Write the last records."""
        try:
            await self.flush()
        except (Unavailable, asyncpg.PostgresError):
            log.warning("records of requests were not written", extra={"records": len(self._recorder.waiting)})

    # Reading

    async def read(self, request_id: str, reader: RecordReader) -> RequestRecord:
        """The newest record with this id that the reader may see. An event's id means its webhook delivery."""
        record = await self._store.read(request_id, reader)
        if record is None:
            raise NotFound(
                f"there is no record of the request {request_id}: it is not an id of yours, was not recorded, or is too old"
            )
        return record

    async def page(
        self, wanted: RequestFilter, reader: RecordReader, page: Page
    ) -> tuple[Sequence[RequestRecord], int]:
        return await self._store.page(wanted, reader, page)

    async def choices(self, reader: RecordReader) -> list[FilterChoice]:
        """The values that filters can have."""
        return await self._store.choices(reader)

    async def errors(self, wanted: RequestFilter, reader: RecordReader) -> list[ErrorGroup]:
        """Failed requests by status, code, method and key. `wanted`: its reason, status and code are not used."""
        return await self._store.count_errors(wanted, reader)
