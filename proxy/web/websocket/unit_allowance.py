"""Units for the events of sockets: taken from a key's buckets a little in advance, so that an event costs one subtraction.

All sockets of a key in one worker share a purse. When it is empty and the buckets are too, whoever wants to send waits here and
is called again, in turn, a few times a second until there is something to spend.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from proxy.core.access import Key
from proxy.errors import Fault
from proxy.services.accounts.admission import Admission

# A purse holds what its key has for this part of a second: enough that most events find it full, too little to matter.
SHARE: Final = 50
# How often those that wait try again.
RETRY_S: Final = 0.25


class UnitAllowance:
    __slots__ = ("_admission", "_loop", "_timer", "_waiting", "key", "left", "refusal")

    def __init__(self, admission: Admission, key: Key) -> None:
        self._admission = admission
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        # A dictionary, for its order.
        self._waiting: dict[Callable[[], None], None] = {}
        self.key = key
        self.left = 0
        # Why it could not be filled the last time.
        self.refusal: Fault | None = None

    def __repr__(self) -> str:
        return f"<UnitAllowance {self.key.id} {self.left} units, {len(self._waiting)} waiting>"

    def fill(self, units: int) -> bool:
        """Make sure that so many units are in it; False where the key has none left, and then `refusal` says why."""
        now = time.monotonic()
        missing = units - self.left
        spare = self.key.units_per_second // SHARE
        if spare and self._admission.charge(self.key, 0, missing + spare, now) is None:
            self.left = units + spare
            return True
        self.refusal = self._admission.charge(self.key, 0, missing, now)
        if self.refusal is None:
            self.left = units
        return self.refusal is None

    def spend(self, units: int) -> bool:
        if self.left < units and not self.fill(units):
            return False
        self.left -= units
        return True

    def wait(self, again: Callable[[], None]) -> None:
        """Call again when there may be units."""
        self._waiting[again] = None
        if self._timer is None:
            self._timer = self._loop.call_later(RETRY_S, self._wake)

    def forget(self, again: Callable[[], None]) -> None:
        self._waiting.pop(again, None)

    def _wake(self) -> None:
        """Whoever runs out again waits behind the others."""
        self._timer = None
        waiting, self._waiting = self._waiting, {}
        for again in waiting:
            again()

    def close(self) -> None:
        """The last socket of the key is gone: what was not spent is given back."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.left and self.key.alive:
            self._admission.refund(self.key, 0, self.left)
        self.left = 0
