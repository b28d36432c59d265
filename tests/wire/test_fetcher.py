"""Remote documents: fetched within limits of size, time and redirects, whatever the server does."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from proxy.core.egress import EgressPolicy
from proxy.wire.fetcher import Fetched, Fetcher, expanded
from proxy.wire.outbound_guard import OutboundGuard
from tests.wire.external_servers import Pages, pages

LIMIT = 10_000
LOOPBACK = OutboundGuard(EgressPolicy(allow=["127.0.0.0/8"]), http=True, ports=())


@pytest.fixture
async def site() -> AsyncIterator[Pages]:
    async with pages() as found:
        yield found


@pytest.fixture
async def fetcher() -> AsyncIterator[Fetcher]:
    found = Fetcher(LOOPBACK, timeout_s=10.0, max_bytes=LIMIT)
    yield found
    await found.close()


async def test_document_comes_with_its_media_type(site: Pages, fetcher: Fetcher) -> None:
    url = site.put("/a.json", b'{"name": "x"}', media_type="application/json; charset=utf-8")
    assert await fetcher.get(url) == Fetched("ok", b'{"name": "x"}', "application/json")


async def test_nothing_about_us_goes_out_but_our_name(
    site: Pages, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1/")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1/")
    await fetcher.get(site.put("/", b"{}", Set_Cookie="a=b"))
    await fetcher.get(site.url("/"))
    for head in site.heads:
        assert set(head) == {"Host", "User-Agent", "Accept", "Accept-Encoding"}
        assert head["User-Agent"].startswith("penstock/")
        assert head["Accept-Encoding"] == "identity"


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(404, "not_found"), (410, "not_found"), (204, "unreachable"), (401, "unreachable"), (500, "unreachable")],
)  # fmt: skip
async def test_other_status_than_200_is_no_document(site: Pages, fetcher: Fetcher, status: int, outcome: str) -> None:
    async def page(request: web.Request) -> web.Response:
        return web.Response(status=status)

    site.pages["/"] = page
    assert (await fetcher.get(site.url("/"))).outcome == outcome


async def test_closed_port_is_unreachable(site: Pages, fetcher: Fetcher) -> None:
    async with pages() as gone:
        url = gone.url("/")
    assert (await fetcher.get(url)).outcome == "unreachable"


# Size


@pytest.mark.parametrize(("size", "outcome"), [(0, "ok"), (LIMIT, "ok"), (LIMIT + 1, "too_large")])
async def test_document_is_read_up_to_the_limit(site: Pages, fetcher: Fetcher, size: int, outcome: str) -> None:
    assert (await fetcher.get(site.put("/", b"x" * size))).outcome == outcome


async def test_document_of_unknown_length_is_given_up_at_the_limit(site: Pages, fetcher: Fetcher) -> None:
    """It never ends; and the other side is not read any further."""
    sent = 0
    gone = asyncio.Event()

    async def page(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * 1000)
                sent += 1000
        finally:
            gone.set()

    site.pages["/"] = page
    assert (await fetcher.get(site.url("/"))).outcome == "too_large"
    async with asyncio.timeout(10):
        await gone.wait()
    assert sent < 100_000_000


def bomb(megabytes: int) -> bytes:
    """Zeros, a thousandth of their size."""
    packer = zlib.compressobj(9, wbits=31)
    return b"".join([packer.compress(bytes(1 << 20)) for _ in range(megabytes)]) + packer.flush()


async def test_bomb_is_not_expanded_beyond_the_limit(site: Pages) -> None:
    fetcher = Fetcher(LOOPBACK, timeout_s=10.0, max_bytes=1 << 20)
    packed = bomb(64)
    assert len(packed) < 1 << 20
    found = await fetcher.get(site.put("/", packed, Content_Encoding="gzip"))
    await fetcher.close()
    assert found == Fetched("too_large")


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "deflate", "GZIP", "identity"])
async def test_document_that_is_compressed_all_the_same_is_read(site: Pages, fetcher: Fetcher, encoding: str) -> None:
    packed = {"deflate": zlib.compress(b"{}"), "identity": b"{}"}.get(encoding, gzip.compress(b"{}"))
    assert (await fetcher.get(site.put("/", packed, Content_Encoding=encoding))).body == b"{}"


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "nonsense"])
async def test_compression_that_we_do_not_read_is_invalid(site: Pages, fetcher: Fetcher, encoding: str) -> None:
    assert (await fetcher.get(site.put("/", b"{}", Content_Encoding=encoding))).outcome == "invalid"


@pytest.mark.parametrize("packed", [b"", b"no gzip", gzip.compress(b"{}" * 100, mtime=0)[:-12]])
async def test_compression_that_is_broken_is_invalid(site: Pages, fetcher: Fetcher, packed: bytes) -> None:
    assert (await fetcher.get(site.put("/", packed, Content_Encoding="gzip"))).outcome == "invalid"


def test_expanding_stops_at_the_limit() -> None:
    assert expanded(gzip.compress(b"x" * 10), "gzip", 10) == b"x" * 10
    with pytest.raises(Exception, match="too_large"):
        expanded(gzip.compress(b"x" * 11), "gzip", 10)


# Time


async def test_drip_is_cut_off_at_the_deadline(site: Pages) -> None:
    """Each byte comes soon enough; all of them never."""
    gone = asyncio.Event()

    async def page(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b" ")
                await asyncio.sleep(0.01)
        finally:
            gone.set()

    site.pages["/"] = page
    fetcher = Fetcher(LOOPBACK, timeout_s=0.3, max_bytes=LIMIT)
    assert (await fetcher.get(site.url("/"))).outcome == "timeout"
    async with asyncio.timeout(10):
        await gone.wait()
    await fetcher.close()


async def test_redirects_share_one_deadline(site: Pages) -> None:
    async def page(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.2)
        return web.Response(status=302, headers={"Location": "/"})

    site.pages["/"] = page
    fetcher = Fetcher(LOOPBACK, timeout_s=0.3, max_bytes=LIMIT)
    assert (await fetcher.get(site.url("/"))).outcome == "timeout"
    await fetcher.close()


# Redirects


@pytest.mark.parametrize(("hops", "outcome"), [(1, "ok"), (3, "ok"), (4, "refused")])
async def test_at_most_three_redirects_are_followed(site: Pages, fetcher: Fetcher, hops: int, outcome: str) -> None:
    site.put("/0", b"{}")
    for hop in range(1, hops + 1):
        site.move(f"/{hop}", f"/{hop - 1}")
    assert (await fetcher.get(site.url(f"/{hops}"))).outcome == outcome
    assert len(site.requested) == min(hops, 3) + 1


async def test_redirect_in_a_circle_ends(site: Pages, fetcher: Fetcher) -> None:
    assert (await fetcher.get(site.move("/", "/"))).outcome == "refused"
    assert len(site.requested) == 4


@pytest.mark.parametrize(
    "to", ["http://user:secret@127.0.0.1/", "http://[", "file:///etc/passwd", "http://127.0.0.1:99999/"]
)
async def test_forbidden_redirect_is_refused(site: Pages, fetcher: Fetcher, to: str) -> None:
    assert (await fetcher.get(site.move("/", to))).outcome in ("refused", "invalid")


async def test_operators_own_address_may_be_private_and_redirect_to_itself(site: Pages) -> None:
    fetcher = Fetcher(OutboundGuard(EgressPolicy()), timeout_s=10.0, max_bytes=LIMIT)
    site.put("/b", b"{}")
    assert (await fetcher.get(site.move("/a", "/b"), own=True)).outcome == "ok"
    assert (await fetcher.get(site.url("/b"))).outcome == "refused"
    await fetcher.close()


async def test_reply_that_is_no_http_is_unreachable(fetcher: Fetcher) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"SSH-2.0-none\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert (await fetcher.get(f"http://127.0.0.1:{port}/")).outcome == "unreachable"
    server.close()
    await server.wait_closed()
