"""Reads the header Retry-After of upstreams, receivers and price APIs (RFC 9110, 10.2.3)."""

from __future__ import annotations

import re
from datetime import UTC
from email.utils import parsedate_to_datetime

_SECONDS = re.compile(r"[0-9]{1,9}", re.ASCII)


def retry_after_s(text: str, now: float) -> float:
    """The seconds to wait; 0 if the header is missing or not valid. `now`: Unix time."""
    text = text.strip()
    if _SECONDS.fullmatch(text):
        return float(text)
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return 0.0
    # RFC 9110, 5.6.7: HTTP dates are in GMT.
    return max(0.0, moment.replace(tzinfo=moment.tzinfo or UTC).timestamp() - now)
