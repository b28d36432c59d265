"""The sample receivers of the reference accept genuine deliveries of both formats and reject all others."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from proxy.core.signatures import headers as signed_headers
from proxy.core.signatures import secret_of
from proxy.dev.npm_packages import node_binary
from proxy.settings import SCHEMAS
from tests.guide_pages import free_port
from tests.service import until

SECRET, OLD_SECRET = secret_of(b"k" * 32), secret_of(b"o" * 32)
BODY = b'{"id":"evt_1","event_type":"token_transfer","data":{}}'
SOURCES = SCHEMAS / "receivers"
# The headers of one signature each.
STANDARD = ("webhook-id", "webhook-timestamp", "webhook-signature")
OWN = ("X-Service-Signature", "X-Service-Timestamp", "X-Platform-Signature")


async def command(language: str, room: Path) -> list[str]:
    if language == "py":
        return [sys.executable, "-W", "error", str(SOURCES / "receiver.py")]
    if language == "mjs":
        return [str(node_binary()), str(SOURCES / "receiver.mjs")]
    if (go := shutil.which("go")) is None:
        pytest.skip("Go is not installed")
    build = [go, "build", "-o", str(room / "receiver"), str(SOURCES / "receiver.go")]
    environ = {**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": ""}
    await asyncio.to_thread(subprocess.run, build, env=environ, check=True, timeout=170)
    return [str(room / "receiver")]


@pytest.fixture(scope="module", params=["py", "mjs", "go"])
async def receiver(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    words = await command(request.param, tmp_path_factory.mktemp("receiver"))
    port = free_port()
    environ = {**os.environ, "WEBHOOK_SECRET": SECRET, "PORT": str(port)}
    process = subprocess.Popen(words, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        await until(lambda: _is_open(port), within_s=30.0)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            yield session, f"http://127.0.0.1:{port}/"
    finally:
        process.kill()
        process.wait()


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def status(receiver: tuple[aiohttp.ClientSession, str], headers: Mapping[str, str], body: bytes = BODY) -> int:
    session, url = receiver
    async with session.post(url, data=body, headers=headers) as reply:
        return reply.status


def signed(
    event_type: str, *, only: tuple[str, ...] = STANDARD + OWN, secrets: tuple[str, ...] = (SECRET,), age_s: int = 0
) -> dict[str, str]:
    found = signed_headers(
        event_type=event_type, event_id="evt_1", secrets=secrets, timestamp=int(time.time()) - age_s, body=BODY
    )
    return {name: value for name, value in found.items() if name in only}


@pytest.mark.parametrize("event_type", ["token_transfer", "TOKEN_TRANSFER"])
@pytest.mark.parametrize("only", [STANDARD, OWN])
async def test_each_signature_alone_is_accepted(
    receiver: tuple[aiohttp.ClientSession, str], event_type: str, only: tuple[str, ...]
) -> None:
    headers = signed(event_type, only=only)
    assert await status(receiver, headers) == 204
    assert await status(receiver, headers) == 204, "a repeated event is acknowledged too"
    assert await status(receiver, headers, BODY + b" ") == 401


async def test_delivery_without_a_signature_is_rejected(receiver: tuple[aiohttp.ClientSession, str]) -> None:
    assert await status(receiver, {}) == 401
    assert await status(receiver, dict.fromkeys(STANDARD + OWN, "é")) == 401


async def test_hostile_requests_do_not_stop_the_receiver(receiver: tuple[aiohttp.ClientSession, str]) -> None:
    """A signature of the right length with other letters, and a body that breaks off."""
    assert await status(receiver, {"X-Platform-Signature": "sha256=" + "é" * 32}) == 401
    _, writer = await asyncio.open_connection("127.0.0.1", urlsplit(receiver[1]).port)
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    for _ in range(10):
        assert await status(receiver, signed("token_transfer")) == 204


async def test_old_timestamp_is_rejected(receiver: tuple[aiohttp.ClientSession, str]) -> None:
    assert await status(receiver, signed("token_transfer", age_s=3600)) == 401


async def test_old_secret_is_accepted_after_a_rotation(receiver: tuple[aiohttp.ClientSession, str]) -> None:
    """The receiver still has the old secret, and the delivery is signed with both."""
    assert await status(receiver, signed("token_transfer", secrets=(OLD_SECRET, SECRET))) == 204
    assert await status(receiver, signed("token_transfer", secrets=(OLD_SECRET,))) == 401
