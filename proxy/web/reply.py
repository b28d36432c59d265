"""Builds replies: JSON by orjson, and errors with the API's error body."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import web

from proxy.errors import Fault
from proxy.settings import TlsSettings

JSON = "application/json"
SERVER = "Penstock"


def fixed_headers(tls: TlsSettings) -> dict[str, str]:
    """The headers that are the same in every reply. RFC 6797, 7.2: no Strict-Transport-Security without TLS."""
    hsts = {"Strict-Transport-Security": f"max-age={tls.hsts_s}"} if tls.is_used and tls.hsts_s else {}
    return {"Server": SERVER, **hsts}


def header_lines(headers: Mapping[str, str]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1")


def json_reply(data: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(data), status=status, headers=headers, content_type=JSON)


def fault_reply(fault: Fault) -> web.Response:
    return json_reply(fault.body(), status=fault.status, headers=fault.headers)


def raw_fault(fault: Fault, headers: Mapping[str, str]) -> bytes:
    """A complete HTTP reply for a connection without a parsed request. The connection is closed after it."""
    body = orjson.dumps(fault.body())
    extra = "".join(f"{name}: {value}\r\n" for name, value in {**fault.headers, **headers}.items())
    head = (
        f"HTTP/1.1 {fault.status} {HTTPStatus(fault.status).phrase}\r\nContent-Type: {JSON}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n{extra}\r\n"
    )
    return head.encode("ascii") + body
