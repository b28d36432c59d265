"""Admits a batch item by item, if it is large or does not fit the rate at once.

Items are charged in order. When the buckets are empty, the others wait for the refill, up to a bound; then they are refused,
each with the time to retry. Admitted items are sent on without waiting for the others.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from proxy.core.access import Key
from proxy.core.jsonrpc import RawCall
from proxy.errors import Fault, Forbidden, RateLimited
from proxy.services.accounts.admission import Admission
from proxy.services.rpc.batches import UNITS_OF_AN_ERROR, BatchItem, CallBatch
from proxy.services.rpc.method_policy import MethodPolicy

# Items that are admitted in one turn of the loop, so that a large batch does not hold up other clients.
ITEMS_PER_TURN = 100
# Refills are awaited for at least this long, so that several items are sent on together.
LEAST_PAUSE_S = 0.05

# A call that may be made, with its price; and one that is answered with an error for its own mistake.
PricedItem = tuple[BatchItem, MethodPolicy, RawCall, int]
MistakenItem = tuple[BatchItem, bytes]


class BatchAdmission:
    __slots__ = ("_admission", "_batch", "_deadline", "_key", "_loop", "_mistaken", "_send", "_timer", "_waiting")

    def __init__(
        self,
        batch: CallBatch,
        key: Key,
        admission: Admission,
        send: Callable[[Sequence[PricedItem], float], None],
        *,
        deadline: float,
    ) -> None:
        self._batch = batch
        self._key = key
        self._admission = admission
        self._send = send
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: deque[PricedItem] = deque()
        self._mistaken: deque[MistakenItem] = deque()

    def __repr__(self) -> str:
        return f"<BatchAdmission {self._batch!r}, {len(self._waiting) + len(self._mistaken)} waiting>"

    def start(self, items: Iterable[PricedItem], mistaken: Iterable[MistakenItem]) -> None:
        self._waiting.extend(items)
        self._mistaken.extend(mistaken)
        self._batch.expect(len(self._waiting) + len(self._mistaken))
        self._admit()

    def leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._batch.leave()

    def _admit(self) -> None:
        """Admit what the buckets hold, and come back for the rest."""
        self._timer = None
        now = time.monotonic()
        admitted: list[PricedItem] = []
        refusal = self._take(admitted, now)
        if admitted:
            self._send(admitted, now)
        if isinstance(refusal, RateLimited) and now + refusal.wait_s <= self._deadline:
            self._timer = self._loop.call_later(max(LEAST_PAUSE_S, refusal.wait_s), self._admit)
        elif refusal is not None:
            self._refuse(refusal)
        elif self._waiting or self._mistaken:
            self._timer = self._loop.call_later(0.0, self._admit)

    def _take(self, admitted: list[PricedItem], now: float) -> Fault | None:
        """Charge the next items. Returns the refusal that applies to the first one left."""
        if not self._key.alive:
            return Forbidden("this API key was changed or revoked")
        for _ in range(min(ITEMS_PER_TURN, len(self._waiting) + len(self._mistaken))):
            units = self._waiting[0][3] if self._waiting else UNITS_OF_AN_ERROR
            refusal = self._admission.charge(self._key, 1, units, now)
            if isinstance(refusal, RateLimited):
                return refusal
            if not self._waiting:
                item, error = self._mistaken.popleft()
                item.decline(refusal or error)
            elif refusal is None:
                admitted.append(self._waiting.popleft())
            else:  # It costs more than the buckets ever hold.
                self._waiting.popleft()[0].decline(refusal)
            self._batch.units += 0 if refusal else units
        return None

    def _refuse(self, refusal: Fault) -> None:
        """Answer all items that are left."""
        left = [each[0] for each in self._waiting] + [each[0] for each in self._mistaken]
        self._waiting.clear()
        self._mistaken.clear()
        for item in left:
            item.decline(refusal)
