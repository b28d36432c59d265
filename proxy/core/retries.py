"""When a delivery is tried again: the two schedules of the specification (section 6), and what a receiver may ask for."""

from __future__ import annotations

import re
from datetime import UTC
from email.utils import parsedate_to_datetime
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
    """The seconds that a Retry-After header asks to wait (RFC 9110, 10.2.3); 0 if it is not valid."""
    text = text.strip()
    if _SECONDS.fullmatch(text):
        return float(text)
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return 0.0
    # RFC 9110, 5.6.7: HTTP dates are in GMT.
    return max(0.0, moment.replace(tzinfo=moment.tzinfo or UTC).timestamp() - now)
