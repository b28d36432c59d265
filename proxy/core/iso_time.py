"""Times as text: ISO 8601 in UTC, as the API and webhooks write them."""

from __future__ import annotations

import datetime


def iso_seconds(moment: datetime.datetime) -> str:
    """Such as 2026-01-15T09:30:00Z. Fractions of a second are cut off."""
    return moment.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def iso_millis(moment: datetime.datetime) -> str:
    """Such as 2026-01-15T09:30:00.250Z."""
    return moment.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def iso_millis_of_unix(seconds: float) -> str:
    return iso_millis(datetime.datetime.fromtimestamp(seconds, datetime.UTC))


def day_of_unix(seconds: float) -> datetime.date:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).date()


def iso_of_unix(seconds: float) -> str:
    """The same as `iso_seconds`, of a time in seconds since 1970."""
    return iso_seconds(datetime.datetime.fromtimestamp(seconds, datetime.UTC))
