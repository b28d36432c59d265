"""Servers outside our control, on 127.0.0.1: a listener that must not be reached, and a web server with scripted pages."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

Page = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Listener:
    """Counts the connections it accepts, and sends nothing."""

    def __init__(self) -> None:
        self.connections = 0
        self.port = 0

    def __call__(self) -> asyncio.Protocol:
        self.connections += 1
        return asyncio.Protocol()


@asynccontextmanager
async def listener(*hosts: str) -> AsyncIterator[Listener]:
    """On loopback in both families, or on these addresses, at one port."""
    found = Listener()
    loop = asyncio.get_running_loop()
    servers = []
    for host in hosts or ("127.0.0.1", "::1"):
        try:
            servers.append(await loop.create_server(found, host, found.port))
        except OSError:  # a machine without IPv6: then nothing can get there either
            assert ":" in host
        found.port = servers[0].sockets[0].getsockname()[1]
    yield found
    for server in servers:
        server.close()
        await server.wait_closed()


class Pages:
    """A web server whose pages are set by path; unknown ones are 404."""

    def __init__(self) -> None:
        self.pages: dict[str, Page] = {}
        self.requested: list[str] = []
        self.heads: list[Mapping[str, str]] = []
        self.port = 0

    def url(self, path: str = "/", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def put(self, path: str, body: bytes | str, *, media_type: str = "application/json", **headers: str) -> str:
        """Serve `body` at a path, and return its URL."""
        raw = body.encode() if isinstance(body, str) else body
        named = {"Content-Type": media_type, **{name.replace("_", "-"): value for name, value in headers.items()}}

        async def page(request: web.Request) -> web.Response:
            return web.Response(body=raw, headers=named)

        self.pages[path] = page
        return self.url(path)

    def move(self, path: str, to: str, status: int = 302) -> str:
        async def page(request: web.Request) -> web.Response:
            return web.Response(status=status, headers={"Location": to})

        self.pages[path] = page
        return self.url(path)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requested.append(request.path_qs)
        self.heads.append(request.headers.copy())
        page = self.pages.get(request.path)
        return await page(request) if page else web.Response(status=404)


@asynccontextmanager
async def pages() -> AsyncIterator[Pages]:
    found = Pages()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", found.answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.05)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.port = runner.addresses[0][1]
    yield found
    await runner.cleanup()


class ScriptedResolver(AbstractResolver):
    """A hostile resolver: each look-up of a name returns the next of its answers, and the last one from then on."""

    def __init__(self, names: Mapping[str, Sequence[Sequence[str]]]) -> None:
        self._left = {name: list(answers) for name, answers in names.items()}
        self.looked_up: list[str] = []

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self.looked_up.append(host)
        answers = self._left.get(host)
        if not answers:
            raise OSError("no such name")
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in found
        ]

    async def close(self) -> None:
        pass
