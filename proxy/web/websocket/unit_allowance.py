"""Compute units for the events of sockets, taken from a key's buckets a little in advance.

With an allowance, sending an event costs one subtraction. All sockets of a key in one worker share it. When the allowance and
the buckets are empty, senders register a callback here, and are called in order a few times a second until there are units.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from proxy.core.access import Key
from proxy.errors import Fault, LeasePending
from proxy.services.accounts.admission import Admission

# An allowance holds this fraction (1/50) of what its key has per second: enough that most events find it filled, and too
# little to matter for the key's limit.
SHARE: Final = 50
# How often waiting senders try again.
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
        # Why the last refill failed.
        self.refusal: Fault | None = None

    def __repr__(self) -> str:
        return f"<UnitAllowance {self.key.id} {self.left} units, {len(self._waiting)} waiting>"

    def fill(self, units: int) -> bool:
        """Make sure that it holds this many units. If the key has none left, return False and set `refusal`."""
        now = time.monotonic()
        missing = units - self.left
        spare = (self.key.own_rate or self.key.rate).units_per_second // SHARE
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

    def wait(self, retry: Callable[[], None]) -> None:
        """Call `retry` when there may be units."""
        self._waiting[retry] = None
        if self._timer is None:
            pause_s = self.refusal.wait_s if isinstance(self.refusal, LeasePending) else RETRY_S
            self._timer = self._loop.call_later(pause_s, self._wake)

    async def until_retry(self) -> None:
        """Return when there may be units, in the order of the others that wait."""
        turn: asyncio.Future[None] = self._loop.create_future()

        def retry() -> None:
            if not turn.done():
                turn.set_result(None)

        self.wait(retry)
        try:
            await turn
        finally:
            self.forget(retry)

    def forget(self, retry: Callable[[], None]) -> None:
        self._waiting.pop(retry, None)

    def _wake(self) -> None:
        """Call all waiting senders. One that finds no units joins the end of the queue."""
        self._timer = None
        waiting, self._waiting = self._waiting, {}
        for retry in waiting:
            retry()

    def close(self) -> None:
        """The key's last socket has gone: refund unspent units."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.left and self.key.alive:
            self._admission.refund(self.key, 0, self.left)
        self.left = 0
