"""Admits a batch item by item, if it is large or does not fit the rate at once.

Items are charged in order, a few in each turn of the account. When the buckets are empty, the others wait for the refill, up to
a bound; then they are refused, each with the time to retry. Admitted items are sent on without waiting for the others. Waiting
costs nothing, so the number of batches that wait is limited, by account and in all.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from proxy.core.access import Key
from proxy.core.jsonrpc import RawCall
from proxy.errors import Fault, Forbidden, LeasePending, RateLimited
from proxy.services.accounts.admission import Admission
from proxy.services.rpc.batches import UNITS_OF_AN_ERROR, BatchItem, CallBatch
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.rpc_errors import rpc_error_of
from proxy.turn_queue import TurnQueue

# Items that are admitted in one step, and items that are refused. Between two steps other clients have their turns.
ITEMS_PER_STEP = 25
REFUSED_PER_STEP = 100
# Refills are awaited for at least this long, so that several items are sent on together.
LEAST_PAUSE_S = 0.05

# Batches that wait in a worker, of one account and in all. With `server.max_body_bytes` this bounds the memory that they take.
MOST_OF_ACCOUNT = 8
MOST_WAITING = 256

# A call that may be made, with its price; and one that is answered with an error for its own mistake.
PricedItem = tuple[BatchItem, MethodPolicy, RawCall, int]
MistakenItem = tuple[BatchItem, bytes]
SendItems = Callable[[Sequence[PricedItem], float], None]


class CheckedItems:
    """The items of a batch that may run, those that may not with the reason, and the price of all."""

    __slots__ = ("accepted", "declined", "units")

    def __init__(self) -> None:
        self.accepted: list[PricedItem] = []
        self.declined: list[tuple[BatchItem, bytes | Fault]] = []
        self.units = 0

    def __repr__(self) -> str:
        return f"<CheckedItems {len(self.accepted)} accepted, {len(self.declined)} declined, {self.units} units>"

    def accept(self, item: BatchItem, policy: MethodPolicy, call: RawCall, price: int) -> None:
        self.accepted.append((item, policy, call, price))
        self.units += price

    def decline(self, item: BatchItem, why: bytes | Fault) -> None:
        """A fault is free."""
        self.declined.append((item, why))
        self.units += 0 if isinstance(why, Fault) else UNITS_OF_AN_ERROR


class WaitingBatches:
    """How many batches wait, by account."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<WaitingBatches {self._counts.total()}>"

    def __len__(self) -> int:
        return self._counts.total()

    def enter(self, account: str) -> bool:
        """Count one more, unless there are too many."""
        if self._counts[account] >= MOST_OF_ACCOUNT or len(self) >= MOST_WAITING:
            return False
        self._counts[account] += 1
        return True

    def leave(self, account: str) -> None:
        self._counts[account] -= 1
        if not self._counts[account]:
            del self._counts[account]


class BatchAdmission:
    __slots__ = (
        "_admission", "_batch", "_deadline", "_has_left", "_is_waiting", "_key", "_loop", "_mistaken", "_others", "_refusal",
        "_send", "_timer", "_turns", "_waiting",
    )  # fmt: skip

    def __init__(
        self,
        batch: CallBatch,
        key: Key,
        admission: Admission,
        send: SendItems,
        *,
        turns: TurnQueue,
        others: WaitingBatches,
        deadline: float,
    ) -> None:
        self._batch = batch
        self._turns = turns
        self._has_left = False
        # Why the items that are left are refused.
        self._refusal: Fault | None = None
        self._others = others
        self._is_waiting = False
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
        self._has_left = True
        if self._timer is not None:
            self._timer.cancel()
        self._stop_waiting()
        self._batch.leave()

    def _admit(self) -> None:
        """Admit as many items as the buckets allow, and return later for the rest."""
        self._timer = None
        now = time.monotonic()
        admitted: list[PricedItem] = []
        refusal = self._take(admitted, now)
        if admitted:
            self._send(admitted, now)
        if isinstance(refusal, RateLimited) and self._may_wait(now + refusal.wait_s):
            pause_s = refusal.wait_s if isinstance(refusal, LeasePending) else max(LEAST_PAUSE_S, refusal.wait_s)
            self._timer = self._loop.call_later(pause_s, self._admit)
            return
        self._refusal = refusal
        if self._waiting or self._mistaken:
            self._turns.add(self._key.account.id, self._go_on)
        if refusal is not None or not self._waiting:
            self._stop_waiting()

    def _go_on(self) -> bool:
        if self._has_left:
            return False
        if self._refusal is None:
            self._admit()
        else:
            self._refuse(self._refusal)
        return False

    def _may_wait(self, until: float) -> bool:
        if until > self._deadline:
            return False
        self._is_waiting = self._is_waiting or self._others.enter(self._key.account.id)
        return self._is_waiting

    def _stop_waiting(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._others.leave(self._key.account.id)

    def _take(self, admitted: list[PricedItem], now: float) -> Fault | None:
        """Charge the next items. Returns the refusal that applies to the first one left."""
        if not self._key.alive:
            return Forbidden("this API key was changed or revoked")
        for _ in range(min(ITEMS_PER_STEP, len(self._waiting) + len(self._mistaken))):
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
        """Answer some of the items that are left, and come back for the others."""
        error = rpc_error_of(refusal)
        for _ in range(min(REFUSED_PER_STEP, len(self._waiting) + len(self._mistaken))):
            item = self._waiting.popleft()[0] if self._waiting else self._mistaken.popleft()[0]
            item.refuse(refusal, error)
        if self._waiting or self._mistaken:
            self._turns.add(self._key.account.id, self._go_on)
