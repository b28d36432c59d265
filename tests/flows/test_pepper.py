"""A changed pepper as an operator meets it: refused with the setting's name, or rotated while the service runs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.dev.postgres import Postgres
from tests.database import another
from tests.flows import production
from tests.flows.production import PEPPER, Production, settings_text
from tests.flows.upstream import Upstream
from tests.http_client import HttpClient, fresh_call, post
from tests.service import command, command_here, until

NEW = "canary-new-pepper-0123456789-0123456789"
CHANGED = f'pepper = "{NEW}"'
ROTATED = f'{CHANGED}\nprevious_pepper = "{PEPPER}"'
REFUSED = "reload refused: keeping the old settings"


@pytest.fixture
async def config(cluster: Postgres, upstream: Upstream, tmp_path: Path) -> AsyncIterator[tuple[Path, str]]:
    """A settings file on a database with one enterprise key, and that key."""
    async with another(cluster.url, "peppered") as url:
        path = tmp_path / "penstock.toml"
        path.write_text(settings_text(url, upstream.url, workers=1))
        await run(path, "migrate")
        words = ("accounts", "create", "--name", "A", "--email", "a@example.com", "--plan", "enterprise", "--json")
        account = orjson.loads(await run(path, *words))
        key = orjson.loads(await run(path, "keys", "create", "--account", account["id"], "--json"))
        yield path, key["key"]


async def run(path: Path, *words: str) -> str:
    done = await asyncio.to_thread(command_here, *words, "--config", str(path))
    assert done.returncode == 0, done.stderr
    return done.stdout


def set_pepper(path: Path, lines: str) -> None:
    path.write_text("\n".join(lines if row.startswith("pepper =") else row for row in path.read_text().splitlines()))


async def status(running: Production) -> int:
    async with await HttpClient.open(running.port) as client:
        return (await client.send(post(fresh_call(), key=running.key, network="ethereum/sepolia"))).status


async def reload(running: Production, lines: str) -> None:
    old: Any = set(running.worker_pids())
    path = running.config
    rows = [row for row in path.read_text().splitlines() if not row.startswith("previous_pepper")]
    path.write_text("\n".join(rows))
    set_pepper(path, lines)
    running.send_signal(signal.SIGHUP)
    await until(lambda: running.worker_pids() and old.isdisjoint(running.worker_pids()), within_s=30.0)


async def test_changed_pepper_is_refused_by_its_name(config: tuple[Path, str], tmp_path: Path) -> None:
    path, _ = config
    set_pepper(path, CHANGED)
    code, said = await production.failed(path, tmp_path / "log")
    assert code == 2
    done = await asyncio.to_thread(command, "keys", "list", "--config", str(path))
    assert done.returncode == 2
    for text in (said, done.stderr):
        assert "keys.pepper: is not the pepper of this database" in text
        assert "keys.previous_pepper" in text
        assert "canary" not in text
        assert "Traceback" not in text


async def test_pepper_is_rotated_while_serving(config: tuple[Path, str], tmp_path: Path) -> None:
    path, key = config
    running = await production.start(path, tmp_path / "log", key)
    try:
        workers = running.worker_pids()
        set_pepper(path, CHANGED)
        running.send_signal(signal.SIGHUP)
        await until(lambda: running.said(REFUSED))
        assert "keys.pepper" in running.said(REFUSED)[0]["faults"][0]
        assert running.worker_pids() == workers
        assert await status(running) == 200
        await reload(running, ROTATED)
        assert "API keys not used since the pepper was changed: 1" in await run(path, "reseal")
        assert await status(running) == 200
        async with asyncio.timeout(20):
            while "was changed: 0" not in await run(path, "reseal"):
                pass
        assert "the rotation has ended" in await run(path, "reseal", "--finish")
        await reload(running, CHANGED)
        assert await status(running) == 200
        assert "canary" not in running.log_file.read_text()
    finally:
        assert await production.stop(running) == 0
