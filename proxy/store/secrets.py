"""Signing secrets at rest: AES-256-GCM under a key that is not in the database.

Every delivery is signed with its secret, so the secret must be readable and cannot be stored as a digest. The webhook's id is
authenticated with it, so a secret copied into another webhook's row does not decrypt.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_NONCE = 12


class SealBroken(Exception):
    """The stored secret was encrypted for another webhook or with another key, or was changed."""


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
                f"the secret of {webhook_id} cannot be decrypted: the row or the setting webhooks.secret_key has changed"
            ) from None
