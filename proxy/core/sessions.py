"""Sign-in: token formats, CSRF tokens, and password rules.

A session token is a secret between one browser and the service: a cookie that no script can read. The *CSRF token* is
derived from it, so it needs no storage. A page receives it as data, which a page of another origin cannot read, and
returns it in a header.
"""

from __future__ import annotations

import base64
import hmac
import re
from collections.abc import Collection
from typing import Literal

# The callers of an operation: anyone, the holder of an account, or an operator.
SessionKind = Literal["none", "account", "admin"]

ADMIN_PREFIX = "adm_"
TOKEN_BYTES = 32
_TOKEN = re.compile(r"(?:adm_)?[A-Za-z0-9_-]{43}", re.ASCII)
# Long enough that guessing is hopeless at the allowed rate of attempts, and short enough to hash quickly.
SHORTEST_PASSWORD, LONGEST_PASSWORD = 12, 200
# How long a browser or an address from which an account holder has signed in counts as known: 90 days.
PLACE_S = 90 * 86_400.0
# Methods that change nothing (RFC 9110, 9.2.1).
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


def token_of(chance: bytes) -> str:
    return base64.urlsafe_b64encode(chance).rstrip(b"=").decode()


def is_token(text: str) -> bool:
    """Whether the text has the form of a token: others are refused without a look-up."""
    return _TOKEN.fullmatch(text) is not None


def csrf_of(token: str) -> str:
    return token_of(hmac.digest(token.encode(), b"csrf", "sha256"))


def is_csrf(token: str, given: str) -> bool:
    return hmac.compare_digest(csrf_of(token).encode(), given.encode("utf-8", "replace"))


def is_foreign(*, fetch_site: str, origin: str, hosts: Collection[str], secure: bool = False) -> bool:
    """Whether a browser reports that another origin's page sent this. Other programs report nothing and have no cookies to
    abuse.

    An opaque origin, `null`, names no host and is never our own (RFC 6454, 7.1). `secure`: whether the request came over https,
    so that a page over http is another origin.
    """
    if fetch_site:
        return fetch_site not in ("same-origin", "none")
    if not origin:
        return False
    scheme, _, host = origin.lower().partition("://")
    return not host or host not in hosts or scheme not in (("https",) if secure else ("http", "https"))


def password_fault(password: str, *, email: str = "") -> str:
    """Why a new password is not accepted; empty if it is."""
    if not SHORTEST_PASSWORD <= len(password) <= LONGEST_PASSWORD:
        return f"must have {SHORTEST_PASSWORD} to {LONGEST_PASSWORD} characters"
    if len(set(password)) < 5:
        return "must have 5 different characters or more"
    if email and password.lower() in (email.lower(), email.lower().partition("@")[0]):
        return "must not be the email"
    return ""
