"""The copy of the keys on this host: what a keyring has read from Postgres, for the worker's successor.

Times in it are relative to the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import datetime
import hashlib
import time
from collections.abc import Sequence
from typing import Any

import asyncpg

from proxy.store.postgres import sql
from proxy.store.postgres.local_copy import LocalCopy

# A key as Postgres returns it, or as it was copied.
KeyRecord = asyncpg.Record | dict[str, Any]
# The id under which the time of the last read is stored. It depends on the query: a copy by a version of the program that read
# other columns is not used.
_SINCE = f"since {hashlib.sha256(sql.keys.load_keys.encode()).hexdigest()[:16]}"


class KeyCopy:
    def __init__(self, file: LocalCopy | None = None) -> None:
        """Without a file nothing is copied."""
        self._file = file

    def __repr__(self) -> str:
        return f"<KeyCopy {self._file!r}>"

    @property
    def exists(self) -> bool:
        return self._file is not None and self._file.exists

    async def read(self, day: datetime.date) -> tuple[list[dict[str, Any]], datetime.datetime] | None:
        """Return the predecessor's rows and the time up to which they are complete, or None if there is no copy."""
        rows = {} if self._file is None else await self._file.read()
        if _SINCE not in rows:
            return None
        since = datetime.datetime.fromisoformat(rows.pop(_SINCE))
        now = time.monotonic()
        return [_aged(row, now, day) for row in rows.values()], since

    async def replace(self, rows: Sequence[KeyRecord], since: datetime.datetime, day: datetime.date) -> None:
        if self._file is not None:
            await self._file.replace(_copied(rows, since, day))

    async def append(self, rows: Sequence[KeyRecord], since: datetime.datetime, day: datetime.date) -> None:
        """Add changed rows. Without any, the old time stays: the successor then reads changes from earlier than necessary,
        which is harmless."""
        if self._file is not None and rows:
            await self._file.append(_copied(rows, since, day))


def _copied(rows: Sequence[KeyRecord], since: datetime.datetime, day: datetime.date) -> dict[str, Any]:
    """The rows by id, with the time last: if the process is killed between two frames, the file must not contain the new time
    with old rows."""
    stamp = {"copied_at": time.monotonic(), "copied_on": day.isoformat()}
    return {**{row["id"]: dict(row) | stamp for row in rows}, _SINCE: since.isoformat()}


def _aged(row: dict[str, Any], now: float, day: datetime.date) -> dict[str, Any]:
    """The row as Postgres would return it now."""
    if row["expires_in_s"] is not None:
        row["expires_in_s"] -= now - row["copied_at"]
    if row["copied_on"] != day.isoformat():
        row["used_today"] = 0
    return row
