"""The ids of requests that bring none."""

from __future__ import annotations

import itertools
import secrets

# Ids are a random stem per process and a counter: unique across workers and restarts, and cheap.
STEM = f"req_{secrets.token_hex(5)}".encode()
_serial = itertools.count(1)


def new_request_id() -> str:
    """The hot path makes ids from the same stem; the `s` keeps both counters apart."""
    return f"{STEM.decode()}s{next(_serial):07x}"
