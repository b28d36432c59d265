"""The ways to an upstream, to real servers: TLS with its options, session resumption, HTTP proxies, Unix sockets, tokens."""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from proxy.errors import StartError
from proxy.settings import load, load_with_tables
from proxy.settings.proxies import proxy_for
from tests.certificates import Authority, Leaf
from tests.http_client import rpc
from tests.service import until
from tests.web.worker import LIVE, NO_CACHE, PEPPER, Worker, on_uvloop, running_worker
from tests.wire.upstreams import Scripted, answer, http, replies

CALL = rpc("net_listening", [1], id=1)


@pytest.fixture(scope="module")
def leaf(authority: Authority) -> Leaf:
    return authority.leaf("localhost", "node.example.com")


class TlsStub:
    """A TLS server that answers every call, and knows how many handshakes were resumed. With `closes`, it ends each reply."""

    def __init__(self, context: ssl.SSLContext, *, closes: bool = False) -> None:
        self.context = context
        self.closes = closes
        self.heads: list[bytes] = []
        self.resumed: list[bool] = []
        self.names: list[str | None] = []
        context.sni_callback = lambda _, name, __: self.names.append(name)
        self.port = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.resumed.append(writer.get_extra_info("ssl_object").session_reused)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                asked = orjson.loads(await reader.readexactly(size))
                writer.write(http(answer(asked, result="a" * (asked["params"] or [3])[0])))
                if self.closes:
                    break
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[TlsStub]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.context)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()


@asynccontextmanager
async def proxying(port: int, *, credentials: str = "", refuses: bool = False) -> AsyncIterator[tuple[str, list[str]]]:
    """An HTTP proxy that connects every target to `port`. Yields its address and the targets it was asked for."""
    asked: list[str] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        asked.append(head.split(" ")[1])
        wanted = f"Proxy-Authorization: Basic {base64.b64encode(credentials.encode()).decode()}"
        if refuses or (credentials and wanted not in head):
            writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
            writer.close()
            return
        out_reader, out_writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(relay(reader, out_writer), relay(out_reader, writer), return_exceptions=True)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    user = f"{credentials}@" if credentials else ""
    try:
        yield f"http://{user}127.0.0.1:{server.sockets[0].getsockname()[1]}", asked
    finally:
        server.close()


@asynccontextmanager
async def reaching(**link: Any) -> AsyncIterator[Worker]:
    async with running_worker({LIVE: [link]}, **NO_CACHE) as worker:
        yield worker


def size(number: int) -> bytes:
    return rpc("net_listening", [number], id=1)


@on_uvloop
async def test_small_and_large_replies_over_tls_are_whole(authority: Authority, leaf: Leaf) -> None:
    async with (
        TlsStub(authority.server_context(leaf)).open() as stub,
        reaching(url=f"https://localhost:{stub.port}/", ca=str(authority.file)) as worker,
    ):
        for number in (3, 16_384, 100_000, 2_000_000, 5):
            assert len((await worker.send(size(number))).json["result"]) == number
        assert len(stub.resumed) == 1


@on_uvloop
async def test_reconnection_resumes_the_session(authority: Authority, leaf: Leaf) -> None:
    async with (
        TlsStub(authority.server_context(leaf), closes=True).open() as stub,
        reaching(url=f"https://localhost:{stub.port}/", ca=str(authority.file)) as worker,
    ):
        for _ in range(4):
            assert (await worker.send(CALL)).status == 200
        assert stub.resumed[0] is False
        assert all(stub.resumed[1:])


@on_uvloop
async def test_server_name_is_asked_for_and_verified(authority: Authority, leaf: Leaf) -> None:
    async with TlsStub(authority.server_context(leaf)).open() as stub:
        given = {"url": f"https://127.0.0.1:{stub.port}/", "ca": str(authority.file)}
        async with reaching(**given, server_name="node.example.com") as worker:
            assert (await worker.send(CALL)).status == 200
            assert stub.names == ["node.example.com"]
        async with reaching(**given) as worker:
            assert (await worker.send(CALL)).status == 500


@on_uvloop
async def test_unknown_authority_is_refused_and_only_the_log_says_why(
    tmp_path: Path, authority: Authority, leaf: Leaf, caplog: pytest.LogCaptureFixture
) -> None:
    other = Authority(tmp_path)
    async with TlsStub(authority.server_context(leaf)).open() as stub:
        for trusted in ({}, {"ca": str(other.file)}):
            async with reaching(url=f"https://localhost:{stub.port}/", **trusted) as worker:
                said = await worker.send(CALL)
                assert "an upstream failed: TLS handshake failed" in said.fault(500)["message"]
                assert b"certificate" not in said.body
        reasons = [line.__dict__["reason"] for line in caplog.records if line.msg == "cannot connect to an upstream"]
        assert len(reasons) == 2
        assert "certificate" in reasons[0]
        assert not stub.heads


@on_uvloop
async def test_client_certificate_is_shown(authority: Authority, leaf: Leaf) -> None:
    own = authority.leaf("gateway")
    context = authority.server_context(leaf)
    context.load_verify_locations(authority.file)
    context.verify_mode = ssl.CERT_REQUIRED
    async with TlsStub(context).open() as stub:
        given = {"url": f"https://localhost:{stub.port}/", "ca": str(authority.file)}
        async with reaching(**given, cert=str(own.cert), key=str(own.key)) as worker:
            assert (await worker.send(CALL)).status == 200
        async with reaching(**given) as worker:
            assert (await worker.send(CALL)).status == 500


@on_uvloop
async def test_lower_version_than_the_minimum_is_refused(authority: Authority, leaf: Leaf) -> None:
    context = authority.server_context(leaf)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with TlsStub(context).open() as stub:
        given = {"url": f"https://localhost:{stub.port}/", "ca": str(authority.file)}
        async with reaching(**given) as worker:
            assert (await worker.send(CALL)).status == 200
        async with reaching(**given, min_tls="1.3") as worker:
            assert (await worker.send(CALL)).status == 500


@on_uvloop
async def test_proxy_connects_to_the_upstream(authority: Authority, leaf: Leaf) -> None:
    async with (
        TlsStub(authority.server_context(leaf)).open() as stub,
        proxying(stub.port, credentials="me:secret%word") as (proxy, asked),
        reaching(url="https://node.example.com/", ca=str(authority.file), proxy=proxy.replace("%", "%25")) as worker,
    ):
        assert (await worker.send(CALL)).status == 200
        assert asked == ["node.example.com:443"]


@on_uvloop
async def test_refusal_of_the_proxy_is_a_failed_connection() -> None:
    async with (
        Scripted() as upstream,
        proxying(upstream.port, refuses=True) as (proxy, asked),
        reaching(url=upstream.url, proxy=proxy) as worker,
    ):
        assert (await worker.send(CALL)).status == 500
        assert asked[0] == f"127.0.0.1:{upstream.port}"
        assert not upstream.bodies


@on_uvloop
async def test_unix_socket_is_used_instead_of_the_host(tmp_path: Path) -> None:
    async def handle(request: web.Request) -> web.Response:
        assert (request.host, request.path) == ("node.internal", "/path")
        return web.Response(body=answer(await request.json(), result="yes"), content_type="application/json")

    application = web.Application()
    application.router.add_post("/path", handle)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.05)
    await runner.setup()
    path = str(tmp_path / "node.sock")
    await web.UnixSite(runner, path).start()
    async with reaching(url="http://node.internal/path", socket=path) as worker:
        assert (await worker.send(CALL)).json["result"] == "yes"
    await runner.cleanup()


@on_uvloop
async def test_token_is_sent_and_never_passed_on() -> None:
    heads: list[bytes] = []

    def reply(asked: Any) -> bytes:
        return http(answer(asked, error={"code": -32000, "message": "bad token s3cret-token-value"}))

    async def script(exchange: Any) -> None:
        heads.append(exchange.head)
        await replies(reply)(exchange)

    async with Scripted(script) as upstream, reaching(url=upstream.url, bearer="s3cret-token-value") as worker:
        said = await worker.send(CALL)
        await until(lambda: bool(heads))
        assert b"\r\nAuthorization: Bearer s3cret-token-value\r\n" in heads[0]
        assert b"s3cret" not in said.body


@on_uvloop
async def test_socket_upstream_uses_the_same_options(authority: Authority, leaf: Leaf) -> None:
    shown: list[Any] = []

    async def handle(request: web.Request) -> web.WebSocketResponse:
        shown.append((request.headers.get("Authorization"), request.transport.get_extra_info("peercert") is not None))  # type: ignore[union-attr]
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            await socket.send_bytes(b"") if message.data is None else await socket.send_str(
                answer(message.json(), result="yes").decode()
            )
        return socket

    own = authority.leaf("gateway", stem="gateway-ws")
    context = authority.server_context(leaf)
    context.load_verify_locations(authority.file)
    context.verify_mode = ssl.CERT_REQUIRED
    application = web.Application()
    application.router.add_get("/", handle)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.05)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    port = runner.addresses[0][1]
    async with (
        proxying(port) as (proxy, asked),
        reaching(
            url=f"wss://node.example.com:{port}/",
            ca=str(authority.file),
            cert=str(own.cert),
            key=str(own.key),
            bearer="abc",
            proxy=proxy,
        ) as worker,
    ):
        assert (await worker.send(CALL)).json["result"] == "yes"
        assert (shown[0], asked[0]) == (("Bearer abc", True), f"node.example.com:{port}")
    await runner.cleanup()


ENVIRON = {"DATABASE_URL": "postgresql://x@y/z", "PENSTOCK_KEYS__PEPPER": PEPPER}


def test_proxy_of_the_environment_is_resolved_and_masked() -> None:
    environ = {**ENVIRON, "HTTPS_PROXY": "http://u:p4ss@corp:3128", "NO_PROXY": "local, .internal.example.com"}
    upstreams = [{"network": LIVE, "url": "https://node.example.com/", "proxy": "env"}]
    found = load(environ=environ, defaults={"upstreams": upstreams})
    assert found.upstreams[0].proxy == "http://u:p4ss@corp:3128"
    for url, proxy in (
        ("https://node.example.com/", environ["HTTPS_PROXY"]),
        ("http://node.example.com/", ""),
        ("https://local/", ""),
        ("https://a.internal.example.com/", ""),
        ("wss://x.local.example.com/", environ["HTTPS_PROXY"]),
    ):
        assert proxy_for(url, environ) == proxy, url
    assert proxy_for("https://a/", {**environ, "no_proxy": "*"}) == ""


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ('cert = "/none"', "upstreams.0.cert: cert and key belong together: set both"),
        ('ca = "/none"', "upstreams.0.ca: cannot read one of ca, cert and key: No such file or directory"),
        (f'ca = "{__file__}"', "upstreams.0.ca: ca, cert and key must be files in PEM format"),
        ('proxy = "http://p:1"\nsocket = "/s"', "upstreams.0.proxy: a Unix socket is not reached through a proxy"),
        ('proxy = "ftp://p:secret@x"', "upstreams.0.proxy: must be the http:// address of a proxy, or env"),
        ('bearer = "two words"', "upstreams.0.bearer: is not valid (the value is hidden because it is secret)"),
    ],
)
def test_unusable_options_are_named(tmp_path: Path, given: str, fault: str) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(f'[[upstreams]]\nnetwork = "{LIVE}"\nurl = "https://node/"\n{given}\n')
    with pytest.raises(StartError) as caught:
        load_with_tables(path, environ=ENVIRON)
    assert [said for said in caught.value.faults if f":4: {fault}" in said], caught.value.faults
    assert "secret@" not in "".join(caught.value.faults)
