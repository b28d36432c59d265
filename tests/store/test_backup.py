"""`backup` and `restore`: everything comes back, into an empty database only, and never from a newer version."""

from __future__ import annotations

import asyncio
import hashlib
import stat
import subprocess
from pathlib import Path

import asyncpg
import pytest

from proxy.errors import StartError
from proxy.store.postgres import migrate, peppers, postgres_tools
from proxy.store.postgres.keys import KeyStore
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.secrets import Vault
from proxy.store.postgres.webhooks import NewWebhook, WebhookStore
from tests.conventions.test_sql import catalog
from tests.database import connected
from tests.flows.production import PEPPER, settings_text
from tests.service import command_here

RELATIONS = "select relname from pg_class where relkind = any($1) and relnamespace = 'public'::regnamespace order by 1"


class Databases:
    """A filled database, an empty one, and a settings file for each."""

    def __init__(self, room: Path, source: str, target: str) -> None:
        self.file = room / "penstock.dump"
        self.source, self.target = source, target
        self.configs = {url: room / f"{name}.toml" for name, url in {"source": source, "target": target}.items()}
        for url, path in self.configs.items():
            path.write_text(settings_text(url, "http://127.0.0.1:1"))

    async def backup(self) -> subprocess.CompletedProcess[str]:
        return await self._run("backup", self.source)

    async def restore(self) -> subprocess.CompletedProcess[str]:
        return await self._run("restore", self.target)

    async def _run(self, name: str, url: str) -> subprocess.CompletedProcess[str]:
        words = (name, str(self.file), "--config", str(self.configs[url]))
        return await asyncio.to_thread(command_here, *words)


@pytest.fixture
async def databases(tmp_path: Path, database: str, empty_database: str, pool: Pool) -> Databases:
    await fill(pool)
    return Databases(tmp_path, database, empty_database)


async def fill(pool: Pool) -> None:
    """Rows of many kinds: text that needs quoting, JSON, bytes, arrays, times and numbers from sequences."""
    async with pool.connection() as connection:
        await peppers.admit(connection, PEPPER, "", {})
    keys = KeyStore(pool, pepper=PEPPER, plans={"growth": 100})
    account = await keys.create_account(name="Ünï \\N", email="a@example.com", plan="growth")
    await keys.create_key(account["id"], mode="live", name="k", scopes=("rpc:read",))
    new = NewWebhook(
        account=account["id"],
        network="dev/mainnet",
        live=True,
        url="https://hooks.example.com/",
        event_type="address_activity",
        config={"a": [1, None, "\\"]},
    )
    addresses = [bytes(20), b"\xff" * 20]
    webhook = WebhookStore.new_id()
    secret = Vault(PEPPER).seal(webhook, b"\0secret")
    await WebhookStore(pool).create(webhook, new, addresses=addresses, secret=secret, most=100)


async def contents(url: str) -> dict[str, str]:
    """A digest of each table's rows and the state of each sequence."""
    async with connected(url) as connection:
        tables = [row["relname"] for row in await connection.fetch(RELATIONS, [b"r", b"p"])]
        sequences = [row["relname"] for row in await connection.fetch(RELATIONS, [b"S"])]
        states = {
            name: str(await connection.fetchrow(f'select last_value, is_called from "{name}"')) for name in sequences
        }
        return {name: await digest(connection, name) for name in tables} | states


async def digest(connection: asyncpg.Connection[asyncpg.Record], table: str) -> str:
    rows = await connection.fetch(f'select t::text as row from "{table}" t order by 1')
    return hashlib.sha256("\n".join(row["row"] for row in rows).encode()).hexdigest() if rows else ""


async def test_restored_database_has_everything(databases: Databases) -> None:
    wrote = await databases.backup()
    assert wrote.returncode == 0, wrote.stderr
    assert stat.S_IMODE(databases.file.stat().st_mode) == 0o600
    assert [path.name for path in databases.file.parent.glob("*penstock*")] == ["penstock.dump"]
    before = await contents(databases.source)
    restored = await databases.restore()
    assert restored.returncode == 0, restored.stderr
    assert await contents(databases.target) == before
    assert await catalog(databases.target) == await catalog(databases.source)
    assert len([digest for digest in before.values() if digest]) >= 6


async def test_restored_database_is_compared_with_the_pepper(databases: Databases) -> None:
    await databases.backup()
    config = databases.configs[databases.target]
    config.write_text(config.read_text().replace(PEPPER, "another-pepper-0123456789-0123456789"))
    done = await databases.restore()
    assert done.returncode == 2
    assert done.stdout.startswith("restored ")
    assert "keys.pepper" in done.stderr


async def test_backup_and_restore_need_no_pepper(databases: Databases) -> None:
    for config in databases.configs.values():
        config.write_text(config.read_text().replace(f'pepper = "{PEPPER}"', ""))
    assert (await databases.backup()).returncode == 0
    done = await databases.restore()
    assert done.returncode == 0, done.stderr
    assert "set keys.pepper and webhooks.secret_key to those of the backup" in done.stdout


async def test_backup_replaces_no_file(databases: Databases) -> None:
    databases.file.write_text("precious")
    done = await databases.backup()
    assert (done.returncode, databases.file.read_text()) == (2, "precious")
    assert "exists already" in done.stderr


async def test_filled_database_is_not_overwritten(databases: Databases) -> None:
    await databases.backup()
    async with connected(databases.target) as connection:
        await connection.execute("create table precious (n int)")
    done = await databases.restore()
    assert done.returncode == 2
    assert "the database is not empty" in done.stderr


async def test_backup_of_a_newer_version_is_refused(databases: Databases) -> None:
    async with connected(databases.source) as connection:
        await connection.execute("insert into schema_migrations (name) values ('9999_future')")
    await databases.backup()
    done = await databases.restore()
    assert done.returncode == 2
    assert "is from a newer version, with the migrations 9999_future" in done.stderr
    assert await contents(databases.target) == {}


async def test_backup_of_an_older_version_names_the_migrations_to_apply(
    databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    await databases.backup()
    newer = [*migrate.files(), migrate.MIGRATIONS / "9999_next.sql"]
    monkeypatch.setattr(migrate, "files", lambda: newer)
    done = await databases.restore()
    assert done.returncode == 0, done.stderr
    assert "migrate, which applies 9999_next" in done.stdout


async def test_another_file_is_refused(databases: Databases) -> None:
    databases.file.write_text("something else")
    done = await databases.restore()
    assert done.returncode == 2
    assert "pg_restore failed: error: input file does not appear to be a valid" in done.stderr


def programs(room: Path, major: int) -> Path:
    """A directory with programs of a version."""
    directory = room / str(major)
    directory.mkdir()
    for name in ("pg_dump", "pg_restore"):
        (directory / name).write_text(f"#!/bin/sh\necho '{name} (PostgreSQL) {major}.1'\n")
        (directory / name).chmod(0o755)
    return directory


@pytest.mark.parametrize(("server", "chosen"), [(15, 16), (16, 16), (17, 18), (18, 18)])
def test_tools_of_the_servers_version_or_the_next_are_chosen(tmp_path: Path, server: int, chosen: int) -> None:
    places = [programs(tmp_path, major) for major in (14, 18, 16)]
    assert postgres_tools.tools_for(server, iter([tmp_path, *places])).major == chosen


def test_lack_of_new_tools_is_an_error_that_names_the_package(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"Postgres 18; pg_dump 14 is too old: .*postgresql-client-18"):
        postgres_tools.tools_for(18, iter([programs(tmp_path, 14)]))
    with pytest.raises(StartError, match="Postgres 18: on Debian"):
        postgres_tools.tools_for(18, iter([]))


def test_password_is_not_on_the_command_line() -> None:
    url = "postgresql://u:p%40ss@one,two:5433/name?target_session_attrs=primary"
    bare, secret = postgres_tools.without_password(url)
    assert bare == "postgresql://u@one,two:5433/name?target_session_attrs=primary"
    assert secret == {"PGPASSWORD": "p@ss"}
    assert postgres_tools.without_password("postgresql:///name") == ("postgresql:///name", {})
