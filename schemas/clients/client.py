"""A client for a Penstock service, for Python 3.11 and newer, without dependencies.

Generated from the service's OpenAPI document by `penstock clients`: do not edit it.

    penstock = Penstock("https://rpc.example.com", key)
    print(penstock.list_keys())
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from email.message import Message
from typing import Any


class PenstockError(Exception):
    """An error reply. `code`, `reason`, `param` and `request_id` are those of the reply; `status` is that of HTTP."""

    def __init__(self, status: int, body: Any, headers: Message) -> None:
        error = body.get("error", {}) if isinstance(body, dict) else {}
        super().__init__(error.get("message", f"status {status}"))
        self.status = status
        self.code: str = error.get("code", "internal_error")
        self.reason: str = error.get("reason", "")
        self.param: str = error.get("param", "")
        self.request_id = headers.get("X-Request-Id", "")
        self.retry_after_s = float(headers.get("Retry-After") or 1)


class Transport:
    """Sends requests. One that was refused for its rate is sent again, and so is a read that failed on the service's side."""

    def __init__(self, url: str, key: str, *, timeout_s: float = 30.0, retries: int = 3) -> None:
        self._base = url.rstrip("/") + "/v1"
        self._key = key
        self._timeout_s = timeout_s
        self._retries = retries

    def _send(self, method: str, path: str, query: Mapping[str, Any] | None = None, body: Any = None) -> Any:
        given = {name: _text(value) for name, value in (query or {}).items() if value is not None}
        url = f"{self._base}{path}?{urllib.parse.urlencode(given)}".rstrip("?")
        headers = {"X-API-Key": self._key, "Accept": "application/json"}
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        for left in range(self._retries, -1, -1):
            try:
                return self._once(urllib.request.Request(url, data, headers, method=method))
            except PenstockError as error:
                may_repeat = error.status == 429 or (method == "GET" and error.status >= 500)
                if not may_repeat or not left:
                    raise
                time.sleep(min(error.retry_after_s, self._timeout_s))
        raise AssertionError("unreachable")

    def _once(self, request: urllib.request.Request) -> Any:
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as reply:
                text = reply.read().decode()
                is_json = reply.headers.get_content_type() == "application/json"
                return json.loads(text) if is_json else text
        except urllib.error.HTTPError as reply:
            raw = reply.read()
            is_json = reply.headers.get_content_type() == "application/json"
            raise PenstockError(reply.code, json.loads(raw) if is_json else None, reply.headers) from None


def _text(value: Any) -> str:
    """A query parameter: lists are joined by commas."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _at(segment: str) -> str:
    return urllib.parse.quote(segment, safe="")
