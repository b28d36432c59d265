"""Formats and parses times: ISO 8601 in UTC."""

from __future__ import annotations

import datetime

from proxy.core.iso_time import iso_seconds
from proxy.errors import InvalidRequest


def time_of(moment: datetime.datetime | None) -> str | None:
    return None if moment is None else iso_seconds(moment)


def moment_of(text: str, name: str) -> datetime.datetime:
    """Parse a caller's time. A time without a zone is in UTC."""
    try:
        found = datetime.datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=datetime.UTC)).astimezone(datetime.UTC)
    except (ValueError, OverflowError):
        raise InvalidRequest(f"parameter {name!r}: must be a time such as 2026-01-15T09:30:00Z", param=name) from None
