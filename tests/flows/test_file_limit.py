"""A low limit on open files: it is raised as far as allowed, and connections beyond it are refused with a reply."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from proxy import settings as settings_room
from proxy.dev.postgres import Postgres
from proxy.errors import StartError
from proxy.processes.file_limit import fitted, reserved_files
from proxy.settings import Settings
from tests.database import another
from tests.flows import production
from tests.flows.production import PEPPER, settings_text
from tests.flows.upstream import Upstream
from tests.http_client import request
from tests.service import command_here

LOWERED = "server.max_connections lowered to fit the limit on open files"
HARD = 400


@pytest.fixture
async def config(cluster: Postgres, upstream: Upstream, tmp_path: Path) -> AsyncIterator[Path]:
    async with another(cluster.url, "few_files") as url:
        path = tmp_path / "penstock.toml"
        path.write_text(settings_text(url, upstream.url, workers=1))
        done = await asyncio.to_thread(command_here, "migrate", "--config", str(path))
        assert done.returncode == 0, done.stderr
        yield path


async def status_line(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(10.0):
        return (await reader.readline()).strip()


async def test_connections_beyond_the_file_limit_get_a_reply(config: Path, tmp_path: Path) -> None:
    running = production.launch(config, tmp_path / "log", files=(HARD // 2, HARD))
    await production.ready(running)
    writers = []
    try:
        (lowered,) = running.said(LOWERED)
        most = lowered["max_connections"]
        assert (lowered["files"], lowered["wanted"]) == (HARD, 20_000)
        assert 100 < most < HARD
        limits = Path(f"/proc/{running.worker_pids()[0]}/limits").read_text()
        assert f"Max open files            {HARD}" in limits
        lines = []
        for number in range(most + 5):
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writers.append(writer)
            if number < most:
                writer.write(request("GET", "/healthz"))
            lines.append(await status_line(reader))
        assert lines[:most] == [b"HTTP/1.1 200 OK"] * most
        assert lines[most:] == [b"HTTP/1.1 503 Service Unavailable"] * 5
    finally:
        for writer in writers:
            writer.close()
        assert await production.stop(running) == 0


async def test_limit_that_leaves_no_connection_is_refused(config: Path, tmp_path: Path) -> None:
    running = production.launch(config, tmp_path / "log", files=(150, 150))
    assert await asyncio.to_thread(running.process.wait, 30.0) == 2
    said = running.log_file.read_text()
    assert "server.max_connections" in said
    assert "ulimit -n" in said
    assert "Traceback" not in said


@pytest.fixture
def settings() -> Settings:
    tree = {"database": {"url": "postgresql://h/d"}, "keys": {"pepper": PEPPER}}
    return settings_room.load(environ={}, overrides=tree)


def test_connections_are_lowered_only_as_far_as_needed(settings: Settings) -> None:
    wanted, reserved = settings.server.max_connections, reserved_files(settings)
    for limit in (resource.RLIM_INFINITY, wanted + reserved, wanted + reserved + 1):
        assert fitted(settings, limit) is settings
    assert fitted(settings, wanted + reserved - 1).server.max_connections == wanted - 1
    assert fitted(settings, reserved + 1).tree["server"]["max_connections"] == 1
    with pytest.raises(StartError, match=str(wanted + reserved)):
        fitted(settings, reserved)
