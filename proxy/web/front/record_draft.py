"""Collects the record of the request under way, until its reply is written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import final

from proxy.core.request_records import RecordedAttempt
from proxy.core.usage import Outcome
from proxy.errors import BROKEN_REPLY
from proxy.services.rpc.batches import CallBatch
from proxy.services.rpc.finished_call import FinishedCall
from proxy.services.rpc.flights import Caller
from proxy.services.rpc.method_policy import invented_name_of, method_of
from proxy.web.call_accounting import CallAccounting
from proxy.web.front.request_headers import RequestHeaders


@final
class RecordDraft:
    """The draft of one client connection. One request is served at a time, so it is reused for all of them."""

    __slots__ = ("_accounting", "_awaits_end", "_batch", "_failure", "_outcome", "_params", "_request_id")

    def __init__(self, accounting: CallAccounting) -> None:
        self._accounting = accounting
        # The params, if they are recorded.
        self._params = b""
        # The message of the error, if the call failed.
        self._failure = ""
        self._outcome: Outcome = "errors"
        # The batch that was answered, if it was one.
        self._batch: CallBatch | None = None
        # Whether the outcome is known only at the end of a reply that is sent in parts, and the id of the request.
        self._awaits_end = False
        self._request_id = b""

    def __repr__(self) -> str:
        return f"<RecordDraft {self._failure or 'no failure'}>"

    def begin(self, params: bytes) -> None:
        """A request begins. `params`: empty if they are not recorded."""
        self._params = params

    def failed(self, message: str, outcome: Outcome) -> None:
        self._failure, self._outcome = message, outcome

    def batch_answered(self, batch: CallBatch) -> None:
        self._batch = batch

    def await_end(self) -> None:
        """The reply is sent in parts, so its outcome is known only at its end: see `record_end`."""
        self._awaits_end = True

    def record(
        self, headers: RequestHeaders, caller: Caller, status: int, request_id: bytes, took_s: float, *, size: int
    ) -> None:
        """Record the request, if it is to be recorded. `size`: the bytes of the reply's body. The draft is cleared, except for
        the params, which the next request replaces."""
        self._request_id = request_id
        if self._awaits_end:
            return
        failure, batch = self._failure, self._batch
        self._failure, self._batch = "", None
        account, accounting, flight = headers.key.account, self._accounting, caller.flight
        is_usual = account.unsampled > 1 and took_s <= accounting.slow_s and headers.directives is None
        if batch is not None and batch.plain and is_usual:
            account.passed_over()  # All its items were answered, and it is not recorded.
            return
        accounting.record(
            FinishedCall(
                request_id=request_id.decode(),
                key=headers.key,
                network=headers.route.network.id,
                took_s=took_s,
                method=method_of(caller.policy),
                invented_name=invented_name_of(caller.policy),
                status=status,
                outcome=self._outcome,
                units=caller.units,
                cache=caller.cache,
                size=size,
                block=caller.block if flight is None else flight.block,
                error=failure,
                params=self._params,
                directives=headers.directives,
                batch=batch,
                flight=flight,
                attempts=_short_attempt(headers, caller, took_s) if flight is None else (),
            )
        )

    def record_end(
        self, headers: RequestHeaders | None, caller: Caller, began: float, *, batch: CallBatch | None = None
    ) -> None:
        """Record a request whose reply was sent in parts. Without `batch`, the reply broke off."""
        self._awaits_end = False
        self._batch = batch
        if batch is None:
            self.failed(BROKEN_REPLY, "upstream_faults")
        else:
            self._failure = ""
        if headers is not None:
            self.record(headers, caller, 200, self._request_id, time.monotonic() - began, size=0)


def _short_attempt(headers: RequestHeaders, caller: Caller, took_s: float) -> Sequence[RecordedAttempt]:
    """The attempt of a call without a flight."""
    only, policy = headers.route.only, caller.policy
    is_short = policy is not None and policy.short and not caller.cache and caller.units > 0
    return ((only.label, 0.0, took_s, "answered"),) if only is not None and is_short else ()
