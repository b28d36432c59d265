"""Limits for codes of second factors: a person who knows the password must not be able to guess a code, however long they try.

Wrong codes are counted by person, separately for each place from which the person has signed in before, as wrong passwords are.
So strangers cannot keep the holder out of a browser that the holder has used. For all other places together, codes of the app
are refused after MOST_PER_DAY attempts in a day or MOST_PER_MONTH in a month, and the holder is informed by mail. A guess is
right with a probability of 3 in a million, so all guesses of a year together succeed with less than 1 in 300. Recovery codes
have 79 bits and cannot be guessed; they are counted by client address only, so strangers cannot use up the attempts of the
holder. A right code clears the counts of its place.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

from proxy.errors import RateLimited
from proxy.store.postgres.sessions import CODES_S, SessionStore

DAY_S = 86_400.0
MOST_PER_DAY, MOST_PER_MONTH = 20, 60
_REFUSED = (
    "too many wrong codes: sign in from a browser in which you have signed in before, or with a recovery code; "
    "change your password if the codes were not yours"
)

CodeCheck = Callable[[], Awaitable[None]]


class CodeLimits:
    def __init__(self, store: SessionStore, inform: Callable[[str], None]) -> None:
        """`inform` mails to this address that codes are refused."""
        self._store = store
        self._inform = inform

    def __repr__(self) -> str:
        return f"<CodeLimits {MOST_PER_DAY} a day, {MOST_PER_MONTH} a month>"

    async def checked(self, check: CodeCheck, person: str, email: str, place: str) -> None:
        """Count an attempt of the person, check the code, and clear the count if it is right. `place`: where the person has
        signed in before; empty for all other places together."""
        counted = _counted(person, place)
        for (kind, subject), most, within_s in zip(
            counted, (MOST_PER_DAY, MOST_PER_MONTH), (DAY_S, CODES_S), strict=True
        ):
            if wait_s := await self._store.count_code(kind, subject, most=most, within_s=within_s):
                await self._refused(person, email)
                raise RateLimited(_REFUSED, retry_after_s=math.ceil(wait_s))
        await check()
        await self._store.clear_codes(counted)

    async def clear(self, person: str) -> None:
        """Clear the count of unknown places after a change of the password: strangers do not know the new one."""
        await self._store.clear_codes(_counted(person, ""))

    async def _refused(self, person: str, email: str) -> None:
        """Inform the holder, once a day."""
        if not await self._store.count_code("code mail", person, most=1, within_s=DAY_S):
            self._inform(email)


def _counted(person: str, place: str) -> list[tuple[str, str]]:
    return [(kind, f"{person}\0{place}") for kind in ("code day", "code month")]
