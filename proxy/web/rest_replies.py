"""Replies to requests for routes of REST chains, from the results and errors of their calls (`core/rest_routes.py`).

Both ways that serve such requests use it: aiohttp's handler (`rpc/rest_handler.py`) and the hot path
(`front/record_starts.py`).
"""

from __future__ import annotations

import msgspec

from proxy.core.rest_routes import RestError, RestRecord, read_error
from proxy.errors import Fault, InternalError, NotFound, of_status
from proxy.services.rpc.held_body import NO_ROOM


def body_of(record: RestRecord) -> bytes:
    if record.base64:
        return record.base64
    body = bytes(record.body)
    return b"" if body == b"null" else body


def reply_to_error(error: bytes) -> RestRecord | Fault:
    """The upstream's own reply, if its error may be shown, or a fault."""
    try:
        rest_error = read_error(error)
    except msgspec.DecodeError:
        return InternalError("the upstreams failed", reason="upstream")
    return rest_error.data or _fault_of(error, rest_error)


def _fault_of(error: bytes, rest_error: RestError) -> Fault:
    """An error without a reply of the upstream: its text must not be shown, or it is ours."""
    if error == NO_ROOM:
        return of_status(503, rest_error.message)
    if rest_error.code in (404, 410):
        return NotFound(f"the chain has no such object: {rest_error.message[:200]}")
    if 400 <= rest_error.code < 500 and rest_error.code not in (401, 402, 403, 407, 429):
        return of_status(rest_error.code, rest_error.message[:200])
    return InternalError(f"the upstreams failed: {rest_error.message[:200]}", reason="upstream")
