"""One-time codes of an authenticator app (TOTP, RFC 6238): six digits, SHA-1, a new code every 30 seconds.

All apps support these values, and many support no others.
"""

from __future__ import annotations

import base64
import hmac

STEP_S = 30
DIGITS = 6
SECRET_BYTES = 20
# Codes before and after the current one that count too: clocks differ, and typing takes time.
LENIENT_STEPS = 1


def code_at(secret: bytes, step: int) -> str:
    digest = hmac.digest(secret, step.to_bytes(8, "big"), "sha1")
    offset = digest[-1] & 15
    number = int.from_bytes(digest[offset : offset + 4], "big") & 0x7FFFFFFF
    return str(number % 10**DIGITS).zfill(DIGITS)


def step_of(secret: bytes, code: str, now: float) -> int | None:
    """The step that the code belongs to, or None if it is not valid now."""
    current = int(now) // STEP_S
    steps = range(current - LENIENT_STEPS, current + LENIENT_STEPS + 1)
    return next((step for step in steps if hmac.compare_digest(code_at(secret, step).encode(), code.encode())), None)


def shown_secret(secret: bytes) -> str:
    """The secret as people type it into an app."""
    return base64.b32encode(secret).decode().rstrip("=")
