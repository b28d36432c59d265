"""Large messages of accounts at their limit.

A message is read before its calls can be charged, and a refused call costs nothing. An account without units could therefore
take a worker's time with messages of a megabyte, which are a kilobyte if they are compressed. So after each refused large
message, the next one of the account waits a moment, on whichever socket it comes. It is then read and answered like any other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

# Limits the refused large messages of an account to ten a second, which take a hundredth of a worker's time.
PAUSE_S = 0.1


class LargeMessages:
    __slots__ = ("_loop", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # The paused accounts, with the sockets that have a large message each. Dictionaries, for their order.
        self._waiting: dict[str, dict[Callable[[], None], None]] = {}

    def __repr__(self) -> str:
        return f"<LargeMessages {sum(map(len, self._waiting.values()))} waiting of {len(self._waiting)} accounts>"

    def pause(self, account: str) -> None:
        """A large message of the account was refused."""
        if account not in self._waiting:
            self._waiting[account] = {}
            self._loop.call_later(PAUSE_S, self._resume, account)

    def must_wait(self, account: str, retry: Callable[[], None]) -> bool:
        """Whether the account is paused. If it is, `retry` is called at the end of the pause."""
        waiting = self._waiting.get(account)
        if waiting is None:
            return False
        waiting[retry] = None
        return True

    def _resume(self, account: str) -> None:
        for retry in self._waiting.pop(account):
            retry()
