"""Values that are kept with a request that aiohttp serves, for the headers of its reply and for its record."""

from __future__ import annotations

from aiohttp import web

from proxy.core.access import Key
from proxy.core.directives import Directives
from proxy.services.rpc.batches import CallBatch
from proxy.services.rpc.calls import PendingReply
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.short_batch import ShortBatch
from proxy.tracing import Span

REQUEST_ID = web.RequestKey("request_id", str)
# The operation in the API spec.
OPERATION: web.RequestKey[str] = web.RequestKey("operation", str)
KEY = web.RequestKey("key", Key)
UNITS = web.RequestKey("units", int)
CACHE = web.RequestKey("cache", str)
UPSTREAM = web.RequestKey("upstream", str)
# The span of a sampled request.
SPAN = web.RequestKey("span", Span)
# A block that the state behind the reply has reached.
BLOCK = web.RequestKey("block", int)
# For the record of a request: the network and the method of a call, its flight or its batch, the calls that a REST operation
# made, its directives, and its error.
NETWORK = web.RequestKey("network", str)
METHOD = web.RequestKey("method", str)
FLIGHT = web.RequestKey("flight", Flight)
BATCH: web.RequestKey[CallBatch | ShortBatch] = web.RequestKey("batch", object)  # type: ignore[arg-type]
CALLS: web.RequestKey[list[PendingReply]] = web.RequestKey("calls", list)
DIRECTIVES = web.RequestKey("directives", Directives)
FAILURE = web.RequestKey("failure", str)
PARAMS = web.RequestKey("params", bytes)
