"""Formats and parses times: ISO 8601 in UTC."""

from __future__ import annotations

import datetime

from proxy.core.iso_time import iso_seconds
from proxy.errors import InvalidRequest

MOMENT = "must be a time such as 2026-01-15T09:30:00Z"


def time_of(moment: datetime.datetime | None) -> str | None:
    return None if moment is None else iso_seconds(moment)


def moment_of(text: str, name: str) -> datetime.datetime:
    """Parse a caller's time. A time without a zone is in UTC."""
    try:
        return _parsed(text)
    except (ValueError, OverflowError):
        raise InvalidRequest(f"parameter {name!r}: {MOMENT}", param=name) from None


def is_moment(text: str) -> bool:
    """Whether `moment_of` parses the text."""
    try:
        _parsed(text)
    except (ValueError, OverflowError):
        return False
    return True


def _parsed(text: str) -> datetime.datetime:
    moment = datetime.datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).astimezone(datetime.UTC)
