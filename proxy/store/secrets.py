"""Signing secrets at rest: AES-256-GCM under a key that is not in the database.

Every delivery is signed with its secret, so the secret must be readable and cannot be stored as a digest. The webhook's id is
authenticated with it, so a secret copied into another webhook's row does not decrypt.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from contextlib import suppress

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from proxy.settings import Settings

_NONCE = 12


class SealBroken(Exception):
    """The stored secret was encrypted for another webhook or with another key, or was changed."""


class Vault:
    def __init__(self, key: str, *older: str) -> None:
        """`key`: 32 or more random characters. Secrets that were sealed with one of the `older` keys can still be opened."""
        self._ciphers = [
            AESGCM(hmac.digest(each.encode(), b"penstock webhook secrets", hashlib.sha256)) for each in (key, *older)
        ]

    def __repr__(self) -> str:
        return "<Vault>"

    def seal(self, webhook_id: str, secret: bytes) -> bytes:
        nonce = secrets.token_bytes(_NONCE)
        return nonce + self._ciphers[0].encrypt(nonce, secret, webhook_id.encode())

    def open(self, webhook_id: str, sealed: bytes) -> bytes:
        for cipher in self._ciphers:
            with suppress(InvalidTag, ValueError):
                return cipher.decrypt(sealed[:_NONCE], sealed[_NONCE:], webhook_id.encode())
        raise SealBroken(
            f"the secret of {webhook_id} cannot be decrypted: the row or the setting webhooks.secret_key has changed"
        )


def vault_of(settings: Settings) -> Vault:
    """The vault for signing secrets. Without a separate key it uses the API key pepper, which is not in the database either.
    Secrets from before the key was set or the pepper rotated can still be opened."""
    keys = (settings.webhooks.secret_key, settings.keys.pepper, settings.keys.previous_pepper)
    return Vault(*(key for key in keys if key))
