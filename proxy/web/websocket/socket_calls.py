"""Messages of a socket: each one a call or a batch, answered as on HTTP, whenever its answer is there.

The id says which reply is whose, so a slow call holds nobody up. Whatever is wrong with a message is an error on the socket.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from proxy.core import jsonrpc
from proxy.core.jsonrpc import MalformedCall
from proxy.errors import Fault
from proxy.services.rpc.batches import UNITS_OF_AN_ERROR, CallBatch, rpc_error_of
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.short_batch import ShortBatch
from proxy.services.rpc.waiters import WholeResultWaiter
from proxy.web.websocket.frames import frame, frame_head

if TYPE_CHECKING:
    from proxy.web.websocket.client_socket import ClientSocket

_AROUND_A_RESULT = len(jsonrpc.HEAD) + len(',"result":}')


def answer(socket: ClientSocket, message: bytes) -> None:
    """Ask what the message asks; it is in `socket.calls` until it is answered."""
    try:
        if jsonrpc.is_batch(message):
            SocketBatch(socket, time.monotonic()).ask(jsonrpc.parse_batch(message))
        else:
            SocketCall(socket, time.monotonic()).ask(jsonrpc.parse(message))
    except MalformedCall as exc:
        _decline(socket, exc)


def _decline(socket: ClientSocket, exc: MalformedCall) -> None:
    """It costs what an error costs: nonsense must not be cheaper than calls."""
    refusal = socket.room.admission.charge(socket.key, 1, UNITS_OF_AN_ERROR, time.monotonic())
    error = rpc_error_of(refusal) if refusal is not None else jsonrpc.error(exc.code, exc.message)
    socket.send(frame(jsonrpc.error_reply(exc.id, error)))


class SocketCall(WholeResultWaiter):
    """A single call: the waiter of its answer."""

    __slots__ = ("_began", "_socket", "cache", "flight", "id", "policy", "units")

    def __init__(self, socket: ClientSocket, now: float) -> None:
        self._socket = socket
        self._began = now
        self.id = b""
        self.policy: MethodPolicy | None = None
        self.flight: Flight | None = None
        self.units = 0
        self.cache = ""

    def __repr__(self) -> str:
        return f"<SocketCall {self.policy!r}>"

    def ask(self, call: jsonrpc.RawCall) -> None:
        socket = self._socket
        self.id = call[2]
        socket.calls.add(self)
        socket.room.rpc.ask(self, socket.route, socket.key, call, self._began, subscriber=socket.subscriptions)

    def leave(self) -> None:
        if self.flight is not None:
            self.flight.leave(self)

    def on_result(self, result: bytes | msgspec.Raw) -> None:
        id_ = self.id
        if id_:
            head = frame_head(len(id_) + len(result) + _AROUND_A_RESULT)
            self._socket.send(b"".join((head, jsonrpc.HEAD, id_, b',"result":', result, b"}")))
        self._end("results")

    def on_error(self, error: bytes) -> None:
        if self.id:
            self._socket.send(frame(jsonrpc.error_reply(self.id, error)))
        self._end("errors")

    def on_fault(self, fault: Fault) -> None:
        self._socket.room.rpc.refund(self._socket.key, fault, 1, self.units)
        self.units = 0
        if self.id:
            self._socket.send(frame(jsonrpc.error_reply(self.id, rpc_error_of(fault))))
        self._end("faults")

    def _end(self, outcome: str) -> None:
        took_s = time.monotonic() - self._began
        if self.policy is not None:
            self._socket.key.sheet[self.policy.tally].count(outcome, self.cache, self.units, took_s)
        name = self.policy.method.name if self.policy is not None else ""
        self._socket.answered(self, name, outcome=outcome, units=self.units, took_s=took_s)


class SocketBatch:
    """A batch."""

    __slots__ = ("_batch", "_began", "_is_done", "_socket")

    def __init__(self, socket: ClientSocket, now: float) -> None:
        self._socket = socket
        self._began = now
        self._batch: CallBatch | ShortBatch | None = None
        self._is_done = False

    def __repr__(self) -> str:
        return f"<SocketBatch {self._batch!r}>"

    def ask(self, items: list[jsonrpc.RawCall | MalformedCall]) -> None:
        socket = self._socket
        socket.calls.add(self)
        asked = socket.room.rpc.ask_batch(
            items, socket.route, socket.key, self._began, self._on_batch, subscriber=socket.subscriptions
        )
        if isinstance(asked, Fault):
            self._refuse(items, rpc_error_of(asked))
            self._end("faults", 0)
        elif not self._is_done:
            self._batch = asked

    def _refuse(self, items: list[jsonrpc.RawCall | MalformedCall], error: bytes) -> None:
        """All of it. Each call is told, under its id: a client would wait for it for ever."""
        ids = [item.id if isinstance(item, MalformedCall) else item[2] for item in items]
        if replies := [jsonrpc.error_reply(id_, error) for id_ in ids if id_]:
            self._socket.send(frame(b"[" + b",".join(replies) + b"]"))

    def leave(self) -> None:
        if self._batch is not None:
            self._batch.leave()

    def _on_batch(self, batch: CallBatch | ShortBatch) -> None:
        self._is_done = True
        units = self._socket.room.rpc.settle_batch(self._socket.key, batch)
        if body := batch.body():
            self._socket.send(frame(body))
        if isinstance(batch, CallBatch):  # A short one is of plain reads only.
            self._socket.subscriptions.confirm(batch.items)
        self._end("results", units)

    def _end(self, outcome: str, units: int) -> None:
        took_s = time.monotonic() - self._began
        self._socket.answered(self, "batch", outcome=outcome, units=units, took_s=took_s)
