"""TLS from clients: real clients, certificates by server name, client certificates, limits before the handshake."""

from __future__ import annotations

import asyncio
import contextlib
import select
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cryptography import x509

from proxy.errors import StartError
from proxy.settings import TlsSettings, read_certificates
from tests.certificates import Authority, Leaf
from tests.http_client import Closed, HttpClient, rpc
from tests.service import until
from tests.web.worker import LIVE, NO_CACHE, ChunkedClient, Worker, on_uvloop, running_worker
from tests.wire.upstreams import Scripted, answer, http, replies

CALL = rpc("net_listening", [1], id=1)


@pytest.fixture(scope="module")
def leaf(authority: Authority) -> Leaf:
    return authority.leaf("localhost", "api.example.com")


@asynccontextmanager
async def serving(
    leaf: Leaf, *, upstream: Any = None, server: dict[str, Any] | None = None, **tls: Any
) -> AsyncIterator[Worker]:
    own = {"cert": str(leaf.cert), "key": str(leaf.key), **tls}
    script = upstream or replies(lambda asked: http(answer(asked, result="yes")))
    async with (
        Scripted(script) as scripted,
        running_worker(scripted.url, **NO_CACHE, server={"drain_s": 0.1, **(server or {}), "tls": own}) as worker,
    ):
        yield worker


async def connect(worker: Worker, context: ssl.SSLContext, name: str = "localhost") -> ChunkedClient:
    return ChunkedClient(
        *await asyncio.open_connection("127.0.0.1", worker.port, ssl=context, server_hostname=name, limit=1 << 26)
    )


def serial_of(client: HttpClient) -> int:
    shown = client.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    return x509.load_der_x509_certificate(shown).serial_number


@on_uvloop
async def test_calls_pages_and_sockets_work_over_tls(authority: Authority, leaf: Leaf) -> None:
    async with (
        serving(leaf) as worker,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=authority.client_context())) as session,
    ):
        base, key = f"https://localhost:{worker.port}", {"X-API-Key": worker.keys["main"]}
        for _ in range(3):
            async with session.post(f"{base}/v1/rpc/{LIVE}", data=CALL, headers=key) as reply:
                assert (reply.status, (await reply.json())["result"]) == (200, "yes")
                assert "Strict-Transport-Security" not in reply.headers
        async with session.get(f"{base}/healthz") as reply:
            assert reply.status == 200
        async with session.ws_connect(f"{base}/v1/ws/{LIVE}", headers=key) as socket:
            await socket.send_str(CALL.decode())
            assert (await socket.receive_json())["result"] == "yes"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@on_uvloop
async def test_both_versions_speak_http_1(version: ssl.TLSVersion, authority: Authority, leaf: Leaf) -> None:
    context = authority.client_context()
    context.maximum_version = version
    async with serving(leaf) as worker, await connect(worker, context) as client:
        shown = client.writer.get_extra_info("ssl_object")
        assert shown.selected_alpn_protocol() == "http/1.1"
        assert shown.version() == version.name.replace("_", ".")
        for _ in range(3):
            assert (await client.send(worker.post(CALL))).json["result"] == "yes"


@on_uvloop
async def test_version_below_the_minimum_is_refused(authority: Authority, leaf: Leaf) -> None:
    context = authority.client_context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with serving(leaf, min_version="1.3") as worker:
        with pytest.raises(ssl.SSLError):
            await connect(worker, context)
        await until(lambda: not worker.app.limiter.connections)


@on_uvloop
async def test_large_pipelined_and_slowly_read_replies_are_whole(authority: Authority, leaf: Leaf) -> None:
    sizes = [10, 100_000, 3_000_000, 20, 16_384, 700_000]
    script = replies(lambda asked: http(answer(asked, result="a" * sizes[asked["params"][0]])))
    async with serving(leaf, upstream=script) as worker, await connect(worker, authority.client_context()) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.write(b"".join(worker.post(rpc("net_listening", [n], id=n)) for n in range(len(sizes))))
        await asyncio.sleep(0.2)
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        for number, size in enumerate(sizes):
            reply = (await client.reply()).json
            assert (reply["id"], len(reply["result"])) == (number, size)


@on_uvloop
async def test_request_split_at_any_record_is_one_request(authority: Authority, leaf: Leaf) -> None:
    async with serving(leaf) as worker, await connect(worker, authority.client_context()) as client:
        request = worker.post(CALL)
        for at in range(1, len(request), 37):
            client.writer.write(request[:at])
            await asyncio.sleep(0)
            client.writer.write(request[at:])
            assert (await client.reply()).json["result"] == "yes"


@on_uvloop
async def test_certificate_is_chosen_by_server_name(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    first, second = authority.leaf("localhost"), Authority.leaf(authority, "other.example.com", "*.wild.example.com")
    nested = tmp_path / "sites" / "nested.example.com"
    nested.mkdir(parents=True)
    third = authority.leaf("nested.example.com")
    third.cert.rename(nested / "fullchain.pem")
    third.key.rename(nested / "privkey.pem")
    for file in (second.cert, second.key):
        shutil.copy(file, tmp_path / "sites")
    served = Leaf(nested / "fullchain.pem", nested / "privkey.pem")
    names = {
        "localhost": first,
        "other.example.com": second,
        "OTHER.example.com": second,
        "a.wild.example.com": second,
        "nested.example.com": served,
    }
    async with serving(first, directory=str(tmp_path / "sites")) as worker:
        for name, expected in names.items():
            async with await connect(worker, authority.client_context(), name) as client:
                assert serial_of(client) == expected.serial, name
        lax = ssl.create_default_context(cafile=authority.file)
        lax.check_hostname = False
        for unknown in ("elsewhere.example.com", "a.b.wild.example.com", "127.0.0.1"):
            async with await connect(worker, lax, unknown) as client:
                assert serial_of(client) == first.serial


@on_uvloop
async def test_renewed_certificate_is_for_new_connections_and_old_ones_go_on(authority: Authority, leaf: Leaf) -> None:
    renewed = authority.leaf("localhost", stem="renewed")
    context = authority.client_context()
    async with serving(leaf) as worker, await connect(worker, context) as old:
        assert serial_of(old) == leaf.serial
        found = read_certificates(TlsSettings(cert=str(renewed.cert), key=str(renewed.key)))
        assert found is not None
        worker.app.renew_certificates(found)
        async with await connect(worker, context) as new:
            assert serial_of(new) == renewed.serial
            assert (await new.send(worker.post(CALL))).status == 200
        assert (await old.send(worker.post(CALL))).status == 200


@on_uvloop
async def test_client_certificates_are_checked(tmp_path: Path, authority: Authority, leaf: Leaf) -> None:
    known, foreign = authority.leaf("client", stem="client"), Authority(tmp_path / "x").leaf("client")
    ca = str(authority.file)

    async def status(worker: Worker, own: Leaf | None) -> int:
        try:
            async with await connect(worker, authority.client_context(own)) as client:
                return (await client.send(worker.post(CALL))).status
        # With TLS 1.3 the client learns of it after its own handshake.
        except (ssl.SSLError, Closed, ConnectionError):
            return 0

    async with serving(leaf, client_ca=ca, client_certificates="required") as worker:
        assert [await status(worker, own) for own in (known, None, foreign)] == [200, 0, 0]
    async with serving(leaf, client_ca=ca, client_certificates="optional") as worker:
        assert [await status(worker, own) for own in (known, None, foreign)] == [200, 200, 0]


@on_uvloop
async def test_hsts_is_in_every_kind_of_reply(authority: Authority, leaf: Leaf) -> None:
    requests = (
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n",
        b"nonsense\r\n\r\n",
    )
    async with serving(leaf, hsts_s=31536000) as worker:
        for request in (worker.post(CALL), worker.post(b"{}"), *requests):
            async with await connect(worker, authority.client_context()) as client:
                found = await client.send(request)
                assert found.headers["strict-transport-security"] == "max-age=31536000", request


@on_uvloop
async def test_connection_counts_before_its_handshake(authority: Authority, leaf: Leaf) -> None:
    async with serving(leaf, server={"connections_per_address": 3}) as worker:
        limiter = worker.app.limiter
        silent = [await asyncio.open_connection("127.0.0.1", worker.port) for _ in range(3)]
        await until(lambda: len(limiter.connections) == 3)
        with pytest.raises((ConnectionError, ssl.SSLError)):
            await connect(worker, authority.client_context())
        for _, writer in silent:
            writer.close()
        await until(lambda: not limiter.connections)
        async with await connect(worker, authority.client_context()) as client:
            assert (await client.send(worker.post(CALL))).status == 200


@on_uvloop
async def test_handshake_has_the_deadline_of_a_request_head(leaf: Leaf) -> None:
    async with serving(leaf, server={"header_timeout_s": 0.2}) as worker:
        reader, writer = await asyncio.open_connection("127.0.0.1", worker.port)
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        await until(lambda: not worker.app.limiter.connections)


def readable(sockets: list[socket.socket]) -> int:
    poll = select.poll()
    for each in sockets:
        poll.register(each, select.POLLIN)
    return len(poll.poll(0))


@on_uvloop
async def test_handshakes_of_one_address_take_turns_with_those_of_others(leaf: Leaf) -> None:
    hello, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(hello, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    greeting = outgoing.read()
    async with serving(leaf) as worker:
        with contextlib.ExitStack() as stack:
            address = "127.0.0.1", worker.port
            sources = ["127.0.0.1"] * 20 + ["127.0.0.2"]
            sockets = [socket.create_connection(address, source_address=(source, 0)) for source in sources]
            *flood, other = map(stack.enter_context, sockets)
            await until(lambda: len(worker.app.limiter.connections) == len(sockets))
            # All greetings are there before the loop reads the first one.
            for each in sockets:
                each.sendall(greeting)
            await until(lambda: readable([other]), every_s=0.0)
            assert readable(flood) < 10
            await until(lambda: readable(flood) == 20)


@on_uvloop
async def test_plain_http_on_the_port_gets_no_reply_and_harms_nothing(authority: Authority, leaf: Leaf) -> None:
    async with serving(leaf) as worker:
        async with await worker.connect() as client:
            with pytest.raises((Closed, AssertionError, IndexError, ValueError)):
                await client.send(worker.post(CALL))
        await until(lambda: not worker.app.limiter.connections)
        async with await connect(worker, authority.client_context()) as other:
            assert (await other.send(worker.post(CALL))).status == 200


@on_uvloop
async def test_connection_cut_off_without_the_closing_alert_is_lost(authority: Authority, leaf: Leaf) -> None:
    async with serving(leaf) as worker:
        client = await connect(worker, authority.client_context())
        assert (await client.send(worker.post(CALL))).status == 200
        client.writer.transport.abort()
        await until(lambda: not worker.app.limiter.connections)


NODE = """
const https = require('https'), fs = require('fs');
const [port, ca, key, body] = process.argv.slice(1);
const agent = new https.Agent({keepAlive: true, maxSockets: 1, ca: fs.readFileSync(ca)});
const call = () => new Promise((done, fail) => {
  const asked = https.request({host: '127.0.0.1', servername: 'localhost', port, agent, method: 'POST',
    path: '/v1/rpc/ethereum/mainnet', headers: {'X-API-Key': key, 'Content-Type': 'application/json'}}, (reply) => {
      let text = ''; reply.on('data', (part) => text += part); reply.on('end', () => done(JSON.parse(text).result)); });
  asked.on('error', fail); asked.end(body); });
call().then(call).then((result) => { console.log(result); agent.destroy(); });
"""


async def output(*words: str, given: bytes = b"") -> str:
    process = await asyncio.create_subprocess_exec(
        *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    async with asyncio.timeout(60):
        said, _ = await process.communicate(given)
    return said.decode()


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
@on_uvloop
async def test_node_calls_over_tls(authority: Authority, leaf: Leaf) -> None:
    async with serving(leaf) as worker:
        words = (str(worker.port), str(authority.file), worker.keys["main"], CALL.decode())
        assert (await output("node", "-e", NODE, *words)).strip() == "yes"


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl")
@on_uvloop
async def test_openssl_verifies_the_chain_and_resumes_its_session(
    tmp_path: Path, authority: Authority, leaf: Leaf
) -> None:
    session = str(tmp_path / "session")
    async with serving(leaf) as worker:
        words = ("openssl", "s_client", "-connect", f"127.0.0.1:{worker.port}", "-CAfile", str(authority.file))
        options = ("-servername", "localhost", "-verify_return_error", "-tls1_2")
        first = await output(*words, *options, "-sess_out", session)
        assert "Verify return code: 0 (ok)" in first
        assert "Reused, TLSv1.2" in await output(*words, *options, "-sess_in", session)


def test_unusable_files_are_named(tmp_path: Path, authority: Authority, leaf: Leaf) -> None:
    other = authority.leaf("other", stem="unfit")
    (tmp_path / "text").write_text("no certificate")
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    cert, key, text = str(leaf.cert), str(leaf.key), str(tmp_path / "text")
    for tls, words in (
        (TlsSettings(cert=cert), "server.tls: cert and key belong together: set both"),
        (TlsSettings(cert=cert, key=str(other.key)), f"the key in {other.key} does not belong to the certificate in {cert}"),
        (TlsSettings(cert=text, key=key), "must be a certificate and its private key in PEM format"),
        (TlsSettings(cert=str(tmp_path / "binary"), key=key), "it is not in PEM format"),
        (TlsSettings(cert=str(tmp_path / "none"), key=key), "none: No such file or directory"),
        (TlsSettings(directory=str(tmp_path)), "there is no certificate with its key in"),
        (TlsSettings(cert=cert, key=key, client_ca=text), "server.tls.client_ca: "),
    ):  # fmt: skip
        with pytest.raises(StartError) as caught:
            read_certificates(tls)
        assert words in "\n".join(caught.value.faults), tls
