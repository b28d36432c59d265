"""Background work that one bad row cannot stop.

Background loops handle rows whose values come from customers, receivers and contracts: records of requests, replies of
receivers, configs of webhooks. A row with a value that cannot be stored or read would fail its whole batch, again and again,
and with it the rows of all other accounts. So a loop that fails because of a row sets that row aside, counts it, and goes on.

An error is a row's fault if Postgres or our own code refuses its values. An error of the database (it is away, slow or full)
or of the statement is not: the caller retries or gives up the batch.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, TypeVar

import asyncpg

from proxy import telemetry
from proxy.errors import BadValue, Fault
from proxy.store.postgres.pool import AWAY, UNABLE

log = logging.getLogger("penstock.rows")

# Metric labels.
RowKind = Literal[
    "alert",
    "contradiction",
    "delivery",
    "delivery_result",
    "event",
    "key",
    "mail",
    "mined_lookup",
    "operation",
    "pending_transaction",
    "quota",
    "refusal",
    "request_record",
    "trace",
    "usage",
    "webhook",
]
_Row = TypeVar("_Row")

# How often a kind of bad rows is logged: one customer may send many.
LOG_EVERY_S = 60.0
# Postgres stores neither U+0000 nor surrogates.
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
# Errors of Postgres about a row's values: wrong or too large, without the row that they refer to, too long for an index.
_OF_VALUES = (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError, asyncpg.ProgramLimitExceededError)


def is_bad_row(exc: Exception) -> bool:
    """Whether an error is the fault of a row's values."""
    if isinstance(exc, (BadValue, *_OF_VALUES)):
        return True
    return not isinstance(exc, (Fault, asyncpg.PostgresError, *AWAY, *UNABLE))


def storable(text: str) -> str:
    """The text, with characters that Postgres cannot store replaced visibly. For records that serve diagnosis only."""
    return _UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", text)


class SkippedIfBad:
    """A context that ends without an error if its row is bad."""

    def __init__(self, rows: BadRows, about: Mapping[str, object]) -> None:
        self._rows = rows
        self._about = about

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: object) -> bool:
        if not isinstance(exc, Exception) or not is_bad_row(exc):
            return False
        self._rows.set_aside(exc, **self._about)
        return True


class BadRows:
    """Sets aside the bad rows of one loop. They are counted, and logged now and then."""

    def __init__(self, kind: RowKind) -> None:
        self._kind = kind
        self._count = 0
        self._logged_at = -LOG_EVERY_S

    def __repr__(self) -> str:
        return f"<BadRows {self._kind}, {self._count} set aside>"

    async def write(self, rows: Sequence[_Row], write: Callable[[Sequence[_Row]], Awaitable[object]]) -> list[_Row]:
        """Write rows together and return those set aside. `write` does all or nothing: if it fails because of a row, it
        gets each half of the rows, until the bad ones are found."""
        parts, bad = [rows] if rows else [], list[_Row]()
        while parts:
            part = parts.pop()
            try:
                await write(part)
            except Exception as exc:
                if not is_bad_row(exc):
                    raise
                if len(part) == 1:
                    bad.append(part[0])
                    self.set_aside(exc)
                else:
                    half = len(part) // 2
                    parts += [part[half:], part[:half]]
        return bad

    async def attempt(self, work: Awaitable[object], **about: object) -> bool:
        """Do the work on a single row, and return False if the row is bad. `about`: ids for the log."""
        is_done = False
        with self.skipped(**about):
            await work
            is_done = True
        return is_done

    def skipped(self, **about: object) -> SkippedIfBad:
        """Work on a single row. If the row is bad, the work ends here without an error. `about`: ids for the log."""
        return SkippedIfBad(self, about)

    def set_aside(self, exc: Exception, **about: object) -> None:
        """Count and log a bad row."""
        self._count += 1
        telemetry.rows_set_aside_total.labels(self._kind).inc()
        # The message may quote the value, which belongs to a customer.
        cause = exc.__cause__ if isinstance(exc, BadValue) and exc.__cause__ else exc
        now = time.monotonic()
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            fields = {"kind": self._kind, "error": type(cause).__name__, "count": self._count, **about}
            log.error("row set aside: its values cannot be processed", extra=fields)
