"""The state of a request that aiohttp serves, for the headers of its reply and for its record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from proxy.core.access import Key
from proxy.core.directives import Directives
from proxy.core.usage import Outcome, outcome_of
from proxy.errors import Fault
from proxy.services.rpc.batches import CallBatch
from proxy.services.rpc.calls import PendingReply
from proxy.services.rpc.finished_call import FinishedCall
from proxy.services.rpc.flights import Flight
from proxy.tracing import Span


@dataclass(slots=True)
class RequestState:
    request_id: str
    # The operation in the API spec; empty for other paths.
    operation: str = ""
    # The span of a sampled request.
    span: Span | None = None
    key: Key | None = None
    network: str = ""
    # The method of a JSON-RPC call; None for other requests.
    method: str | None = None
    # The name that the caller gave to a method that does not exist.
    invented_name: str = ""
    params: bytes = b""
    directives: Directives | None = None
    # The price, if it is known.
    units: int | None = None
    # Its cost at upstreams' providers, in billionths of a dollar.
    cost: int = 0
    cache: str = ""
    upstream: str = ""
    # A block that the state behind the reply has reached.
    block: int = 0
    failure: str = ""
    # How long a stream of events took to begin: how long it lasted says nothing.
    began_after_s: float | None = None
    # How usage counts a failure; None for the usual outcome of the status.
    outcome: Outcome | None = None
    # The flight of a call, a batch, or the calls that a REST operation made.
    flight: Flight | None = None
    batch: CallBatch | None = None
    calls: Sequence[PendingReply] = ()

    def refused(self, fault: Fault) -> None:
        """The request, or an operation in it, ended with this fault."""
        self.failure, self.outcome = fault.message, outcome_of(fault)

    def finished(self, key: Key, reply: web.StreamResponse, took_s: float) -> FinishedCall:
        return FinishedCall(
            request_id=self.request_id,
            key=key,
            network=self.network,
            took_s=took_s,
            surface="rest" if self.method is None else "http",
            method=self.method or self.operation,
            invented_name=self.invented_name,
            status=reply.status,
            outcome=self.outcome or ("faults" if reply.status >= 500 else "errors"),
            units=self.units or 0,
            cost=self.cost,
            cache=self.cache,
            size=reply.content_length or 0,
            block=self.block,
            error=self.failure or ("internal error" if reply.status >= 500 else ""),
            params=self.params,
            directives=self.directives,
            batch=self.batch,
            flight=self.flight,
            calls=self.calls,
        )


STATE = web.RequestKey("state", RequestState)
