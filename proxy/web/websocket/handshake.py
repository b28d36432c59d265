"""GET /v1/ws/{chain}/{network}: from HTTP to a socket, or the contract's error.

The request is aiohttp's, read by its parser and signed by the gate like any other; its answer is the last that aiohttp has to
do with the connection. What follows is ours (`socket.py`): a socket of aiohttp's keeps its request, a task and two queues: 13
KB against 2.
"""

from __future__ import annotations

import base64
import binascii
import hashlib

from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter

from proxy.errors import InvalidRequest, UpgradeRequired
from proxy.services.rpc.method_policy import ANY_SCOPE
from proxy.web.front.connection_limiter import HandlerConnection
from proxy.web.gate import REQUEST_ID, Gate
from proxy.web.network_resolver import NetworkResolver
from proxy.web.routes import BASE
from proxy.web.websocket.client_sockets import ClientSockets

SOCKET_PATH = f"{BASE}/ws/{{chain}}/{{network}}"
VERSION = "13"
# RFC 6455, 1.3.
_SALT = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class SwitchedProtocols(web.Response):
    """101, written already: nothing is left to do for aiohttp."""

    @property
    def prepared(self) -> bool:
        return True

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    async def write_eof(self, data: bytes = b"") -> None: ...

    def head(self) -> bytes:
        lines = ["HTTP/1.1 101 Switching Protocols", *(f"{name}: {value}" for name, value in self.headers.items())]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Handshake:
    def __init__(self, gate: Gate, where: NetworkResolver, sockets: ClientSockets) -> None:
        self._gate = gate
        self._where = where
        self._sockets = sockets

    async def answer(self, request: web.Request) -> web.StreamResponse:
        key = self._gate.authenticate(request, "open_socket", request.query.get("apiKey"))
        route = self._where.route(key, ANY_SCOPE, request.match_info["chain"], request.match_info["network"])
        token = _token(request)
        if refusal := self._sockets.refusal(key):
            raise refusal
        reply = SwitchedProtocols(status=101)
        reply.headers.update({"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Accept": _accept(token)})
        self._gate.sign(request, reply)
        handler = request.protocol
        assert isinstance(handler, HandlerConnection)
        self._sockets.open(handler, reply=reply.head(), route=route, key=key, request_id=request[REQUEST_ID])
        return reply


def _token(request: web.Request) -> str:
    """What the client wants to see again; or what keeps its request from being a handshake (section 4.2.1)."""
    options = [part.strip().lower() for part in request.headers.get(hdrs.CONNECTION, "").split(",")]
    wanted = [part.strip().lower() for part in request.headers.get(hdrs.UPGRADE, "").split(",")]
    if "websocket" not in wanted or "upgrade" not in options:
        raise UpgradeRequired("this path is a WebSocket: connect to it with a WebSocket client")
    if request.headers.get(hdrs.SEC_WEBSOCKET_VERSION) != VERSION:
        raise UpgradeRequired("the header Sec-WebSocket-Version must be 13")
    token = request.headers.get(hdrs.SEC_WEBSOCKET_KEY, "")
    try:
        is_good = len(base64.b64decode(token, validate=True)) == 16
    except (binascii.Error, ValueError):
        is_good = False
    if not is_good:
        raise InvalidRequest("the header Sec-WebSocket-Key must be 16 bytes in base64")
    if request.body_exists:
        raise InvalidRequest("a handshake has no body")
    return token


def _accept(token: str) -> str:
    return base64.b64encode(hashlib.sha1(token.encode() + _SALT).digest()).decode()
