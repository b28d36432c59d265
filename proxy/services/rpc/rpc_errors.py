"""Faults in the form that batches and sockets use."""

from __future__ import annotations

from typing import Any

from proxy.core import jsonrpc
from proxy.errors import BehindBlock, Fault, Forbidden, InvalidRequest, NotVerified, RateLimited, Unavailable


def rpc_error_of(fault: Fault) -> bytes:
    """A fault as a JSON-RPC error, for batches and sockets."""
    data: dict[str, Any] | None = None
    match fault:
        case RateLimited():
            code = jsonrpc.LIMIT_EXCEEDED
            data = {"retryAfter": fault.retry_after_s, **(fault.details or {})}
        case BehindBlock():
            code = jsonrpc.RESOURCE_UNAVAILABLE
            data = {"retryAfter": fault.retry_after_s, **(fault.details or {})}
        case NotVerified() | Unavailable():
            code = jsonrpc.INTERNAL_ERROR
            data = {"retryAfter": fault.retry_after_s}
        case Forbidden():
            code = jsonrpc.UNAUTHORIZED
        case InvalidRequest():
            code = jsonrpc.INVALID_REQUEST
        case _:
            code = jsonrpc.INTERNAL_ERROR
            data = fault.details
    return jsonrpc.error(code, fault.message, data)
