"""Signing secrets at rest: AES-256-GCM under a key that is not in the database.

A secret must come back, because every delivery is signed with it, so it cannot be a digest. What is sealed for one webhook
opens for no other: its id is part of what is authenticated, and a row whose secret was swapped with another's does not open.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_NONCE = 12


class SealBroken(Exception):
    """What is stored was not sealed for this webhook, or with another key."""


class Vault:
    def __init__(self, key: str) -> None:
        """`key`: 32 or more random characters."""
        self._cipher = AESGCM(hmac.digest(key.encode(), b"penstock webhook secrets", hashlib.sha256))

    def __repr__(self) -> str:
        return "<Vault>"

    def seal(self, webhook_id: str, secret: bytes) -> bytes:
        nonce = secrets.token_bytes(_NONCE)
        return nonce + self._cipher.encrypt(nonce, secret, webhook_id.encode())

    def open(self, webhook_id: str, sealed: bytes) -> bytes:
        try:
            return self._cipher.decrypt(sealed[:_NONCE], sealed[_NONCE:], webhook_id.encode())
        except (InvalidTag, ValueError):
            raise SealBroken(
                f"the secret of {webhook_id} does not open: it was changed, or webhooks.secret_key was"
            ) from None
