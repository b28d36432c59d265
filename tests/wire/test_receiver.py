"""Posting to receivers: whatever they do, a post ends in time, costs little, and goes nowhere else."""

from __future__ import annotations

import asyncio
import datetime
import gzip
import ssl
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from proxy.core.egress import EgressPolicy
from proxy.tasks import client_of_task
from proxy.wire.outbound_guard import OutboundGuard
from proxy.wire.receiver import EXCERPT, DeliveryReply, Receiver
from proxy.wire.receiver_connection import MAX_REPLY
from tests.service import until
from tests.wire.external_servers import Pages, ScriptedResolver, listener, pages

LOOPBACK = OutboundGuard(EgressPolicy(allow=["127.0.0.0/8"]), http=True, ports=())
HEADERS = {"Content-Type": "application/json", "webhook-id": "evt_1"}
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    found = Receiver(LOOPBACK, timeout_s=15.0)
    yield found
    await found.close()


@pytest.fixture
async def hasty() -> AsyncIterator[Receiver]:
    """For receivers that never end: they get less time."""
    found = Receiver(LOOPBACK, timeout_s=0.3)
    yield found
    await found.close()


@pytest.fixture
async def site() -> AsyncIterator[Pages]:
    async with pages() as found:
        yield found


@asynccontextmanager
async def serving(handle: Handler) -> AsyncIterator[str]:
    """A server below HTTP: it reads the request's head, then does as it likes. Its address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await handle(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    server.close()


async def test_body_and_headers_arrive_as_they_are(site: Pages, receiver: Receiver) -> None:
    came = []

    async def page(request: web.Request) -> web.Response:
        came.append((request.method, await request.read()))
        return web.Response(status=204)

    site.pages["/hook"] = page
    body = '{"name": "Zoë \\u2028"}'.encode()
    assert await receiver.post(site.url("/hook"), body, headers=HEADERS) == DeliveryReply("answered", 204)
    assert came == [("POST", body)]
    head = site.heads[0]
    assert head["User-Agent"].startswith("Penstock-Webhooks/")
    assert {"Cookie", "Authorization"}.isdisjoint(head)
    assert head["Content-Type"] == "application/json"


async def test_failure_reply_is_excerpted_and_its_retry_after_kept(site: Pages, receiver: Receiver) -> None:
    async def page(request: web.Request) -> web.Response:
        return web.Response(
            status=503, body=b"  over\x00load\xff\n<b>ed</b> " + b"x" * 999, headers={"Retry-After": "7"}
        )

    site.pages["/"] = page
    reply = await receiver.post(site.url(), b"{}", headers=HEADERS)
    assert (reply.outcome, reply.status, reply.retry_after) == ("answered", 503, "7")
    assert reply.excerpt is not None
    assert reply.excerpt.startswith("over load\N{REPLACEMENT CHARACTER} <b>ed</b> xxx")
    assert len(reply.excerpt) == EXCERPT


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirect_is_not_followed(site: Pages, receiver: Receiver, status: int) -> None:
    async with listener() as other:
        site.move("/", f"http://127.0.0.1:{other.port}/", status)
        reply = await receiver.post(site.url(), b"{}", headers=HEADERS)
        assert (reply.outcome, reply.status) == ("answered", status)
        assert other.connections == 0


async def test_connection_is_used_again(site: Pages, receiver: Receiver) -> None:
    ports = set()

    async def page(request: web.Request) -> web.Response:
        assert request.transport is not None
        ports.add(request.transport.get_extra_info("peername")[1])
        return web.Response(text="fine")

    site.pages["/"] = page
    for _ in range(5):
        assert (await receiver.post(site.url(), b"{}", headers=HEADERS)).status == 200
    assert len(ports) == 1


async def test_huge_reply_is_not_read_to_its_end(receiver: Receiver) -> None:
    sent = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 500 No\r\nContent-Length: 1000000000\r\n\r\n")
        while sent < 200_000_000:
            writer.write(b"x" * 65536)
            await writer.drain()
            sent += 65536

    async with serving(handle) as url:
        tracemalloc.start()
        reply = await receiver.post(url, b"{}", headers=HEADERS)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert (reply.status, reply.excerpt) == (500, "x" * EXCERPT)
    assert most < 40 * MAX_REPLY
    assert sent < 200_000_000


async def test_compressed_reply_is_not_expanded(site: Pages, receiver: Receiver) -> None:
    bomb = gzip.compress(b"0" * 20_000_000)

    async def page(request: web.Request) -> web.Response:
        return web.Response(status=500, body=bomb, headers={"Content-Encoding": "gzip"})

    site.pages["/"] = page
    tracemalloc.start()
    reply = await receiver.post(site.url(), b"{}", headers=HEADERS)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert reply.status == 500
    assert reply.excerpt is not None
    assert "0000" not in reply.excerpt
    assert most < 5_000_000


async def test_one_that_never_answers_is_given_up(hasty: Receiver) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(30)

    async with serving(handle) as url:
        assert await hasty.post(url, b"{}", headers=HEADERS) == DeliveryReply("timeout")


async def test_head_that_drips_is_given_up(hasty: Receiver) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for byte in b"HTTP/1.1 200 OK\r\nX-Slow: " + b"y" * 10_000:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.05)

    async with serving(handle) as url:
        assert await hasty.post(url, b"{}", headers=HEADERS) == DeliveryReply("timeout")


@pytest.mark.parametrize("status", [200, 500])
async def test_body_that_drips_is_not_waited_for_because_the_head_has_said_it(receiver: Receiver, status: int) -> None:
    over = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: 1000\r\n\r\n" % status)
        try:
            for _ in range(1000):
                writer.write(b"z")
                await writer.drain()
                await asyncio.sleep(0.05)
        finally:
            over.set()

    async with serving(handle) as url:
        reply = await receiver.post(url, b"{}", headers=HEADERS)
        assert (reply.outcome, reply.status) == ("answered", status)
        assert not over.is_set() or reply.status  # it hangs up on the receiver, which finds out when it writes
        await over.wait()


async def test_lost_connection_and_nonsense_have_their_words(receiver: Receiver) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
        await writer.drain()
        await reader.read(1)

    async with serving(hang_up) as url:
        assert await receiver.post(url, b"{}", headers=HEADERS) == DeliveryReply("reset")
    async with serving(babble) as url:
        assert await receiver.post(url, b"{}", headers=HEADERS) == DeliveryReply("invalid")
    async with listener() as closed:
        port = closed.port
    assert await receiver.post(f"http://127.0.0.1:{port}/", b"{}", headers=HEADERS) == DeliveryReply("unreachable")


async def test_address_that_may_not_be_reached_is_not_connected_to() -> None:
    async with listener() as other:
        names = ScriptedResolver({"hooks.example.com": [["127.0.0.1"]]})
        strict = Receiver(OutboundGuard(EgressPolicy(), http=True, ports=(), resolver=names), timeout_s=5.0)
        try:
            for host in ("127.0.0.1", "hooks.example.com", "2130706433", "0x7f.1", "[::1]", "127.0.0.1."):
                reply = await strict.post(f"http://{host}:{other.port}/", b"{}", headers=HEADERS)
                assert reply == DeliveryReply("refused"), host
            assert other.connections == 0
        finally:
            await strict.close()


# How replies are framed


@pytest.mark.parametrize(
    ("reply", "status", "excerpt"),
    [
        (b"HTTP/1.1 500 X\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nT: u\r\n\r\n", 500, "abcde"),
        (b"HTTP/1.1 100 X\r\n\r\nHTTP/1.1 103 X\r\nA: b\r\n\r\nHTTP/1.1 201 X\r\nContent-Length: 2\r\n\r\nok", 201, None),
        (b"HTTP/1.1 204 X\r\n\r\n", 204, None),
        (b"HTTP/1.0 404 X\r\nContent-Length: 2\r\n\r\nno", 404, "no"),
        (b"HTTP/1.1 400 X\r\nContent-Length: 0\r\n\r\n", 400, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("step", [1, 7, 10_000])
async def test_reply_is_read_however_it_is_framed_and_cut(
    receiver: Receiver, reply: bytes, status: int, excerpt: str | None, step: int
) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for at in range(0, len(reply), step):
            writer.write(reply[at : at + step])
            await writer.drain()
            await asyncio.sleep(0)
        await reader.read()

    async with serving(handle) as url:
        assert await receiver.post(url, b"{}", headers=HEADERS) == DeliveryReply("answered", status, excerpt)


@pytest.mark.parametrize(("status", "most"), [(500, 4096), (200, 256)])
async def test_exchange_is_recorded_without_secrets(receiver: Receiver, status: int, most: int) -> None:
    head = f"HTTP/1.1 {status} X\r\nSet-Cookie: session=secret; Path=/\r\nContent-Length: 5000\r\n\r\n"

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head.encode() + b"line\r\n\0" + b"x" * 4993)
        await reader.read()

    signed = {**HEADERS, "webhook-signature": "v1," + "A" * 40}
    async with serving(handle) as url:
        exchange = (await receiver.post(url, b"{}", headers=signed)).exchange
    assert exchange is not None
    assert "webhook-signature: v1,AAAAAAAAA…" in exchange.sent
    assert exchange.sent.startswith("Host: 127.0.0.1")
    assert exchange.headers.splitlines()[0] == "Set-Cookie: session=…"
    assert exchange.body.startswith("line\n\N{REPLACEMENT CHARACTER}xxx")
    assert 0 < len(exchange.body) <= most


async def test_body_without_a_length_ends_with_the_connection(receiver: Receiver) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 500 X\r\n\r\nall of it")
        await writer.drain()

    async with serving(handle) as url:
        assert await receiver.post(url, b"{}", headers=HEADERS) == DeliveryReply("answered", 500, "all of it")


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\na",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 0\n\n\r\n\r\n",
        b"X" * 70_000,
    ],
)
async def test_malformed_reply_is_no_acknowledgement(receiver: Receiver, reply: bytes) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(reply)
        await writer.drain()
        await reader.read()

    async with serving(handle) as url:
        assert await receiver.post(url, b"{}", headers=HEADERS) == DeliveryReply("invalid")


async def test_unsolicited_reply_is_dropped(receiver: Receiver) -> None:
    """Two replies at once: the second is not taken for the reply to the next post."""
    posts = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal posts
        posts += 1
        await reader.readexactly(2)
        writer.write(b"HTTP/1.1 500 X\r\nContent-Length: 0\r\n\r\n" + b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        await reader.read()

    async with serving(handle) as url:
        for count in (1, 2, 3):
            reply = await receiver.post(url, b"{}", headers=HEADERS)
            assert reply.status != 200
            assert posts == count


async def test_line_that_was_closed_while_it_was_idle_costs_no_attempt(receiver: Receiver) -> None:
    """The receiver closes after each reply and does not say so: what comes next goes out on another line at once."""
    connections = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readexactly(2)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        await reader.readexactly(1)  # the next one has begun

    async with serving(handle) as url:
        for _ in range(5):
            assert (await receiver.post(url, b"{}", headers=HEADERS)).status == 200
    assert connections == 5


async def test_connection_of_one_account_is_not_used_for_another(receiver: Receiver) -> None:
    """A receiver writes a second reply when the next request arrives: only its own account would read it."""
    connections = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readexactly(2)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(b"HTTP/1.1 410 Gone\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()

    async with serving(handle) as url:
        for account, found in (("one", 200), ("another", 200), ("one", 410)):
            client_of_task.set(account)
            assert (await receiver.post(url, b"{}", headers=HEADERS)).status == found
    assert connections == 2


async def test_lines_are_not_kept_for_long(site: Pages, receiver: Receiver) -> None:
    await receiver.post(site.put("/", b"{}"), b"{}", headers=HEADERS)
    lines = receiver._connections
    assert repr(lines) == "<ReceiverConnections 1 idle>"
    await until(lambda: repr(lines) == "<ReceiverConnections 0 idle>")


# Over TLS


def certified(name: str) -> tuple[bytes, bytes]:
    """A self-signed certificate for a name, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    return made.public_bytes(pem), key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)


async def test_certificate_must_match_the_name_and_be_signed_by_a_trusted_authority(tmp_path: Path) -> None:
    certificate, key = certified("hooks.example.com")
    (tmp_path / "c").write_bytes(certificate)
    (tmp_path / "k").write_bytes(key)
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(tmp_path / "c", tmp_path / "k")
    posts: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                posts.append(head + await reader.readexactly(2))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=theirs)
    port = server.sockets[0].getsockname()[1]
    names = ScriptedResolver({"hooks.example.com": [["127.0.0.1"]], "other.example.com": [["127.0.0.1"]]})
    guard = OutboundGuard(EgressPolicy(allow=["127.0.0.0/8"]), ports=(), resolver=names)
    trusting = Receiver(guard, timeout_s=5.0, tls=ssl.create_default_context(cadata=certificate.decode()))
    wary = Receiver(guard, timeout_s=5.0)
    url = f"https://hooks.example.com:{port}/x?y=1"
    for _ in range(2):
        assert await trusting.post(url, b"{}", headers=HEADERS) == DeliveryReply("answered", 200)
    assert await trusting.post(f"https://other.example.com:{port}/", b"{}", headers=HEADERS) == DeliveryReply(
        "unreachable"
    )
    assert await wary.post(url, b"{}", headers=HEADERS) == DeliveryReply("unreachable")
    assert len(posts) == 2
    assert posts[0].startswith(b"POST /x?y=1 HTTP/1.1\r\nHost: hooks.example.com:%d\r\n" % port)
    for each in (trusting, wary):
        await each.close()
    server.close()
