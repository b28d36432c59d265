"""Two-factor sign-in: a code from an authenticator app, or a recovery code, in addition to the password or link.

Turning it on takes two steps, so that a holder whose app did not read the secret is not locked out. A code works once. Attempts
are counted before anything is checked (`code_limits.py`).
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from urllib.parse import quote

from proxy.core import one_time_codes
from proxy.errors import InvalidRequest, Unauthorized
from proxy.store.postgres.second_factors import SecondFactorStore, StoredFactor

ISSUER = "Penstock"
RECOVERY_CODES = 10
# No letters that look like digits or like each other.
_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"
_WRONG = "the code is wrong, has expired or was used: wait for the next one"


@dataclass(frozen=True, slots=True)
class AppSecret:
    """A secret for an authenticator app, as text and as the link that its QR code contains."""

    text: str
    uri: str


class SecondFactor:
    def __init__(self, store: SecondFactorStore) -> None:
        self._store = store

    def __repr__(self) -> str:
        return f"<SecondFactor {self._store!r}>"

    async def begin(self, account: str, email: str) -> AppSecret:
        secret = secrets.token_bytes(one_time_codes.SECRET_BYTES)
        if not await self._store.begin(account, secret):
            raise InvalidRequest("two-factor sign-in is already on: turn it off first to use another app")
        return AppSecret(one_time_codes.shown_secret(secret), app_link(secret, issuer=ISSUER, name=email))

    @staticmethod
    def is_recovery(code: str) -> bool:
        """Whether it has the form of a recovery code, which cannot be guessed, and not that of the app's six digits."""
        return len(_typed(code)) != one_time_codes.DIGITS

    async def confirm(self, account: str, code: str) -> list[str]:
        """Turn it on with a first code, and return the recovery codes."""
        factor = await self._store.read(account)
        if factor is None or factor.is_on:
            raise InvalidRequest("there is nothing to confirm: set up an authenticator app first")
        step = one_time_codes.step_of(self._store.secret_of(account, factor), _typed(code), time.time())
        recovery = [_recovery_code() for _ in range(RECOVERY_CODES)]
        if step is None or not await self._store.confirm(account, factor, step, recovery):
            raise InvalidRequest(f"code: {_WRONG}", param="code")
        return recovery

    async def require(self, account: str, code: str | None) -> None:
        """Raise Unauthorized unless the code is right, or the account has no second factor."""
        factor = await self._store.read(account)
        if factor is None or not factor.is_on:
            return
        if not code:
            raise Unauthorized(
                "enter a code from your authenticator app", details={"second_factor": "required"}, reason="session"
            )
        if not await self._accepts(account, factor, _typed(code)):
            raise Unauthorized(_WRONG, details={"second_factor": "wrong"}, reason="session")

    async def turn_off(self, account: str, code: str) -> None:
        factor = await self._store.read(account)
        if factor is None or not factor.is_on:
            raise InvalidRequest("two-factor sign-in is not on")
        if not await self._accepts(account, factor, _typed(code)):
            raise InvalidRequest(f"code: {_WRONG}", param="code")
        await self._store.remove(account)

    async def _accepts(self, account: str, factor: StoredFactor, code: str) -> bool:
        if len(code) != one_time_codes.DIGITS:
            return await self._store.use_recovery(account, code)
        step = one_time_codes.step_of(self._store.secret_of(account, factor), code, time.time())
        return step is not None and await self._store.use_step(account, step)


def _typed(code: str) -> str:
    """People type spaces and dashes."""
    return code.replace(" ", "").replace("-", "").lower()


def _recovery_code() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(16))


def app_link(secret: bytes, *, issuer: str, name: str) -> str:
    """The link that apps read from a QR code."""
    label = quote(f"{issuer}:{name}", safe="")
    return f"otpauth://totp/{label}?secret={one_time_codes.shown_secret(secret)}&issuer={quote(issuer, safe='')}"
