"""A batch before its admission: its items are parsed, checked and priced, a few in each turn of its account.

This is for batches that are large or have mistakes in them. Nothing is charged or sent before all items are read, because a
body that is not a batch is refused as a whole. A batch is read when its account has room for its items; until then it waits for
the account's other batches, for as long as items wait for their rate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from proxy.core.batch_reader import BatchReader
from proxy.core.jsonrpc import MalformedCall, RawCall
from proxy.errors import Fault, RateLimited
from proxy.services.rpc.batch_admission import ITEMS_PER_STEP, NO_ROOM, BatchAdmission, BatchRoom
from proxy.services.rpc.batches import CallBatch
from proxy.turn_queue import TurnQueue

# Refuses a batch whole. The ids are those of its calls; there are none if it could not be read.
BatchRefusal = Callable[[Fault | MalformedCall, Sequence[bytes]], None]


class BatchIntake:
    __slots__ = (
        "_admission", "_admit", "_batch", "_check", "_client", "_has_left", "_reader", "_refuse", "_room", "_timer", "_turns",
        "_wait_s",
    )  # fmt: skip

    def __init__(
        self,
        reader: BatchReader,
        batch: CallBatch,
        *,
        check: Callable[[Sequence[RawCall | MalformedCall]], None],
        admit: Callable[[], BatchAdmission | None],
        refuse: BatchRefusal,
        turns: TurnQueue,
        room: BatchRoom,
        wait_s: float,
    ) -> None:
        """`wait_s`: how long the batch waits for room."""
        self._reader = reader
        self._batch = batch
        self._check = check
        self._admit = admit
        self._refuse = refuse
        self._turns = turns
        self._client = room.account
        self._room = room
        room.belongs_to(self._give_up)
        self._wait_s = wait_s
        self._timer: asyncio.TimerHandle | None = None
        self._admission: BatchAdmission | None = None
        self._has_left = False

    def __repr__(self) -> str:
        return f"<BatchIntake {self._admission or self._reader!r}>"

    def start(self) -> None:
        if not self._begin():
            self._room.others.memory.budget.wait(self._client, self._begin_later)
            self._timer = asyncio.get_running_loop().call_later(self._wait_s, self._give_up)

    def _begin(self) -> bool:
        """Read the batch, if there is room for it."""
        if not self._room.take():
            return False
        self._stop_timer()
        self._turns.add(self._client, self._read)
        return True

    def _begin_later(self) -> bool:
        """Called while others give back memory. Only free room is taken: no account is made to give up its room meanwhile."""
        return self._room.is_free and self._begin()

    def _give_up(self) -> None:
        """There was no room in time, or another account needs it."""
        if self._has_left:
            return
        self._end()
        self._has_left = True
        self._refuse(RateLimited(NO_ROOM, retry_after_s=1), ())

    def _end(self) -> None:
        self._stop_timer()
        self._room.others.memory.budget.forget(self._client, self._begin_later)
        self._room.give_back()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def leave(self) -> None:
        self._end()
        self._has_left = True
        if self._admission is not None:
            self._admission.leave()
        else:
            self._batch.leave()

    def _read(self) -> bool:
        if self._has_left:
            return False
        try:
            self._check(self._reader.read(ITEMS_PER_STEP))
        except MalformedCall as exc:
            self._end()
            self._refuse(exc, ())
            return False
        if self._reader.is_done:
            self._admission = self._admit()
            if self._admission is None:
                self._end()
        else:
            self._turns.add(self._client, self._read)
        return False
