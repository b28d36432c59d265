"""Reading the bodies of requests that aiohttp serves: within their deadline, their size limit and the memory for bodies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import Any

from aiohttp import web

from proxy.core.bounded_json import JsonReader, RefusedJson
from proxy.core.pricing import body_units
from proxy.errors import RequestTimeout, TooLarge, UnsupportedMedia
from proxy.services.accounts.metering import meter_of_task
from proxy.settings import ServerSettings
from proxy.tasks import client_of_task
from proxy.web.api_spec import ApiOperation, refused_body
from proxy.web.front.connection_limiter import ConnectionLimiter
from proxy.web.front.handler_connection import HandlerConnection
from proxy.web.reply import JSON

# The sender of a body, and the memory that is counted for it.
_HELD: web.RequestKey[tuple[str, int]] = web.RequestKey("held", tuple)
# A parsed body is counted at this multiple of its size: a Python object for each value.
_PARSED = 3
# The deadline of a body is extended by this much while its bytes wait for us.
_AGAIN_S = 1.0
_OCTETS = "application/octet-stream"


class RequestBodies:
    def __init__(self, limiter: ConnectionLimiter, settings: ServerSettings) -> None:
        self._limiter = limiter
        self._settings = settings

    async def read_checked(self, request: web.Request, operation: ApiOperation, *, larger: int = 0) -> Any:
        """The body of an operation, validated. `larger` raises the general size limit.

        It is parsed while it arrives. Between the steps that a large one takes, other clients have their turns. An account pays
        for a large one while it arrives, so it is read at the account's own rate.
        """
        cap = max(self._settings.max_body_bytes, larger)
        reader, refusal = JsonReader(), None
        meter, size = meter_of_task.get(), 0
        async for piece in self._pieces(request, min(operation.body_bytes or cap, cap)):
            due = body_units(size + len(piece)) - body_units(size)
            size += len(piece)
            if due and meter is not None:
                await meter.pay_for_size(due)
            if refusal is not None:
                continue  # The client reads the reply once it has sent everything.
            self._hold(request, len(piece) * _PARSED)
            reader.add(piece)
            try:
                while not reader.step():
                    await self._limiter.turns.wait(client_of_task.get())
            except RefusedJson as exc:
                refusal = refused_body(exc)
                self.release(request)
        if refusal is not None:
            raise refusal
        reader.end()
        steps = operation.body_steps(reader)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value
            await self._limiter.turns.wait(client_of_task.get())

    async def read_body(
        self, request: web.Request, *, most: int | None = None, types: Collection[str] = (JSON,)
    ) -> bytes:
        """The body, within its deadline and the general size limit, or a lower one. `types`: the media types it may have."""
        cap = self._settings.max_body_bytes
        body = bytearray()
        async for piece in self._pieces(request, min(most or cap, cap), types):
            self._hold(request, len(piece))
            body += piece
        self.release(request)
        return bytes(body)

    def _hold(self, request: web.Request, size: int) -> None:
        """Count this much memory for the body's sender, until the request ends."""
        sender, held = request.get(_HELD) or (_sender(request), 0)
        if refusal := self._limiter.take_body(sender, size):
            raise refusal
        request[_HELD] = (sender, held + size)

    def release(self, request: web.Request) -> None:
        """The memory that was counted for the body is free."""
        if held := request.get(_HELD):
            del request[_HELD]
            self._limiter.give_back_body(*held)

    async def _pieces(self, request: web.Request, most: int, types: Collection[str] = (JSON,)) -> AsyncIterator[bytes]:
        """The body as it arrives, within its deadline and this size limit."""
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise UnsupportedMedia("compressed bodies are not accepted: send the body without Content-Encoding")
        if request.content_type not in types and not (JSON in types and _is_json(request)):
            raise UnsupportedMedia(f"the header Content-Type must be {' or '.join(types)}")
        too_large = TooLarge(f"the body is larger than {most} bytes")
        if (request.content_length or 0) > most:
            raise too_large
        size, now = 0, asyncio.get_running_loop().time
        deadline = now() + self._settings.body_timeout_s
        # A chunked body has no length up front.
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    piece = await request.content.readany()
            except TimeoutError:
                if not _waits_for_us(request):
                    raise RequestTimeout("the request's body did not arrive in time") from None
                deadline = now() + _AGAIN_S
                continue
            if not piece:
                return
            size += len(piece)
            if size > most:
                raise too_large
            arrived = now()
            yield piece
            deadline += now() - arrived  # Waiting for a turn or for units does not count against the client.


def _sender(request: web.Request) -> str:
    return request.protocol.client if isinstance(request.protocol, HandlerConnection) else ""


def _waits_for_us(request: web.Request) -> bool:
    """Whether the client has sent bytes that wait for its turn."""
    return isinstance(request.protocol, HandlerConnection) and request.protocol.has_unparsed


def _is_json(request: web.Request) -> bool:
    """Accept a missing or generic type too: RFC 9110, 8.3 allows examining such a body.

    web3.py sends no type if its user sets headers, and its asynchronous client sends application/octet-stream.
    """
    given = request.headers.get("Content-Type", _OCTETS)
    return given.lower() == _OCTETS or request.content_type == "application/json"
