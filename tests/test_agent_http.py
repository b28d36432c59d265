"""Agents over HTTP: one client cannot hold what others need, whatever it opens and leaves open."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import aiohttp
import pytest
import uvicorn
from aiohttp import web

from proxy.commands import agent_http
from proxy.commands.agent_http import BoundedApp, BoundedConnection
from proxy.commands.agent_tools import MOST_CHARACTERS, ToolCaller, ToolCalls, tools_of
from proxy.core.fair_permits import FairPermits
from proxy.settings import SCHEMAS
from proxy.web import api_spec
from tests.service import until
from tests.shipped_tables import TABLES

CALL = b'{"jsonrpc":"2.0","id":1,"method":"ping"}'


@dataclass
class SlowApp:
    """Serves a request when it is told to."""

    running: Counter[str] = field(default_factory=Counter)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        key = dict(scope["headers"]).get(b"x-api-key", b"").decode()
        self.running[key] += 1
        if key == "slow":
            await self.go_on.wait()
        assert (await receive())["body"] == CALL
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    config = uvicorn.Config(
        BoundedApp(app), http=BoundedConnection, ws="none", lifespan="off", log_level="critical", access_log=False
    )
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(config)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
        finally:
            server.should_exit = server.force_exit = True


async def test_requests_of_one_key_leave_places_to_others() -> None:
    app = SlowApp()
    async with (
        serving(app) as url,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        asyncio.TaskGroup() as tasks,
    ):

        async def ask(key: str) -> int:
            async with session.post(url, data=CALL, headers={"X-API-Key": key}) as response:
                return response.status

        most = agent_http.MOST_OF_KEY
        flood = [tasks.create_task(ask("slow")) for _ in range(3 * most)]
        await until(lambda: sum(task.done() for task in flood) == 2 * most)
        assert app.running["slow"] == most
        assert await ask("other") == 200
        app.go_on.set()
        found = Counter(await asyncio.gather(*flood))
        assert found == {200: agent_http.MOST_OF_KEY, 429: 2 * agent_http.MOST_OF_KEY}
        assert await ask("slow") == 200


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT"])
async def test_nothing_but_a_post_is_served_so_no_stream_stays_open(method: str) -> None:
    async with serving(SlowApp()) as url, aiohttp.ClientSession() as session:
        async with session.request(method, url, headers={"Accept": "text/event-stream"}) as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
        async with session.request(method, f"{url}/svc_live_key?apiKey=x", allow_redirects=False) as response:
            assert response.status == 404
            assert "svc_live" not in await response.text()


async def test_request_that_does_not_arrive_or_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_http, "BODY_S", 0.1)
    monkeypatch.setattr(agent_http, "REQUEST_S", 0.1)
    async with serving(SlowApp()) as url, aiohttp.ClientSession() as session:

        async def never() -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.sleep(10)

        async with session.post(url, data=never()) as response:
            assert response.status == 408
        async with session.post(url, data=CALL, headers={"X-API-Key": "slow"}) as response:
            assert response.status == 504
        async with session.post(url, data=BytesIO(b" " * (agent_http.MOST_BODY + 1))) as response:
            assert response.status == 413


@pytest.mark.parametrize("sent", [b"", b"POST /mcp HTTP/1.1\r\nHost: x\r\n"])
async def test_connection_without_a_request_is_closed(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(agent_http, "IDLE_S", 0.1)
    async with serving(SlowApp()) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.split(":")[2].split("/")[0]))
        writer.write(sent)
        async with asyncio.timeout(45):
            with suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()


async def test_connections_of_one_address_leave_places_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedConnection, "_places", FairPermits(8, per_client=8))
    async with serving(SlowApp()) as url:
        port = int(url.split(":")[2].split("/")[0])
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        await until(lambda: len(BoundedConnection._places) == 4)
        other = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
        async with aiohttp.ClientSession(connector=other) as session, session.post(url, data=CALL) as response:
            assert response.status == 200
        for _, writer in held:
            writer.close()
        await until(lambda: not len(BoundedConnection._places))


# What tools ask of the service


@asynccontextmanager
async def calling(handler: Any) -> AsyncIterator[ToolCalls]:
    application = web.Application()
    application.router.add_route("*", "/{any:.*}", handler)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    tools = tools_of(api_spec.load(SCHEMAS), allow_writes=False)
    async with aiohttp.ClientSession() as session:
        yield ToolCalls(session, f"http://127.0.0.1:{runner.addresses[0][1]}", tools, TABLES.methods)
    await runner.cleanup()


async def test_long_reply_is_not_read_to_its_end() -> None:
    sent = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"result":"')
        for _ in range(1000):
            await response.write(b"a" * 100_000)
            sent += 100_000
        return response

    async with calling(answer) as calls:
        arguments = {"network": "ethereum/mainnet", "method": "debug_traceTransaction"}
        reply = await calls.call("rpc_call", arguments, ToolCaller("key"))
        assert "cut: the reply has more than" in reply.text
        assert len(reply.text) < MOST_CHARACTERS + 200
        assert sent < 50_000_000


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("list_transfers", {"chain": "..", "address": "account"}),
        ("list_transfers", {"chain": "ethereum", "address": ""}),
        ("read_request", {"id": "."}),
        ("rpc_call", {"network": "ethereum/mainnet", "method": "eth_call", "params": 5}),
        ("rpc_call", {"network": "ethereum/mainnet", "method": "eth_call", "params": "0x"}),
    ],
)
async def test_argument_that_names_another_path_is_not_sent(tool: str, arguments: dict[str, Any]) -> None:
    seen = list[str]()

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.path)
        return web.json_response({})

    async with calling(answer) as calls:
        reply = await calls.call(tool, arguments, ToolCaller("key"))
        assert (reply.is_error, seen) == (True, [])
        assert "must" in reply.text


async def test_key_does_not_follow_a_redirect() -> None:
    seen = list[str]()

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.path)
        raise web.HTTPTemporaryRedirect("/elsewhere")

    async with calling(answer) as calls:
        reply = await calls.call("list_chains", {}, ToolCaller("key"))
        assert (reply.is_error, seen) == (True, ["/v1/chains"])
        assert "redirects" in reply.text
