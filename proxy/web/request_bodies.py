"""Reading the bodies of requests that aiohttp serves: within their deadline, their size limit and the memory for bodies."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from proxy.errors import RequestTimeout, TooLarge, UnsupportedMedia
from proxy.settings import ServerSettings
from proxy.tasks import client_of_task
from proxy.web.api_spec import ApiOperation
from proxy.web.front.connection_limiter import ConnectionLimiter
from proxy.web.front.handler_connection import HandlerConnection

# The sender of a large body, and the memory that is counted for it.
_HELD: web.RequestKey[tuple[str, int]] = web.RequestKey("held", tuple)
# Bodies from this size on are counted until the request ends, at this multiple of their size: the text, and a Python object for
# each parsed value.
_LARGE_BODY, _PARSED = 65_536, 3
_OCTETS = "application/octet-stream"


class RequestBodies:
    def __init__(self, limiter: ConnectionLimiter, settings: ServerSettings) -> None:
        self._limiter = limiter
        self._settings = settings

    async def read_checked(self, request: web.Request, operation: ApiOperation, *, larger: int = 0) -> Any:
        """The body of an operation, validated. Between the steps that a large one takes, other clients have their turns."""
        body = await self._receive(request, most=operation.body_bytes, larger=larger)
        self._hold(request, len(body))
        steps = operation.body_steps(body)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value
            await self._limiter.turns.wait(client_of_task.get())

    def _hold(self, request: web.Request, size: int) -> None:
        """Count a large body, which is about to be parsed, as memory of its sender until the request ends."""
        if size < _LARGE_BODY:
            return
        held = (_sender(request), size * _PARSED)
        if refusal := self._limiter.take_body(*held):
            raise refusal
        request[_HELD] = held

    def release(self, request: web.Request) -> None:
        """The request has ended."""
        if (held := request.get(_HELD)) is not None:
            self._limiter.give_back_body(*held)

    async def read_body(self, request: web.Request, *, most: int | None = None) -> bytes:
        """The body, within its deadline and the general size limit, or a lower one."""
        return bytes(await self._receive(request, most=most))

    async def _receive(self, request: web.Request, *, most: int | None = None, larger: int = 0) -> bytearray:
        """The body, within its deadline and its size limit: the general limit, lowered by `most` or raised by `larger`.

        A large one is not copied at its end, which would take milliseconds.
        """
        cap = max(self._settings.max_body_bytes, larger)
        most = min(most or cap, cap)
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise UnsupportedMedia("compressed bodies are not accepted: send the body without Content-Encoding")
        if not _is_json(request):
            raise UnsupportedMedia("the header Content-Type must be application/json")
        body = bytearray()
        too_large = TooLarge(f"the body is larger than {most} bytes")
        if (request.content_length or 0) > most:
            raise too_large
        sender = _sender(request)
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                # A chunked body has no length up front.
                async for piece in request.content.iter_any():
                    if len(body) + len(piece) > most:
                        raise too_large
                    if refusal := self._limiter.take_body(sender, len(piece)):
                        raise refusal
                    body += piece
        except TimeoutError:
            raise RequestTimeout("the request's body did not arrive in time") from None
        finally:
            if body:
                self._limiter.give_back_body(sender, len(body))
        return body


def _sender(request: web.Request) -> str:
    return request.protocol.client if isinstance(request.protocol, HandlerConnection) else ""


def _is_json(request: web.Request) -> bool:
    """Accept a missing or generic type too: RFC 9110, 8.3 allows examining such a body.

    web3.py sends no type if its user sets headers, and its asynchronous client sends application/octet-stream.
    """
    given = request.headers.get("Content-Type", _OCTETS)
    return given.lower() == _OCTETS or request.content_type == "application/json"
