"""GET /v1/ws/{chain}/{network}: switches an HTTP connection to a WebSocket.

The request is parsed by aiohttp and authenticated like any other. After the 101 the connection belongs to a `ClientSocket`,
which takes 2 KB. aiohttp's own WebSocket takes 13 KB, because it keeps its request, a task and two queues.
"""

from __future__ import annotations

import base64
import binascii
import hashlib

from aiohttp import HttpVersion11, hdrs, web
from aiohttp.abc import AbstractStreamWriter

from proxy.errors import InvalidRequest, UpgradeRequired
from proxy.services.rpc.method_policy import ANY_SCOPE
from proxy.web.api_middleware import ApiMiddleware
from proxy.web.front.handler_connection import HandlerConnection
from proxy.web.network_resolver import NetworkResolver, require_json_rpc
from proxy.web.request_directives import directives_of
from proxy.web.request_state import STATE
from proxy.web.routes import BASE
from proxy.web.websocket import extensions
from proxy.web.websocket.client_sockets import ClientSockets
from proxy.web.websocket.socket_context import SocketTerms

SOCKET_PATH = f"{BASE}/ws/{{chain}}/{{network}}"
VERSION = "13"
# RFC 6455, 1.3.
_SALT = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class SwitchedProtocols(web.Response):
    """A 101 that was written already, so that aiohttp writes nothing."""

    @property
    def prepared(self) -> bool:
        return True

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    async def write_eof(self, data: bytes = b"") -> None: ...

    def header_bytes(self) -> bytes:
        lines = ["HTTP/1.1 101 Switching Protocols", *(f"{name}: {value}" for name, value in self.headers.items())]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Handshake:
    def __init__(self, api: ApiMiddleware, resolver: NetworkResolver, sockets: ClientSockets) -> None:
        self._api = api
        self._resolver = resolver
        self._sockets = sockets

    async def answer(self, request: web.Request) -> web.StreamResponse:
        key = self._api.authentication.authenticate_socket(request, "open_socket")
        route = self._resolver.route(key, ANY_SCOPE, request.match_info["chain"], request.match_info["network"])
        require_json_rpc(route.network)
        directives = directives_of(request, key, route.labels)
        token = _token(request)
        reply = SwitchedProtocols(status=101)
        reply.headers.update({"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Accept": _accept(token)})
        offers = ",".join(request.headers.getall(hdrs.SEC_WEBSOCKET_EXTENSIONS, ()))
        bits = extensions.window_bits(offers) if self._sockets.context.limits.compress_from else 0
        if bits:
            reply.headers[hdrs.SEC_WEBSOCKET_EXTENSIONS] = extensions.acceptance(bits)
        self._api.add_common_headers(request, reply)
        handler = request.protocol
        assert isinstance(handler, HandlerConnection)
        await self._sockets.admit(key)
        self._sockets.open(
            handler, SocketTerms(route, key, request[STATE].request_id, directives, bits), reply=reply.header_bytes()
        )
        return reply


def _token(request: web.Request) -> str:
    """The client's Sec-WebSocket-Key. Raises a fault if the request is not a valid handshake (RFC 6455, 4.2.1)."""
    options = [part.strip().lower() for part in request.headers.get(hdrs.CONNECTION, "").split(",")]
    upgrades = [part.strip().lower() for part in request.headers.get(hdrs.UPGRADE, "").split(",")]
    if "websocket" not in upgrades or "upgrade" not in options:
        raise UpgradeRequired("this path is a WebSocket endpoint: connect with a WebSocket client")
    if request.headers.get(hdrs.SEC_WEBSOCKET_VERSION) != VERSION:
        raise UpgradeRequired("the header Sec-WebSocket-Version must be 13")
    # RFC 6455, 4.1 and 11.3.1: at least HTTP/1.1, and one key only.
    if request.version < HttpVersion11:
        raise InvalidRequest("a WebSocket handshake needs HTTP/1.1")
    if len(request.headers.getall(hdrs.SEC_WEBSOCKET_KEY, ())) > 1:
        raise InvalidRequest("the header Sec-WebSocket-Key must be sent once")
    token = request.headers.get(hdrs.SEC_WEBSOCKET_KEY, "")
    try:
        is_valid = len(base64.b64decode(token, validate=True)) == 16
    except (binascii.Error, ValueError):
        is_valid = False
    if not is_valid:
        raise InvalidRequest("the header Sec-WebSocket-Key must be 16 bytes in base64")
    if request.body_exists:
        raise InvalidRequest("a WebSocket handshake must not have a body")
    return token


def _accept(token: str) -> str:
    return base64.b64encode(hashlib.sha1(token.encode() + _SALT).digest()).decode()
