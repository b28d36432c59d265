"""The replies of upstreams to a call that is verified, and the one answer to its caller."""

from __future__ import annotations

from dataclasses import dataclass

from proxy import telemetry
from proxy.core.verification import Verification
from proxy.errors import Fault
from proxy.services.rpc.flights import Caller
from proxy.wire.upstream import Upstream


@dataclass(frozen=True, slots=True)
class ReplyVote:
    """The reply of one upstream to a call that several are asked."""

    upstream: Upstream
    digest: str
    result: bytes = b""
    error: bytes = b""


class VerifiedAnswer:
    """Answers a caller once, and counts the outcome."""

    def __init__(self, caller: Caller, how: Verification) -> None:
        self._caller = caller
        self._how = how
        # Empty until the caller has been answered.
        self.outcome = ""

    def __repr__(self) -> str:
        return f"<VerifiedAnswer by {self._how}>"

    def result(self, result: bytes) -> None:
        if self._is_first("verified"):
            self._caller.cache = str(self._how)
            self._caller.on_result(result)

    def error(self, error: bytes) -> None:
        if self._is_first("verified"):
            self._caller.cache = str(self._how)
            self._caller.on_error(error)

    def fault(self, fault: Fault) -> None:
        if self._is_first("failed"):
            self._caller.on_fault(fault)

    def _is_first(self, outcome: str) -> bool:
        if self.outcome:
            return False
        self.outcome = outcome
        telemetry.verifications_total.labels(self._how.kind, outcome).inc()
        return True
