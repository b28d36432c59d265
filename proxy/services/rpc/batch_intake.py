"""A batch before its admission: its items are parsed, checked and priced, a few in each turn of its account.

This is for batches that are large or have mistakes in them. Nothing is charged or sent before all items are read, because a
body that is no batch is refused whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from proxy.core.batch_reader import BatchReader
from proxy.core.jsonrpc import MalformedCall, RawCall
from proxy.errors import Fault
from proxy.services.rpc.batch_admission import ITEMS_PER_STEP, BatchAdmission
from proxy.services.rpc.batches import CallBatch
from proxy.turn_queue import TurnQueue

# Refuses a batch whole. The ids are those of its calls; there are none if it could not be read.
BatchRefusal = Callable[[Fault | MalformedCall, Sequence[bytes]], None]


class BatchIntake:
    __slots__ = ("_admission", "_admit", "_batch", "_check", "_client", "_has_left", "_reader", "_refuse", "_turns")

    def __init__(
        self,
        reader: BatchReader,
        batch: CallBatch,
        *,
        check: Callable[[Sequence[RawCall | MalformedCall]], None],
        admit: Callable[[], BatchAdmission | None],
        refuse: BatchRefusal,
        turns: TurnQueue,
        client: str,
    ) -> None:
        self._reader = reader
        self._batch = batch
        self._check = check
        self._admit = admit
        self._refuse = refuse
        self._turns = turns
        self._client = client
        self._admission: BatchAdmission | None = None
        self._has_left = False

    def __repr__(self) -> str:
        return f"<BatchIntake {self._admission or self._reader!r}>"

    def start(self) -> None:
        self._turns.add(self._client, self._read)

    def leave(self) -> None:
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
            self._refuse(exc, ())
            return False
        if self._reader.is_done:
            self._admission = self._admit()
        else:
            self._turns.add(self._client, self._read)
        return False
