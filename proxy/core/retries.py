"""When a delivery is tried again: the two schedules of the specification (section 6), and what a receiver may ask for."""

from __future__ import annotations

import re
from typing import Literal

Format = Literal["A", "B"]

MINUTE, HOUR, DAY = 60, 3600, 86400
# Seconds from a failed attempt to the next; when they are used up, so is the delivery.
SCHEDULES: dict[Format, tuple[int, ...]] = {
    "A": (10, 1 * MINUTE, 10 * MINUTE, 1 * HOUR, 6 * HOUR),
    "B": (1, 5, 30, 5 * MINUTE, 30 * MINUTE, 2 * HOUR, 8 * HOUR),
}
# A receiver may put us off, but not for ever.
LONGEST_S = 1 * DAY

_SECONDS = re.compile(r"[0-9]{1,9}", re.ASCII)
# RFC 9110, 5.6.7: the one form of a date that may be sent.
_DATE = re.compile(r"[A-Z][a-z]{2}, (\d\d) ([A-Z][a-z]{2}) (\d{4}) (\d\d):(\d\d):(\d\d) GMT", re.ASCII)
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def format_of(event_type: str) -> Format:
    """The case of an event type picks the format, its headers and its schedule."""
    return "A" if event_type.islower() else "B"


def next_due(
    form: Format, tries: int, now: float, *, after_s: float = 0.0, schedule: tuple[float, ...] | None = None
) -> float | None:
    """When to try again after so many failed attempts; None when that was the last. Not before the receiver wants it."""
    delays = SCHEDULES[form] if schedule is None else schedule
    if tries > len(delays):
        return None
    return now + max(delays[tries - 1], min(after_s, LONGEST_S))


def retry_after(text: str, now: float) -> float:
    """The seconds that a Retry-After asks for (RFC 9110, 10.2.3); 0 where it says nothing."""
    text = text.strip()
    if _SECONDS.fullmatch(text):
        return float(text)
    found = _DATE.fullmatch(text)
    if found is None or found[2] not in _MONTHS:
        return 0.0
    day, year, hour, minute, second = (int(found[place]) for place in (1, 3, 4, 5, 6))
    days = _days(year, _MONTHS.index(found[2]) + 1, day)
    return max(0.0, days * DAY + hour * HOUR + minute * MINUTE + second - now)


def _days(year: int, month: int, day: int) -> int:
    """From 1970-01-01. A year begins in March here, so that the odd day is its last."""
    year -= month <= 2
    month = (month + 9) % 12
    return 365 * year + year // 4 - year // 100 + year // 400 + (153 * month + 2) // 5 + day - 1 - 719468
