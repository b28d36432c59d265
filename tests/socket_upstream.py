"""A scripted upstream that is reached over a WebSocket."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from aiohttp import WSMsgType, web

from tests.rpc_upstreams import Chain, ScriptedUpstream


class SocketServer(ScriptedUpstream):
    """Answers each message as it would a request, several at a time."""

    def __init__(self, chain: Chain) -> None:
        super().__init__(chain)
        self.application.router.add_get("/", self._serve_socket)
        self.opened = 0
        self._transports: list[Any] = []

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/"

    def cut(self) -> None:
        """All sockets are reset."""
        while self._transports:
            self._transports.pop().abort()

    async def _serve_socket(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.opened += 1
        self._transports.append(request.transport)
        async with asyncio.TaskGroup() as group:
            async for message in socket:
                if message.type is WSMsgType.TEXT:
                    group.create_task(self._respond(socket, orjson.loads(message.data)))
        return socket

    async def _respond(self, socket: web.WebSocketResponse, asked: Any) -> None:
        if isinstance(asked, dict):
            reply: Any = await self._reply(asked)
        elif len(asked) > self.batch:
            reply = {"jsonrpc": "2.0", "id": None, "error": {"code": -32600, "message": "no such batch"}}
        else:
            reply = [await self._reply(each) for each in asked]
        if not socket.closed:
            await socket.send_str(orjson.dumps(reply).decode())

    async def close(self) -> None:
        self.cut()
        await super().close()
