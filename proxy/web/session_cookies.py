"""The names of the cookies of signed-in people."""

from __future__ import annotations

# `device` is no session: it only shows that the holder has signed in with this browser before.
COOKIES = {"account": "penstock_session", "admin": "penstock_admin", "device": "penstock_device"}


def cookie_name(kind: str, *, secure: bool) -> str:
    """RFC 6265bis, 4.1.3.2: only this host can set a cookie named __Host-, and only over https."""
    return f"__Host-{COOKIES[kind]}" if secure else COOKIES[kind]
