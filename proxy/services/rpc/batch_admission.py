"""Admits a batch item by item, if it is large or does not fit the rate at once.

Items are charged in order, a few in each turn of the account. When the buckets are empty, the others wait for the refill, up to
a bound; then they are refused, each with the time to retry. Admitted items are sent on without waiting for the others.

Waiting costs the client nothing, so few batches of an account wait at a time, and the memory of batches that are read or wait
is that of their account (`memory_budget.py`). If the worker has no room for a batch, the account that holds most makes room:
its newest batch is refused. So an account with few batches never loses items because of others.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from proxy import telemetry
from proxy.core.access import Key
from proxy.core.jsonrpc import RawCall
from proxy.errors import Fault, Forbidden, LeasePending, RateLimited
from proxy.memory_budget import BudgetLine
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

# Batches of one account that wait in a worker.
MOST_OF_ACCOUNT = 8
# The memory of an item besides its part of the body, and the shortest part that an item has.
ITEM_BYTES: Final = 640
LEAST_IN_BODY: Final = 40
NO_ROOM = "the worker has no room for more waiting batches of this account: make fewer at a time"

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


class BatchRoom:
    """The memory of one batch while it is read or waits. `give_up` is called if another account needs it."""

    __slots__ = ("account", "counts", "give_up", "is_held", "others", "size")

    def __init__(self, others: WaitingBatches, account: str, size: int) -> None:
        self.others = others
        self.account = account
        self.size = size
        self.give_up: Callable[[], None] = _ignore
        self.is_held = False
        # Whether it counts as one of the account's batches that wait.
        self.counts = False

    def __repr__(self) -> str:
        return f"<BatchRoom {self.size} bytes{' held' if self.is_held else ''}>"

    def take(self) -> bool:
        """Whether there is room for the batch."""
        self.is_held = self.is_held or self.others.enter(self)
        return self.is_held

    @property
    def is_free(self) -> bool:
        """Whether the room can be taken without making another account give up its own."""
        return self.others.memory.has_room(self.account, self.size)

    def wait(self) -> bool:
        """Whether the batch may wait for its account's rate."""
        self.counts = self.counts or (self.take() and self.others.count(self))
        return self.counts

    def belongs_to(self, give_up: Callable[[], None]) -> None:
        """This is called from now on if another account needs the room."""
        self.give_up = give_up

    def give_back(self) -> None:
        # Its owner refers to it as well: the cycle would keep the batch in memory.
        self.give_up = _ignore
        if self.is_held:
            self.is_held = False
            self.others.leave(self)


class WaitingBatches:
    """The batches that are read or wait, by account."""

    def __init__(self, memory: BudgetLine) -> None:
        self.memory = memory
        self._rooms: dict[str, list[BatchRoom]] = {}
        self._bytes: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<WaitingBatches {len(self)} of {len(self._rooms)} accounts>"

    def __len__(self) -> int:
        return sum([len(rooms) for rooms in self._rooms.values()])

    def room(self, account: str, body_bytes: int, most_items: int) -> BatchRoom:
        """Room for a batch of this account, which is not taken yet."""
        items = min(most_items, body_bytes // LEAST_IN_BODY + 1)
        return BatchRoom(self, account, body_bytes + items * ITEM_BYTES)

    def enter(self, room: BatchRoom) -> bool:
        """Take the room. If there is none, accounts that hold more than this one make it."""
        account, size = room.account, room.size
        while not self.memory.take(account, size):
            greediest = self._greediest()
            if self._bytes.get(greediest, 0) <= self._bytes.get(account, 0) + size:
                return False
            self._rooms[greediest][-1].give_up()
        self._rooms.setdefault(account, []).append(room)
        self._bytes[account] = self._bytes.get(account, 0) + size
        return True

    def _greediest(self) -> str:
        """The account that holds most."""
        found, most = "", 0
        for account, held in self._bytes.items():
            if held > most:
                found, most = account, held
        return found

    def count(self, room: BatchRoom) -> bool:
        """Whether one more batch of the account may wait."""
        return len([each for each in self._rooms[room.account] if each.counts]) < MOST_OF_ACCOUNT

    def leave(self, room: BatchRoom) -> None:
        rooms = self._rooms[room.account]
        rooms.remove(room)
        self._bytes[room.account] -= room.size
        if not rooms:
            del self._rooms[room.account], self._bytes[room.account]
        self.memory.give_back(room.account, room.size)


def _ignore() -> None: ...


class BatchAdmission:
    __slots__ = (
        "_admission", "_batch", "_deadline", "_has_left", "_key", "_loop", "_mistaken", "_paused_at", "_refusal", "_room",
        "_send", "_timer", "_turns", "_waited_s", "_waiting",
    )  # fmt: skip

    def __init__(
        self,
        batch: CallBatch,
        key: Key,
        admission: Admission,
        send: SendItems,
        *,
        turns: TurnQueue,
        room: BatchRoom,
        deadline: float,
    ) -> None:
        self._batch = batch
        self._turns = turns
        self._has_left = False
        # Why the items that are left are refused.
        self._refusal: Fault | None = None
        self._room = room
        room.belongs_to(self._give_up)
        self._key = key
        self._admission = admission
        self._send = send
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        # Since when the items wait for the rate, or 0, and for how long they did before.
        self._paused_at = 0.0
        self._waited_s = 0.0
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
        self._room.give_back()
        self._batch.leave()

    def _admit(self) -> None:
        """Admit as many items as the buckets allow, and return later for the rest."""
        self._timer = None
        now = time.monotonic()
        self._end_pause(now)
        admitted: list[PricedItem] = []
        refusal = self._take(admitted, now)
        for each in admitted:
            self._count_wait(each[0])
        if admitted:
            self._send(admitted, now)
        if isinstance(refusal, RateLimited) and self._may_wait(now + refusal.wait_s):
            pause_s = refusal.wait_s if isinstance(refusal, LeasePending) else max(LEAST_PAUSE_S, refusal.wait_s)
            self._timer = self._loop.call_later(pause_s, self._admit)
            self._paused_at = 0.0 if isinstance(refusal, LeasePending) else now
            return
        self._refusal = refusal
        if self._waiting or self._mistaken:
            self._turns.add(self._key.account.id, self._go_on)
        if refusal is not None or not self._waiting:
            self._room.give_back()

    def _give_up(self) -> None:
        """Another account needs the room: refuse the items that are left."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._end_pause(time.monotonic())
            self._turns.add(self._key.account.id, self._go_on)
        self._refusal = RateLimited(NO_ROOM, retry_after_s=1)
        self._room.give_back()

    def _go_on(self) -> bool:
        if self._has_left:
            return False
        if self._refusal is None:
            self._admit()
        else:
            self._refuse(self._refusal)
        return False

    def _may_wait(self, until: float) -> bool:
        return until <= self._deadline and self._room.wait()

    def _take(self, admitted: list[PricedItem], now: float) -> Fault | None:
        """Charge the next items. Returns the refusal that applies to the first one left."""
        if not self._key.alive:
            return Forbidden("this API key was changed or revoked", reason="disabled")
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
            self._batch.on_charged(0 if refusal else units)
        return None

    def _end_pause(self, now: float) -> None:
        if self._paused_at:
            self._waited_s += now - self._paused_at
            self._paused_at = 0.0

    def _count_wait(self, item: BatchItem) -> None:
        """The client's own rate is the cause, so the wait is counted apart from the time that the call took."""
        if self._waited_s:
            item.on_waited(self._waited_s)
            telemetry.rate_wait_seconds.labels("batch").observe(self._waited_s)

    def _refuse(self, refusal: Fault) -> None:
        """Answer some of the items that are left, and come back for the others."""
        error = rpc_error_of(refusal)
        for _ in range(min(REFUSED_PER_STEP, len(self._waiting) + len(self._mistaken))):
            item = self._waiting.popleft()[0] if self._waiting else self._mistaken.popleft()[0]
            self._count_wait(item)
            item.refuse(refusal, error)
        if self._waiting or self._mistaken:
            self._turns.add(self._key.account.id, self._go_on)
