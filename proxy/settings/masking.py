"""Masks secrets in settings that are printed. In a URL, only the parts that may be secret are masked."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, urlsplit

import orjson

MASK = "********"
# Paths of these URLs often contain an API key. The path of a database URL is the name of the database.
_SECRET_PATHS = frozenset(("http", "https", "ws", "wss"))
# Parameters of a database URL that are no secrets.
_PLAIN_PARAMETERS = frozenset(("host", "port", "sslmode", "target_session_attrs", "application_name"))


def masked_value(value: Any) -> str:
    """The value of a secret setting as JSON, or a mask. In a URL, scheme, user, host and port are shown."""
    shown = _masked_url(value) if isinstance(value, str) else None
    return MASK if shown is None else str(orjson.dumps(shown), "utf-8")


def _masked_url(text: str) -> str | None:
    """None if the text is not a URL."""
    try:
        url = urlsplit(text)
    except ValueError:
        return None
    if "://" not in text:
        return None
    user, at, place = url.netloc.rpartition("@")
    name, colon, _ = user.partition(":")
    shown = f"{url.scheme}://{name}{colon and ':' + MASK}{at}{place}{_masked_path(url.scheme, url.path)}"
    query = "&".join(
        f"{key}={value if key in _PLAIN_PARAMETERS else MASK}"
        for key, value in parse_qsl(url.query, keep_blank_values=True)
    )
    return shown + (f"?{query}" if query else "")


def _masked_path(scheme: str, path: str) -> str:
    return f"/{MASK}" if scheme in _SECRET_PATHS and path.strip("/") else path
