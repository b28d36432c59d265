"""Records of requests in Postgres, partitioned by day: old days are dropped as a whole."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import asyncpg
import orjson

from proxy.core.access import USUAL_SAMPLE
from proxy.core.paging import Page
from proxy.core.request_records import ErrorGroup, FilterChoice, RecordReader, RequestFilter, RequestRecord, is_delivery
from proxy.core.upstream_errors import KINDS
from proxy.errors import InvalidRequest
from proxy.store.postgres import sql
from proxy.store.postgres.bad_rows import storable
from proxy.store.postgres.json_text import json_text
from proxy.store.postgres.pool import PATIENT_S, Pool

# Records that one statement writes.
ROWS = 100
WRITE_S = 10.0
# The newest records from which the choices of filters are taken, and how many values a filter has at most.
CHOSEN_FROM, MOST_CHOICES = 10_000, 100
_COLUMNS = (
    "id", "account", "key", "network", "surface", "method", "status", "reason", "units", "cache", "bytes", "block", "error",
    "blame", "params", "code", "client_id", "called", "cost",
)  # fmt: skip


class RequestStore:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        # The days that have a partition.
        self._open: set[datetime.date] = set()

    def __repr__(self) -> str:
        return f"<RequestStore {len(self._open)} days open>"

    async def write(self, records: Sequence[RequestRecord]) -> None:
        """Write all of the records or none: at most `ROWS`."""
        moments = [_moment(record) for record in records]
        columns = [[_value(record, name) for record in records] for name in _COLUMNS]
        durations = [record.took_s * 1000 for record in records]
        attempts = [_attempts_text(record) for record in records]
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            for day in {moment.date() for moment in moments} - self._open:
                await connection.execute(sql.requests.open_day, day)
                self._open.add(day)
            try:
                await connection.execute(
                    sql.requests.add_requests, moments, durations, attempts, *columns, timeout=WRITE_S
                )
            except asyncpg.CheckViolationError:
                self._open.clear()  # A day has no partition any more.
                raise

    async def close_days(self, before: datetime.date) -> None:
        """Drop the days before this one."""
        async with self._pool.connection(within_s=PATIENT_S) as connection:
            await connection.execute(sql.requests.close_days, before)
        self._open = {day for day in self._open if day >= before}

    async def read(self, request_id: str, reader: RecordReader) -> RequestRecord | None:
        """The newest record with this id that the reader may see. An event's id means its webhook delivery."""
        return await (self._read_delivery if is_delivery(request_id) else self._read_request)(request_id, reader)

    async def _read_request(self, request_id: str, reader: RecordReader) -> RequestRecord | None:
        seen = _bounds(reader)
        async with self._pool.connection() as connection:
            row = await connection.fetchrow(sql.requests.read_request, request_id, *seen)
            if row is None:
                return None
            record = _record(row)
            if record.client_id:
                same = await connection.fetchrow(sql.requests.count_same, record.client_id, *seen)
                assert same is not None
                if same["accounts"] > 1 and request_id != record.id:
                    raise InvalidRequest(
                        "account: clients of several accounts chose this id: name the account too", param="account"
                    )
                record.others = same["records"] - 1
        return record

    async def _read_delivery(self, event_id: str, reader: RecordReader) -> RequestRecord | None:
        """The record of a webhook delivery, from the attempts that were made."""
        async with self._pool.connection() as connection:
            rows = await connection.fetch(sql.requests.read_delivery, event_id, reader.account, reader.networks)
        return _delivery(rows) if rows else None

    async def page(
        self, wanted: RequestFilter, reader: RecordReader, page: Page
    ) -> tuple[Sequence[RequestRecord], int]:
        """One page, newest first, and the number of records that match."""
        given = (
            *_bounds(reader),
            wanted.network,
            wanted.method,
            wanted.reason,
            wanted.status,
            wanted.key,
            wanted.since,
            wanted.until,
            wanted.code,
            wanted.client_id,
            _asked(wanted.upstream),
        )
        async with self._pool.connection() as connection:
            total = await connection.fetchval(sql.requests.count_requests, *given)
            rows = await connection.fetch(sql.requests.page_requests, *given, page.limit, page.offset)
        return [_record(row) for row in rows], total

    async def choices(self, reader: RecordReader) -> list[FilterChoice]:
        """The values that filters can have, most frequent first, from the newest records."""
        async with self._pool.connection() as connection:
            rows = await connection.fetch(sql.requests.list_choices, *_bounds(reader), CHOSEN_FROM, MOST_CHOICES)
        return [(row["filter"], row["value"], row["name"]) for row in rows]

    async def count_errors(self, wanted: RequestFilter, reader: RecordReader) -> list[ErrorGroup]:
        given = *_bounds(reader), wanted.network, wanted.method, wanted.key, wanted.since, wanted.until
        async with self._pool.connection() as connection:
            rows = await connection.fetch(sql.requests.count_errors, *given)
        return [
            ErrorGroup(**{**row, "key_name": row["key_name"] or "", "account_name": row["account_name"] or ""})
            for row in rows
        ]

    async def count_attempts(
        self, since: datetime.datetime, sample_every: Mapping[str, int], edges_s: Sequence[float]
    ) -> list[dict[str, Any]]:
        """Attempts by network, method, upstream and bucket of their duration. `sample_every`: by plan."""
        blameless = ["answered", *[f"error: {kind}" for kind, meaning in KINDS.items() if not meaning.retry_elsewhere]]
        plans = [*sample_every], [*sample_every.values()]
        async with self._pool.connection() as connection:
            rows = await connection.fetch(sql.requests.count_attempts, since, *plans, USUAL_SAMPLE, edges_s, blameless)
        return [dict(row) for row in rows]


def _value(record: RequestRecord, name: str) -> Any:
    value = getattr(record, name)
    return storable(value) if isinstance(value, str) else value


def _attempts_text(record: RequestRecord) -> str:
    """An upstream may have written a part of the outcome."""
    return json_text([(storable(label), *times, storable(outcome)) for label, *times, outcome in record.attempts])


def _moment(record: RequestRecord) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(record.at, datetime.UTC)


def _record(row: asyncpg.Record) -> RequestRecord:
    values: dict[str, Any] = {name: row[name] for name in _COLUMNS}
    attempts = [tuple(each) for each in orjson.loads(row["attempts"])]
    values |= {name: row[name] or "" for name in ("key_name", "account_name")}
    return RequestRecord(at=row["at"].timestamp(), took_s=row["ms"] / 1000, attempts=attempts, **values)


def _bounds(reader: RecordReader) -> tuple[str | None, Sequence[str] | None, str]:
    return reader.account, reader.networks, reader.key


def _asked(upstream: str | None) -> str | None:
    """The beginning of the upstream's attempts in `attempts`."""
    return None if upstream is None else f"[{json_text(upstream)},"


def _delivery(rows: Sequence[asyncpg.Record]) -> RequestRecord:
    """Each attempt counts from the creation of the delivery."""
    attempts = [row for row in rows if row["began_at"] is not None]
    first, last = rows[0], attempts[-1] if attempts else None
    created = first["created_at"]
    is_failed = first["state"] != "delivered" and last is not None
    ended = created if last is None else last["began_at"] + datetime.timedelta(milliseconds=last["took_ms"])
    return RequestRecord(
        id=first["id"],
        at=ended.timestamp(),
        account=first["account_id"],
        key="",
        network=first["network"],
        surface="webhook",
        method=first["event_type"],
        status=(last["status"] or 0) if last is not None else 0,
        reason="failed" if is_failed else "sampled",
        took_s=(ended - created).total_seconds(),
        error=f"{first['state']}: {last['outcome']}" if is_failed and last is not None else "",
        blame="client" if is_failed else "",
        attempts=[
            ("receiver", (row["began_at"] - created).total_seconds(), row["took_ms"] / 1000, _outcome(row))
            for row in attempts
        ],
    )


def _outcome(row: asyncpg.Record) -> str:
    return f"{row['outcome']}, HTTP status {row['status']}" if row["status"] else str(row["outcome"])
