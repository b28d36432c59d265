"""Serving of the dashboard's files: immutable, compressed once, and with a strict content security policy."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import re
from collections.abc import Callable

import brotli
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer, make_mocked_request

from proxy.web.dashboard.static_files import ROOT, StaticFiles
from proxy.web.packed_files import TYPES, DerivedFile

Client = TestClient[web.Request, web.Application]
PLAIN = {"Accept-Encoding": "identity"}


@pytest.fixture(scope="module")
async def files() -> StaticFiles:
    return StaticFiles()


@pytest.fixture
async def client(files: StaticFiles) -> object:
    application = web.Application()
    application.add_routes(files.routes())
    async with TestClient(TestServer(application), auto_decompress=False) as opened:
        yield opened


async def test_page_refers_only_to_existing_files(client: Client, files: StaticFiles) -> None:
    page = await (await client.get("/dashboard", headers=PLAIN)).text()
    modules = orjson.loads(re.findall(r'id="modules">(.*?)</script>', page)[0])
    imported = {name for names in modules["imports"].values() for name in names}
    named = re.findall(r'(?:src|href)="(/dashboard/[^"]+)"', page)
    assert len(named) == 2
    assert len(imported) > 5
    assert imported <= modules["imports"].keys()
    assert "assets/" not in page
    for url in [*named, *(modules["prefix"] + name for name in modules["imports"])]:
        reply = await client.get(url)
        assert reply.status == 200, url
        assert "immutable" in reply.headers["Cache-Control"]
        assert url.startswith(f"/dashboard/{files.digest}/")


async def test_modules_import_only_existing_files() -> None:
    for path in ROOT.rglob("*.js"):
        for name in re.findall(r'(?:from|import\()\s*"(\.[^"]+)"', path.read_text()):
            assert (path.parent / name).is_file(), f"{path.name}: {name}"


def test_page_names_no_chain_family() -> None:
    """The server says what each network can do, so a new family needs no edit here."""
    own = [path for path in ROOT.rglob("*.js") if "vendor" not in path.parts]
    assert [path.name for path in own if re.search(r"""["'`](evm|svm)["'`]|\b(evm|svm):""", path.read_text())] == []


async def test_page_contains_its_styles_and_its_first_script_and_the_policy_allows_them(client: Client) -> None:
    reply = await client.get("/dashboard", headers=PLAIN)
    policy, page = reply.headers["Content-Security-Policy"], await reply.read()
    assert b'rel="stylesheet"' not in page
    parts = re.findall(rb"<(style|script)>(.*?)</(?:style|script)>", page, re.DOTALL)
    assert [kind for kind, _ in parts] == [b"style", b"style", b"style", b"script"]
    for _, text in parts:
        assert f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" in policy
    assert (ROOT / "early.js").read_bytes() in page


@pytest.mark.parametrize("path", ["/dashboard", "/dashboard/", "/dashboard/anything/page.js"])
async def test_every_reply_has_the_security_policy(client: Client, path: str) -> None:
    reply = await client.get(path)
    policy = reply.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    assert reply.headers["Referrer-Policy"] == "no-referrer"
    assert reply.headers["Vary"] == "Accept-Encoding"


async def test_page_is_revalidated_each_time_and_not_sent_twice(client: Client) -> None:
    first = await client.get("/dashboard")
    assert first.headers["Cache-Control"] == "no-cache"
    again = await client.get("/dashboard", headers={"If-None-Match": first.headers["ETag"]})
    assert again.status == 304
    assert await again.read() == b""
    assert "Content-Security-Policy" in again.headers


async def test_files_of_another_version_are_served_without_caching(client: Client) -> None:
    reply = await client.get("/dashboard/0123456789abcdef/page.js")
    assert reply.status == 200
    assert reply.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    ("accepted", "encoding", "unpack"),
    [("gzip", "gzip", gzip.decompress), ("gzip, br, zstd", "br", brotli.decompress)],
)
async def test_compressed_file_has_the_same_content(
    client: Client, files: StaticFiles, accepted: str, encoding: str, unpack: Callable[[bytes], bytes]
) -> None:
    url = f"/dashboard/{files.digest}/page.js"
    packed = await client.get(url, headers={"Accept-Encoding": accepted})
    plain = await client.get(url, headers=PLAIN)
    assert packed.headers["Content-Encoding"] == encoding
    assert "Content-Encoding" not in plain.headers
    assert unpack(await packed.read()) == await plain.read() == (ROOT / "page.js").read_bytes()


@pytest.mark.parametrize(
    "name", ["nothing.js", "../files.py", "..%2ffiles.py", "%2e%2e/files.py", "index.html", "views"]
)
async def test_unknown_file_is_not_found(client: Client, files: StaticFiles, name: str) -> None:
    assert (await client.get(f"/dashboard/{files.digest}/{name}")).status == 404


async def test_root_redirects_to_the_dashboard(client: Client) -> None:
    reply = await client.get("/", allow_redirects=False)
    assert (reply.status, reply.headers["Location"]) == (302, "dashboard")


def test_files_use_no_markup_strings_and_no_other_host() -> None:
    """Nothing that the policy would block is attempted."""
    ours = [path for path in ROOT.rglob("*") if path.suffix in TYPES and "vendor" not in path.parts]
    for path in ours:
        text = path.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
        assert not re.search(r"\son\w+=\"|<style|style=\"", text) or path.suffix == ".js", path
        others = re.findall(r"https?://(?!www\.w3\.org/|hooks\.example|app\.example)[\w.-]+", text)
        assert not others, path


def test_files_are_small_enough_to_read() -> None:
    ours = [path for path in ROOT.rglob("*.*s") if "vendor" not in path.parts]
    assert not [path.name for path in ours if len(path.read_text().splitlines()) > 400]


async def test_derived_file_is_made_once_by_its_first_requests() -> None:
    made: list[bytes] = []

    def make() -> bytes:
        made.append(b"[1]")
        return made[-1]

    file = DerivedFile("a.json", make)
    assert not made
    replies = await asyncio.gather(*(file.reply(make_mocked_request("GET", "/"), {"X-A": "b"}) for _ in range(5)))
    assert [reply.body for reply in replies] == made * 5
    assert {reply.headers["X-A"] for reply in replies} == {"b"}
