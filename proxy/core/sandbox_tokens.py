"""Sandbox tokens: they stand for an API key in requests that a signed-in person sends from the API reference.

The service does not store keys, so it cannot fill in the key itself. A token has the id of the key, expires after LASTS_S, and
its signature covers the session's cookie: without that cookie, which no script can read, it is worth nothing.
"""

from __future__ import annotations

import hmac

from proxy.core.sessions import token_of

PREFIX = "sbx_"
LASTS_S = 600


def token_for(pepper: bytes, session: str, key_id: str, until: int) -> str:
    """`session`: the session's token. `until`: Unix time."""
    return f"{PREFIX}{key_id}.{until}.{_signature(pepper, session, key_id, until)}"


def key_of(pepper: bytes, session: str, text: str, now: float) -> str:
    """The id of the key that the token stands for; empty if it is not valid for this session now."""
    key_id, _, rest = text.removeprefix(PREFIX).partition(".")
    until, _, signature = rest.partition(".")
    if not session or not until.isascii() or not until.isdecimal() or len(until) > 12 or int(until) <= now:
        return ""
    expected = _signature(pepper, session, key_id, int(until))
    return key_id if hmac.compare_digest(signature.encode("utf-8", "replace"), expected.encode()) else ""


def _signature(pepper: bytes, session: str, key_id: str, until: int) -> str:
    return token_of(hmac.digest(pepper, f"sandbox\0{session}\0{key_id}\0{until}".encode(), "sha256"))
