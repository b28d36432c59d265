"""An operator's first commands: `check`, `migrate`, and a `serve` that refuses to start, with the reason."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from proxy.dev.postgres import Postgres
from tests.database import another
from tests.flows import production
from tests.flows.production import PEPPER, settings_text
from tests.service import command, command_here

UPSTREAM = "https://user:canary-password@upstream.example.com/canary-path"
# All of these must be reported together.
BAD = """
[server]
port = 99999
workers = "many"
header_timeout_s = 0
colour = "blue"
trusted_proxies = ["10.0.0.0/8", "not-a-block"]
[keys]
pepper = "short-secret"
[database]
url = "mysql://user:canary-password@host/name"
[sever]
port = 1
[[upstreams]]
network = "ethereum/mainnet"
url = "canary-path"
"""


@pytest.fixture
async def empty_database(cluster: Postgres, tmp_path: Path) -> AsyncIterator[Path]:
    """A settings file for an empty database."""
    async with another(cluster.url, "untouched") as url:
        path = tmp_path / "penstock.toml"
        path.write_text(settings_text(url, UPSTREAM))
        yield path


async def test_all_invalid_settings_are_reported_together(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text(BAD)
    checked = await asyncio.to_thread(command_here, "check", "--config", str(path), env={"PENSTOCK_LOG__LEVEL": "loud"})
    assert checked.returncode == 2
    code, served = await production.failed(path, tmp_path / "log")
    assert code == 2
    for said in (checked.stderr, served):
        for name in ("server.port", "server.workers", "server.header_timeout_s", "colour", "server.trusted_proxies.1"):
            assert name in said, name
        for name in ("keys.pepper", "database.url", "sever", "upstreams.0.url"):
            assert name in said, name
        for secret in ("short-secret", "canary-password", "canary-path"):
            assert secret not in said
        assert "Traceback" not in said
    assert "log.level" in checked.stderr


async def test_upstream_of_an_unknown_network_is_named(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text(settings_text("postgresql://h/d", UPSTREAM).replace("ethereum/sepolia", "atlantis/mainnet"))
    checked = await asyncio.to_thread(command_here, "check", "--config", str(path))
    assert checked.returncode == 2
    assert "atlantis/mainnet" in checked.stderr


async def test_check_prints_every_setting_and_masks_the_secrets(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text(settings_text("postgresql://user:canary-password@h/d", UPSTREAM))
    words = ("check", "--offline", "--config", str(path))
    done = await asyncio.to_thread(command_here, *words, env={"PENSTOCK_SERVER__PORT": "1234"})
    assert done.returncode == 0, done.stderr
    shown = dict(line.split(" = ", 1) for line in done.stdout.splitlines())
    assert shown["server.port"] == "1234"
    assert shown["server.workers"] == "2"
    assert shown["server.max_body_bytes"] == "1048576"
    assert shown["upstreams.0.network"] == '"ethereum/sepolia"'
    assert shown["keys.pepper"] == "********"
    assert shown["database.url"] == '"postgresql://user:********@h/d"'
    assert shown["upstreams.0.url"].endswith('/********"')
    for secret in ("canary-password", "canary-path", PEPPER):
        assert secret not in done.stdout + done.stderr


@pytest.mark.parametrize("text", ["[server", "= 1", "\x00", "[server]\nport = 1\nport = 2"])
async def test_invalid_toml_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text(text)
    done = await asyncio.to_thread(command_here, "check", "--config", str(path))
    assert done.returncode == 2
    assert str(path) in done.stderr
    assert len(done.stderr.splitlines()) == 1


async def test_missing_file_is_named(tmp_path: Path) -> None:
    done = await asyncio.to_thread(command, "serve", "--config", str(tmp_path / "none.toml"))
    assert done.returncode == 2
    assert str(tmp_path / "none.toml") in done.stderr


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (("serve",), "postgresql://user:canary-password@127.0.0.1:1/name"),
        (("check",), "postgresql://user:canary-password@127.0.0.1:1/name"),
        (("migrate",), "postgresql://user:canary-password@nowhere.invalid/name"),
        (("serve",), "postgresql://user:canary-password@[::1/name"),
        (("migrate",), "postgresql://user:canary-password@127.0.0.1:port/name"),
        (("accounts", "list"), "postgresql://user:canary-password@/name?sslmode=canary-path"),
    ],
)
async def test_unreachable_database_is_reported_without_its_password(
    tmp_path: Path, words: tuple[str, ...], address: str
) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text(settings_text(address, UPSTREAM))
    run = command if words == ("serve",) else command_here
    done = await asyncio.to_thread(run, *words, "--config", str(path))
    assert done.returncode == 2, done.stderr
    assert "database.url" in done.stderr
    assert "canary" not in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


async def test_missing_database_or_user_is_reported(
    cluster: Postgres,
    tmp_path: Path,
) -> None:
    path = tmp_path / "penstock.toml"
    for address, reason in (
        (cluster.url.replace("/penstock?", "/nowhere?"), "the database does not exist: create it"),
        (cluster.url.replace("penstock@", "nobody@"), "Postgres refuses this user"),
    ):
        path.write_text(settings_text(address, UPSTREAM))
        done = await asyncio.to_thread(command_here, "keys", "list", "--config", str(path))
        assert done.returncode == 2
        assert f"database.url: cannot connect: {reason}" in done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr


async def test_unmigrated_database_is_refused_with_the_command_to_run(empty_database: Path, tmp_path: Path) -> None:
    code, said = await production.failed(empty_database, tmp_path / "log")
    assert code == 2
    assert "penstock migrate" in said
    assert "0001_initial" in said
    for words in (("accounts", "list"), ("check",)):
        done = await asyncio.to_thread(command_here, *words, "--config", str(empty_database))
        assert done.returncode == 2
        assert "penstock migrate" in done.stderr


async def test_check_inspects_the_database_and_changes_nothing(empty_database: Path) -> None:
    def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return command_here(*words, "--config", str(empty_database), env=env)

    assert (await asyncio.to_thread(run, "migrate")).returncode == 0
    # The pepper is not recorded yet: any is accepted, and none is recorded.
    checked = await asyncio.to_thread(run, "check", PENSTOCK_KEYS__PEPPER="y" * 32)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "server.workers = 2" in checked.stdout.splitlines()
    assert (await asyncio.to_thread(run, "accounts", "list")).returncode == 0
    changed = await asyncio.to_thread(run, "check", PENSTOCK_KEYS__PEPPER="y" * 32)
    assert changed.returncode == 2
    assert "keys.pepper" in changed.stderr


async def test_concurrent_migrations_apply_each_file_once(empty_database: Path) -> None:
    words = ("migrate", "--config", str(empty_database))
    said = await asyncio.gather(*(asyncio.to_thread(command, *words) for _ in range(4)))
    assert [done.returncode for done in said] == [0] * 4, [done.stderr for done in said]
    assert [done.stdout.startswith("applied ") for done in said].count(True) == 1
    again = await asyncio.to_thread(command_here, *words)
    assert again.stdout == "the database schema is up to date\n"


async def test_settings_are_read_from_the_environment(empty_database: Path) -> None:
    """DATABASE_URL, as platforms set it, and prefixed names for the rest."""
    address = next(line for line in empty_database.read_text().splitlines() if line.startswith("url = ")).split('"')[1]
    env = {"DATABASE_URL": address, "PENSTOCK_KEYS__PEPPER": PEPPER}
    assert (await asyncio.to_thread(command_here, "migrate", env=env)).returncode == 0
    made = ("accounts", "create", "--name", "A", "--email", "a@example.com")
    assert (await asyncio.to_thread(command_here, *made, env=env)).returncode == 0
    assert "a@example.com" in (await asyncio.to_thread(command_here, "accounts", "list", env=env)).stdout


async def test_metrics_port_in_use_is_reported(empty_database: Path, tmp_path: Path) -> None:
    assert (await asyncio.to_thread(command_here, "migrate", "--config", str(empty_database))).returncode == 0
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        text = empty_database.read_text().replace("[metrics]\nport = 0", f"[metrics]\nport = {taken.getsockname()[1]}")
        empty_database.write_text(text)
        code, said = await production.failed(empty_database, tmp_path / "log")
    assert code == 2
    assert "metrics.port" in said
    assert "PENSTOCK_METRICS__PORT" in said
    assert "Traceback" not in said
