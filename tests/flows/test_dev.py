"""`python -m proxy dev`: refusals, cleanup and kept data."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.__main__ import main
from tests import service as service_room
from tests.flows.load import spend
from tests.http_client import HttpClient, post, rpc, send_once
from tests.service import Service, descendants, finished, launch, processes_of, until

# All processes must end this soon after a kill: Postgres writes its last page, workers finish their drain.
GONE_S = 15.0
READ = rpc("eth_chainId")


@pytest.fixture
def own_tmp(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment with a private temporary directory, `tmp_path / "tmp"`, to check what is left in it.

    Its real path is short: a Unix socket's path has at most 107 bytes, and `tmp_path` alone is nearly as long.
    """
    with tempfile.TemporaryDirectory(prefix="dev-", dir="/tmp") as short:
        (tmp_path / "tmp").symlink_to(short)
        yield {"TMPDIR": short}


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*"))


async def refused(data: Path, *words: str, env: dict[str, str] | None = None) -> str:
    """Start, expect exit code 2 and no process left running, and return the output."""
    process = launch(data, *words, env=env)
    code, said = await finished(process, within_s=60.0)
    assert code == 2, said
    assert "Traceback" not in said, said
    await _all_gone(data)
    return said


async def _all_gone(data: Path) -> None:
    await until(lambda: not processes_of(data), within_s=GONE_S)


# Refusals


async def test_port_in_use_is_reported_with_a_remedy(
    kept: dict[str, Service], tmp_path: Path, own_tmp: dict[str, str]
) -> None:
    """Also the port of another run: with SO_REUSEPORT both could listen and each would get half of the requests."""
    port = str(kept["now"].port)
    said = await refused(tmp_path / "data", "--port", port, env=own_tmp)
    assert port in said
    assert "--port" in said
    assert left_in(tmp_path / "tmp") == []
    assert not (tmp_path / "data" / "ready.json").exists()
    assert not (tmp_path / "data" / "running.json").exists()


async def test_database_that_does_not_start_is_reported_with_its_log(tmp_path: Path, own_tmp: dict[str, str]) -> None:
    cluster = tmp_path / "data" / "postgres"
    cluster.mkdir(parents=True, mode=0o700)
    (cluster / "PG_VERSION").write_text("9.1\n")
    said = await refused(tmp_path / "data", env=own_tmp)
    assert "postgres did not start" in said
    assert str(tmp_path / "data" / "logs" / "postgres.log") in said
    assert left_in(tmp_path / "tmp") == []


async def test_worker_that_does_not_start_is_reported_with_its_reason(tmp_path: Path, own_tmp: dict[str, str]) -> None:
    said = await refused(tmp_path / "data", "--workers", "1", env={**own_tmp, "AIOHTTP_NO_EXTENSIONS": "1"})
    assert "C parser" in said
    assert left_in(tmp_path / "tmp") == []


def said_by_refusal(capsys: pytest.CaptureFixture[str], data: Path, *words: str) -> str:
    """Run the command in this process, expect exit code 2, and return its output."""
    try:
        code: Any = main(["dev", "--data", str(data), *words])
    except SystemExit as exc:
        code = exc.code
    printed = capsys.readouterr()
    assert code == 2, printed
    assert not (data / "postgres").exists()
    return printed.out + printed.err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--upstream", "nonsense"), "--upstream"),
        (("--upstream", "atlantis/mainnet=http://127.0.0.1:1"), "atlantis/mainnet"),
        (("--upstream", "ethereum/mainnet=ftp://127.0.0.1"), "upstreams.2.url"),
        (("--workers", "-1"), "server.workers"),
        (("--port", "70000"), "server.port"),
        (("--config", "/nowhere/penstock.toml"), "/nowhere/penstock.toml"),
        (("--ready-file", "/nowhere/ready.json"), "--ready-file"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...], named: str
) -> None:
    assert named in said_by_refusal(capsys, tmp_path / "data", *words)


def test_invalid_environment_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_SERVER__HEADER_TIMEOUT_S", "soon")
    monkeypatch.setenv("PENSTOCK_NO__SUCH", "1")
    said = said_by_refusal(capsys, tmp_path / "data")
    assert "server.header_timeout_s" in said
    assert "PENSTOCK_NO__SUCH" in said


def test_data_path_that_is_not_a_directory_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = said_by_refusal(capsys, tmp_path / "file")
    assert "--data" in said
    assert str(tmp_path / "file") in said


# Cleanup


@pytest.mark.parametrize("moment", ["postgres", "proxy worker", "alto"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
async def test_kill_during_startup_leaves_nothing_behind(
    tmp_path: Path, own_tmp: dict[str, str], moment: str, number: signal.Signals
) -> None:
    """Kill it as soon as its first child of a kind appears; the next start with the same directory works."""
    data = tmp_path / "data"
    process = launch(data, "--workers", "1", env=own_tmp, bundler=moment == "alto")

    def has_come() -> bool:
        return process.poll() is not None or any(moment in line for line in descendants(process.pid).values())

    await until(has_come, within_s=60.0, every_s=0.05)
    process.send_signal(number)
    code, said = await finished(process, within_s=GONE_S)
    await _all_gone(data)
    assert not (data / "ready.json").exists()
    if number == signal.SIGINT:
        assert code in (0, 130), said
        assert "Traceback" not in said
        assert left_in(tmp_path / "tmp") == []


# Kept data


@pytest.fixture(scope="module")
async def spaced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept") / "a path with spaces"


@pytest.fixture(scope="module")
async def kept(spaced: Path) -> AsyncIterator[dict[str, Service]]:
    """The service that currently runs on the directory. Tests replace it.

    An earlier start was killed while it created the database, which must not leave an unusable one behind.
    """
    process = launch(spaced)
    await until(lambda: any("initdb" in line for line in descendants(process.pid).values()), every_s=0.002)
    process.kill()
    await finished(process)
    box = {"now": await service_room.start(spaced, "--workers", "1")}
    yield box
    await service_room.stop(box["now"])


async def again(box: dict[str, Service], *words: str, by: signal.Signals = signal.SIGINT) -> Service:
    """Stop the running service, check that no process is left, and start it again with the same directory."""
    old = box["now"]
    code = await service_room.stop(old, by)
    assert code == (0 if by != signal.SIGKILL else -signal.SIGKILL)
    await _all_gone(old.data)
    box["now"] = await service_room.start(old.data, "--workers", "1", *words)
    return box["now"]


async def test_start_after_a_kill_during_the_first_start_works(kept: dict[str, Service]) -> None:
    assert (await kept["now"].rpc("eth_chainId")).status == 200


async def test_second_run_on_the_same_directory_is_refused(kept: dict[str, Service]) -> None:
    now = kept["now"]
    process = launch(now.data, "--ready-file", str(now.data / "other.json"))
    code, said = await finished(process)
    assert code == 2
    assert "in use by another run" in said
    assert "--data" in said
    assert (await now.rpc("eth_chainId")).status == 200
    assert (now.data / "ready.json").exists()


async def test_data_survives_a_restart(kept: dict[str, Service]) -> None:
    before = kept["now"]
    account = await before.new_account("free", "--requests-per-day", "9")
    made = await before.new_key(account["id"], "--scope", "rpc:read")
    gone = await before.new_key(account["id"])
    await before.cli_json("keys", "revoke", gone["id"])
    async with await HttpClient.open(before.port) as client:
        assert await spend(client, made["key"]) >= 9
    accounts, keys = await before.cli_json("accounts", "list"), await before.cli_json("keys", "list")

    after = await again(kept)
    assert after.keys == before.keys
    assert await after.cli_json("accounts", "list") == accounts
    assert await after.cli_json("keys", "list") == keys
    async with await HttpClient.open(after.port) as client:
        assert await spend(client, made["key"]) <= 1
    assert (await send_once(after, post(READ, key=gone["key"]))).status == 401
    write = post(rpc("eth_sendRawTransaction", ["0x00"]), key=made["key"])
    assert (await send_once(after, write)).status == 403


async def test_killed_service_leaves_no_process_and_loses_no_data(kept: dict[str, Service]) -> None:
    before = kept["now"]
    account = await before.new_account()
    made = await before.new_key(account["id"])
    after = await again(kept, by=signal.SIGKILL)
    assert after.keys == before.keys
    assert (await send_once(after, post(READ, key=made["key"]))).status == 200


async def test_fresh_deletes_all_data_and_the_metrics_port_of_the_settings_is_used(
    kept: dict[str, Service], tmp_path: Path
) -> None:
    before = kept["now"]
    await before.new_account()
    (before.data / "notes.txt").write_text("not ours")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "own.toml").write_text(f"[metrics]\nport = {port}\n")
    after = await again(kept, "--fresh", "--config", str(tmp_path / "own.toml"), by=signal.SIGTERM)
    assert after.ready["metrics_url"] == f"http://127.0.0.1:{port}/metrics"
    assert set(after.keys.values()).isdisjoint(before.keys.values())
    assert len(await after.cli_json("accounts", "list")) == 3
    assert (await send_once(after, post(READ, key=before.keys["growth"]))).status == 401
    assert (after.data / "notes.txt").read_text() == "not ours"
    for name in ("keys.json", "pepper", "running.json", "ready.json"):
        assert oct(os.stat(after.data / name).st_mode & 0o777) == "0o600", name
