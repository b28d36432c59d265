"""A finished call: what happened to a request of a client, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from proxy.core.access import Key
from proxy.core.directives import Directives
from proxy.core.request_records import RecordedAttempt, Surface
from proxy.core.usage import Outcome
from proxy.services.rpc.batches import CallBatch
from proxy.services.rpc.calls import PendingReply
from proxy.services.rpc.flights import Flight


class FinishedCall(msgspec.Struct, kw_only=True, frozen=True):
    # The client's own, or one of ours.
    request_id: str
    key: Key
    network: str
    took_s: float
    surface: Surface = "http"
    method: str = ""
    # The name that the caller gave to a method that does not exist. It may contain a key.
    invented_name: str = ""
    status: int = 200
    # How usage counts it, if it has an error.
    outcome: Outcome = "errors"
    units: int = 0
    # Its cost at upstreams' providers, in billionths of a dollar, unless it is a flight or a batch, which know it.
    cost: int = 0
    cache: str = ""
    # The bytes of the reply.
    size: int = 0
    # A block that the state behind the result has reached; 0 if it is unknown.
    block: int = 0
    # The text of the error or the fault; empty if there was none.
    error: str = ""
    params: bytes = b""
    directives: Directives | None = None
    batch: CallBatch | None = None
    # The attempts are in a flight, in the calls that were made for a REST operation, or here.
    flight: Flight | None = None
    calls: Sequence[PendingReply] = ()
    attempts: Sequence[RecordedAttempt] = ()
