"""Serves agents over HTTP within bounds: `mcp --http`. Needs the packages of the extra `mcp`.

The protocol runs without sessions, so a request is one POST and nothing stays open: streams that a GET would hold, and sessions
that a DELETE would end, do not exist. Requests of one key share a bounded number of places, and so do connections of one
address. A body must arrive in time, and so must the headers of a request on an open connection.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from uvicorn.protocols.http.h11_impl import H11Protocol

from proxy.core.access import client_prefix_of
from proxy.core.fair_permits import FairPermits

PATH = "/mcp"
# A tool call is small: parameters of a call, or the body of a simulation.
MOST_BODY = 1 << 20
BODY_S = 10.0
# Requests under way, in all and with one key, and how long one may take: longer than a call of the service.
MOST_RUNNING, MOST_OF_KEY = 512, 32
REQUEST_S = 90.0
MOST_CONNECTIONS = 1024
# A connection without a request is closed after one to two of these.
IDLE_S = 10.0


def key_of(headers: Any) -> str:
    """The key that a request presents, as the service reads it. `headers`: of Starlette, or a mapping with small letters."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return str(headers.get("x-api-key") or bearer)


class BoundedApp:
    """An ASGI application behind the bounds. It gets requests without queries, and without a slash at the end of their paths:
    it would repeat both in a redirect, and some clients put a key there."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._running = FairPermits(MOST_RUNNING, per_client=MOST_OF_KEY)

    def __repr__(self) -> str:
        return f"<BoundedApp {self._running!r}>"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].rstrip("/")
        if path != PATH:
            await _refuse(send, 404, f"there is only {PATH}")
            return
        if scope["method"] != "POST":
            await _refuse(send, 405, "only POST is served: there are no sessions and no streams", allow=b"POST")
            return
        try:
            async with asyncio.timeout(BODY_S):
                body = await _body(receive)
        except TimeoutError:
            await _refuse(send, 408, f"the body did not arrive within {BODY_S:g} s")
            return
        if body is None:
            await _refuse(send, 413, f"the body has more than {MOST_BODY} bytes")
            return
        await self._serve(scope, body, receive, send)

    async def _serve(self, scope: Any, body: bytes, receive: Any, send: Any) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        client = key_of(headers) or client_prefix_of(scope["client"][0] if scope["client"] else "")
        if not self._running.take(client):
            await _refuse(send, 429, f"more than {MOST_OF_KEY} requests at a time: make fewer", retry_after=b"1")
            return
        plain = {**scope, "query_string": b"", "path": PATH, "raw_path": PATH.encode()}
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        has_begun = False

        async def read() -> Any:
            return messages.pop() if messages else await receive()

        async def write(message: Any) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            async with asyncio.timeout(REQUEST_S):
                await self._app(plain, read, write)
        except TimeoutError:
            if not has_begun:
                await _refuse(send, 504, f"there was no result within {REQUEST_S:g} s")
        finally:
            self._running.give_back(client)


async def _body(receive: Any) -> bytes | None:
    """The body of a request; None if it is too large, or its client has left."""
    parts, size = list[bytes](), 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MOST_BODY:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


async def _refuse(send: Any, status: int, message: str, **headers: bytes) -> None:
    """Refuse a request as a JSON-RPC error. The rest of its body is not read: the connection ends."""
    body = orjson.dumps({"jsonrpc": "2.0", "id": None, "error": {"code": -32600, "message": message}})
    given = [(name.replace("_", "-").encode(), value) for name, value in headers.items()]
    fixed = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *given]})
    await send({"type": "http.response.body", "body": body})


class BoundedConnection(H11Protocol):
    """A connection of a server. One address cannot have all of them. One that is idle, or slow with its headers, is closed."""

    # One for the process, which has one server.
    _places = FairPermits(MOST_CONNECTIONS, per_client=MOST_CONNECTIONS)
    _client = ""
    _check: asyncio.TimerHandle | None = None
    _seen: Any = None

    def __repr__(self) -> str:
        return f"<BoundedConnection of {self._client}>"

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        client = client_prefix_of(self.client[0] if self.client else "")
        if not self._places.take(client):
            transport.abort()
            return
        self._client = client
        self._check = self.loop.call_later(IDLE_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._check is not None:
            self._check.cancel()
            self._check = None
            self._places.give_back(self._client)

    def _look(self) -> None:
        """Close the connection if no request has come since the last look and none is being served."""
        # None before the first request, whatever its type says.
        cycle: Any = self.cycle
        is_served = cycle is not None and not cycle.response_complete
        if not is_served and (cycle is None or cycle is self._seen):
            self.transport.abort()
            return
        self._seen = cycle
        self._check = self.loop.call_later(IDLE_S, self._look)
