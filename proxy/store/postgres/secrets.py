"""Signing secrets at rest: AES-256-GCM under a key that is not in the database.

Every delivery is signed with its secret, so the secret must be readable and cannot be stored as a digest. The webhook's id is
authenticated with it, so a secret copied into another webhook's row does not decrypt.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from proxy.settings import Settings

_NONCE = 12
_CHECKED = b"penstock pepper check"


def check_value(pepper: str) -> bytes:
    """A value that identifies the pepper. The pepper cannot be derived from it, and no digest of a key equals it."""
    return hmac.digest(pepper.encode(), _CHECKED, "sha256")


class SealBroken(Exception):
    """The stored secret was encrypted for another webhook or with another key, or was changed."""


@dataclass(frozen=True, slots=True)
class RotatedSecret:
    """A secret sealed with the previous pepper, for hosts that have only this one, and the pepper's check value."""

    pepper: bytes
    sealed: bytes


class Vault:
    def __init__(self, key: str, *older: str, previous_pepper: str = "") -> None:
        """`key`: 32 or more random characters. Secrets that were sealed with one of the `older` keys can still be opened.
        `previous_pepper`: one of them, while the pepper that is the key is rotated."""
        self._previous = (check_value(previous_pepper), Vault(previous_pepper)) if previous_pepper else None
        self._ciphers = [
            AESGCM(hmac.digest(each.encode(), b"penstock webhook secrets", hashlib.sha256)) for each in (key, *older)
        ]

    def __repr__(self) -> str:
        return "<Vault>"

    def seal(self, webhook_id: str, secret: bytes) -> bytes:
        nonce = secrets.token_bytes(_NONCE)
        return nonce + self._ciphers[0].encrypt(nonce, secret, webhook_id.encode())

    def seal_for_previous(self, webhook_id: str, secret: bytes) -> RotatedSecret | None:
        """The secret as hosts before the rotation can open it; None if there is no rotation."""
        if self._previous is None:
            return None
        pepper, vault = self._previous
        return RotatedSecret(pepper, vault.seal(webhook_id, secret))

    def is_current(self, webhook_id: str, sealed: bytes) -> bool:
        """Whether the current key opens it."""
        return _opened(self._ciphers[0], webhook_id, sealed) is not None

    def open(self, webhook_id: str, sealed: bytes) -> bytes:
        for cipher in self._ciphers:
            if (secret := _opened(cipher, webhook_id, sealed)) is not None:
                return secret
        raise SealBroken(
            f"the secret of {webhook_id} cannot be decrypted: the row or the setting webhooks.secret_key has changed"
        )


def _opened(cipher: AESGCM, webhook_id: str, sealed: bytes) -> bytes | None:
    try:
        return cipher.decrypt(sealed[:_NONCE], sealed[_NONCE:], webhook_id.encode())
    except (InvalidTag, ValueError):
        return None


def vault_of(settings: Settings) -> Vault:
    """The vault for signing secrets. Without a separate key it uses the API key pepper, which is not in the database either.
    Secrets from before the key was set or the pepper rotated can still be opened."""
    pepper, previous = settings.keys.pepper, settings.keys.previous_pepper
    if settings.webhooks.secret_key:
        return Vault(*filter(None, (settings.webhooks.secret_key, pepper, previous)))
    return Vault(*filter(None, (pepper, previous)), previous_pepper=previous)
