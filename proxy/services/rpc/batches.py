"""The calls of one batch request, answered in order.

Every item is checked, priced and answered separately: a refused item gets a JSON-RPC error while the others run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from proxy.core import jsonrpc
from proxy.core.jsonrpc import MalformedCall, RawCall
from proxy.core.usage import KeyTallies
from proxy.errors import Fault, Forbidden, InternalError, InvalidRequest, RateLimited
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.waiters import WholeResultWaiter

# The price of a call that is answered with an error for its own mistake.
UNITS_OF_AN_ERROR = 1


class BatchItem(WholeResultWaiter):
    """One call of a batch, and its reply once that has arrived."""

    __slots__ = ("batch", "cache", "fault", "flight", "id", "policy", "reply", "settled", "units")

    def __init__(self, batch: CallBatch, id_: bytes | None) -> None:
        self.batch = batch
        self.id = id_
        self.policy: MethodPolicy | None = None
        self.flight: Flight | None = None
        self.units = 0
        self.cache = ""
        self.reply = b""
        self.fault: Fault | None = None
        self.settled = False

    def on_result(self, result: bytes | msgspec.Raw) -> None:
        if self.id:
            self.reply = jsonrpc.result_reply(self.id, result)
        self._settle("results")

    def on_error(self, error: bytes) -> None:
        if self.id:
            self.reply = jsonrpc.error_reply(self.id, error)
        self._settle("errors" if self.fault is None else "faults")

    def on_fault(self, fault: Fault) -> None:
        self.fault = fault
        self.on_error(rpc_error_of(fault))

    def decline(self, why: bytes | Fault) -> None:
        """Answer the item without calling an upstream. A refusal is free."""
        if isinstance(why, Fault):
            self.on_fault(why)
        else:
            self.units = UNITS_OF_AN_ERROR
            self.on_error(why)

    def _settle(self, outcome: str) -> None:
        if self.settled:
            return
        self.settled = True
        if self.policy is not None:
            units = self.units if self.fault is None else 0
            self.batch.sheet[self.policy.tally].count(outcome, self.cache, units, time.monotonic() - self.batch.began)
        self.batch.settled()


class CallBatch:
    """The items of one request. `done` is called when all are answered."""

    __slots__ = ("_done", "_open", "began", "items", "sheet", "units")

    def __init__(
        self, calls: Sequence[RawCall | MalformedCall], done: Callable[[CallBatch], None], now: float, sheet: KeyTallies
    ) -> None:
        self.items = [BatchItem(self, call.id if isinstance(call, MalformedCall) else call[2]) for call in calls]
        self.units = 0
        self.began = now
        # The tallies that its items are counted in.
        self.sheet = sheet
        self._open = -1
        self._done = done

    def __repr__(self) -> str:
        return f"<CallBatch of {len(self.items)}, {max(self._open, 0)} open>"

    def expect(self, count: int) -> None:
        """Set how many items are open. Refused items are settled already."""
        self._open = count
        if count == 0:
            self._done(self)

    def settled(self) -> None:
        if self._open > 0:
            self._open -= 1
            if self._open == 0:
                self._done(self)

    def body(self) -> bytes:
        """The reply; empty if all items were notifications."""
        replies = [item.reply for item in self.items if item.reply]
        return b"[" + b",".join(replies) + b"]" if replies else b""

    def failed(self) -> list[BatchItem]:
        return [item for item in self.items if isinstance(item.fault, InternalError)]

    def leave(self) -> None:
        for item in self.items:
            if item.flight is not None and not item.settled:
                item.flight.leave(item)


def rpc_error_of(fault: Fault) -> bytes:
    """A fault as a JSON-RPC error, for batches and sockets."""
    data: dict[str, Any] | None = None
    match fault:
        case RateLimited():
            code = jsonrpc.LIMIT_EXCEEDED
            data = {"retryAfter": fault.retry_after_s, **(fault.details or {})}
        case Forbidden():
            code = jsonrpc.UNAUTHORIZED
        case InvalidRequest():
            code = jsonrpc.INVALID_REQUEST
        case _:
            code = jsonrpc.INTERNAL_ERROR
    return jsonrpc.error(code, fault.message, data)
