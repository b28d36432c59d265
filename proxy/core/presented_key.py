"""The API key that a request presents: in the header X-API-Key, as a Bearer token, as a Basic password, or in its URL.

A request has one key. It may repeat it in several places; a header then counts, so that a key which is not allowed in URLs can
still be used. Two different keys are an error. An Authorization header that has no API key in it may be meant for a proxy, and
is ignored beside a key.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass

from proxy.core.access import has_key


@dataclass(frozen=True, slots=True)
class PresentedKey:
    """`text` is empty if the request has two different keys."""

    text: str
    is_in_url: bool = False

    def __repr__(self) -> str:
        return f"<PresentedKey {'in the URL' if self.is_in_url else 'in a header'}>"


def presented_key(
    named: Iterable[str], authorization: Iterable[str], in_url: Iterable[str] = ()
) -> PresentedKey | None:
    """The key in these values of X-API-Key and Authorization, and in the URL. None if there is none."""
    headers, url = _texts(named), _texts(in_url)
    tokens = _texts(map(_credentials, authorization))
    headers |= {token for token in tokens if has_key(token)} if headers or url else tokens
    keys = headers | url
    if not keys:
        return None
    return PresentedKey(keys.pop() if len(keys) == 1 else "", is_in_url=not headers)


def _texts(values: Iterable[str]) -> set[str]:
    return {value.strip() for value in values} - {""}


def _credentials(line: str) -> str:
    """The Bearer token, or the password of Basic authentication. Empty for other schemes."""
    scheme, _, rest = line.partition(" ")
    match scheme.lower():
        case "bearer":
            return rest
        case "basic":
            return _password(rest)
        case _:
            return ""


def _password(encoded: str) -> str:
    """RFC 7617, 2: "user-id" ":" "password" in base64. The user name counts if there is no password."""
    try:
        user, _, password = base64.b64decode(encoded.strip(), validate=True).decode().partition(":")
    except ValueError:
        return ""
    return password or user
