"""An update and its return: processes of a version go on while and after the next version's migration is applied."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from proxy.store.postgres import migrate
from tests.flows import production
from tests.flows.production import Production, settings_text
from tests.flows.upstream import Upstream
from tests.service import ROOT, until

NEXT = f"{len(migrate.files()) + 1:04}_next"
# As a release adds: a column with a default, an index and a table.
MIGRATION = """
-- What the next version needs.
alter table webhooks add column note text not null default '';
create index webhooks_by_note on webhooks (note);
create table notes (webhook_id text primary key references webhooks (id) on delete cascade, text text not null);
"""
# Requests answered in each phase.
ENOUGH = 30
CALL = {"jsonrpc": "2.0", "id": 1, "method": "eth_gasPrice", "params": []}
WEBHOOK = {"url": "https://hooks.example.com/", "chain": "ethereum", "event_type": "NEW_BLOCK"}


@pytest.fixture(scope="module")
def following(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of the next version: this one with another migration."""
    room = tmp_path_factory.mktemp("following")
    unneeded = shutil.ignore_patterns("__pycache__", "*.so", "node_modules")
    for name in ("proxy", "config", "schemas"):
        shutil.copytree(ROOT / name, room / name, ignore=unneeded)
    (room / "schemas" / "sql" / "migrations" / f"{NEXT}.sql").write_text(MIGRATION.lstrip())
    return room


async def command_of(root: Path, *words: str) -> str:
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-m", "proxy", *words], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@dataclass
class Traffic:
    """Calls, and requests that write to the database, to one service after the other. One that fails ends the test."""

    session: aiohttp.ClientSession
    key: str
    ports: list[int]
    replies: int = 0

    async def run(self) -> None:
        while True:
            for port in tuple(self.ports):
                await self._use(f"http://127.0.0.1:{port}/v1")

    async def answered(self) -> None:
        before = self.replies
        await until(lambda: self.replies > before + ENOUGH, within_s=60.0)

    async def _use(self, base: str) -> None:
        await self._send("POST", f"{base}/rpc/ethereum/sepolia", CALL)
        made = await self._send("POST", f"{base}/webhooks", WEBHOOK)
        await self._send("GET", f"{base}/webhooks/{made['id']}")
        await self._send("DELETE", f"{base}/webhooks/{made['id']}")

    async def _send(self, method: str, url: str, body: Any = None) -> Any:
        async with self.session.request(method, url, json=body, headers={"X-API-Key": self.key}) as response:
            text = await response.read()
            assert response.status < 300, text
            self.replies += 1
            return orjson.loads(text) if text else {}


async def new_key(root: Path, config: str) -> str:
    holder = ("--name", "A", "--email", "a@example.com", "--plan", "enterprise")
    account = orjson.loads(await command_of(root, "accounts", "create", *holder, "--config", config, "--json"))
    owned = ("--account", account["id"], "--mode", "test")
    return str(orjson.loads(await command_of(root, "keys", "create", *owned, "--config", config, "--json"))["key"])


async def test_old_and_new_version_share_the_migrated_database(
    following: Path, empty_database: str, upstream: Upstream, tmp_path: Path
) -> None:
    text = settings_text(empty_database, upstream.url, workers=1)
    # Webhooks need a network that is followed. No follower is started.
    (config := tmp_path / "penstock.toml").write_text(text.replace("networks = []", 'networks = ["*"]'))
    assert NEXT not in await command_of(ROOT, "migrate", "--config", str(config))
    key = await new_key(ROOT, str(config))
    running: list[Production] = []

    async def start(root: Path) -> Production:
        running.append(await production.start(config, tmp_path / f"log{len(running)}", key, role="gateway", root=root))
        return running[-1]

    try:
        old = await start(ROOT)
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
            traffic = Traffic(session, key, [old.port])
            sending = group.create_task(traffic.run())
            await traffic.answered()
            assert NEXT in await command_of(following, "migrate", "--config", str(config))
            await traffic.answered()
            traffic.ports.append((await start(following)).port)
            await traffic.answered()
            # Back to the old version: a process of it starts on the new schema.
            traffic.ports[:] = [(await start(ROOT)).port]
            await traffic.answered()
            sending.cancel()
    finally:
        codes = [await production.stop(each) for each in running]
    assert codes == [0, 0, 0]
