"""Delivery signatures: the headers of both formats, and the three of Standard Webhooks.

    Format A    X-Service-Signature: hex of HMAC-SHA256 over "{timestamp}.{body}", and X-Service-Timestamp
    Format B    X-Platform-Signature: "sha256=" and hex of HMAC-SHA256 over the body
    Standard    webhook-signature: "v1," and base64 of HMAC-SHA256 over "{id}.{timestamp}.{body}"; several with spaces between

A secret is text: `whsec_` and base64. Formats A and B use the text itself as the key, as it is in the receiver's
settings; Standard Webhooks uses the decoded base64. For a day after a rotation, deliveries are signed with the old secret
too: webhook-signature has both signatures. The headers of formats A and B hold one digest, so the old secret's is in a
second header, whose name ends in -Previous.
"""

from __future__ import annotations

import hmac
from base64 import b64decode, b64encode
from collections.abc import Sequence
from functools import lru_cache

from proxy.core.attempts import format_of

PREFIX = "whsec_"
# "At least 24 random bytes", and no more than Standard Webhooks allows (64).
SECRET_BYTES = 32
# How far a timestamp may be from the receiver's clock, and how long deliveries are signed with an old secret too.
TOLERANCE_S = 300
ROTATION_S = 86400


def secret_of(key: bytes) -> str:
    """The text that is shown to the owner."""
    return PREFIX + b64encode(key).decode()


@lru_cache(10_000)
def key_of(secret: str) -> bytes:
    """The bytes of a secret; ValueError if the text is not one of ours."""
    if not secret.startswith(PREFIX):
        raise ValueError(f"a signing secret begins with {PREFIX}")
    return b64decode(secret[len(PREFIX) :], validate=True)


def format_a(secret: str, timestamp: int, body: bytes) -> str:
    return _hmac(secret.encode(), b"%d.%b" % (timestamp, body)).hex()


def format_b(secret: str, body: bytes) -> str:
    return "sha256=" + _hmac(secret.encode(), body).hex()


def standard(secret: str, event_id: str, timestamp: int, body: bytes) -> str:
    return "v1," + b64encode(_hmac(key_of(secret), b"%b.%d.%b" % (event_id.encode(), timestamp, body))).decode()


def headers(*, event_type: str, event_id: str, secrets: Sequence[str], timestamp: int, body: bytes) -> dict[str, str]:
    """All headers of an attempt. `secrets`: the newest first. `event_type`: picks the format."""
    all_headers = {
        "Content-Type": "application/json",
        "webhook-id": event_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(standard(secret, event_id, timestamp, body) for secret in secrets),
    }
    if format_of(event_type) == "A":
        name, signed = "X-Service-Signature", [format_a(secret, timestamp, body) for secret in secrets]
        all_headers["X-Service-Timestamp"] = str(timestamp)
    else:
        name, signed = "X-Platform-Signature", [format_b(secret, body) for secret in secrets]
        all_headers["X-Webhook-Event"] = event_type
        all_headers["X-Webhook-Idempotency-Key"] = event_id
    all_headers.update(zip((name, f"{name}-Previous"), signed, strict=False))
    return all_headers


def matches(given: str, expected: str) -> bool:
    """Compared in constant time."""
    return hmac.compare_digest(given.encode(), expected.encode())


def _hmac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256")
