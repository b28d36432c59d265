"""Announcements: short notices that operators write and every dashboard shows, until they end or are dismissed."""

from __future__ import annotations

import datetime
import re
from typing import Any

from proxy.core.display_text import cleaned
from proxy.errors import InvalidRequest
from proxy.store.postgres.announcements import AnnouncementStore

LEVELS = ("info", "warning", "critical")
MAX_TEXT = 500
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}
_SPAN = re.compile(r"([0-9]{1,4})([mhd])", re.ASCII)


class Announcements:
    def __init__(self, store: AnnouncementStore) -> None:
        self._store = store

    def __repr__(self) -> str:
        return f"<Announcements {self._store!r}>"

    async def add(
        self, level: str, text: str, *, starts: datetime.datetime | None, ends: datetime.datetime, by: str
    ) -> dict[str, Any]:
        """Without `starts`, it is shown at once."""
        shown = cleaned(text, MAX_TEXT)
        if not shown:
            raise InvalidRequest("text: must not be empty", param="text")
        now = datetime.datetime.now(datetime.UTC)
        if ends <= max(now, starts or now):
            raise InvalidRequest("until: must be after now and after 'from'", param="until")
        return await self._store.add(level, shown, starts=starts, ends=ends, by=by)

    async def current(self) -> list[dict[str, Any]]:
        return await self._store.current()

    async def all(self) -> list[dict[str, Any]]:
        return await self._store.all()

    async def remove(self, number: int) -> dict[str, Any]:
        return await self._store.remove(number)


def moment_after(text: str, now: datetime.datetime) -> datetime.datetime:
    """A time such as 2026-01-15T09:30Z, or a span from now such as 90m, 2h or 3d."""
    if (span := _SPAN.fullmatch(text)) is not None:
        return now + datetime.timedelta(**{_UNITS[span[2]]: int(span[1])})
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(f"{text[:40]!r} must be a time such as 2026-01-15T09:30Z, or a span such as 2h") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
