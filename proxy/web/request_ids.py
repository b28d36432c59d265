"""Ids for requests that have no X-Request-Id."""

from __future__ import annotations

import itertools
import secrets
from functools import cache

_serial = itertools.count(1)


@cache
def stem() -> bytes:
    """Ids are a random stem per process and a counter: unique across workers and restarts, and cheap.

    The stem is drawn at first use: modules are imported before the workers are forked.
    """
    return f"req_{secrets.token_hex(5)}".encode()


def new_request_id() -> str:
    """A new id. The hot path creates ids from the same stem; the `s` distinguishes the two counters."""
    return f"{stem().decode()}s{next(_serial):07x}"
