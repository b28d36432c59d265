"""`init` writes a settings file that `check` accepts."""

from __future__ import annotations

import os
import pty
import stat
import subprocess
import sys
from io import FileIO
from pathlib import Path

from proxy import settings
from tests.service import ROOT, command_here

DATABASE = "postgresql://me@db.example/penstock"


def test_file_is_complete_private_and_has_fresh_secrets(tmp_path: Path) -> None:
    files = [tmp_path / "one.toml", tmp_path / "two.toml"]
    for file in files:
        words = ("--database", DATABASE, "--upstream", 'ethereum/mainnet=https://node.example/"key"')
        done = command_here("init", str(file), *words)
        assert (done.returncode, done.stderr) == (0, "")
        assert "database.url" not in done.stdout
        assert f"then python -m proxy check --config {file} --connect" in done.stdout
        assert f"python -m proxy serve --config {file}\n" in file.read_text()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    one, two = (settings.load(file, environ={}) for file in files)
    assert one.database.url == DATABASE
    assert one.upstreams[0].url == 'https://node.example/"key"'
    assert len({one.keys.pepper, two.keys.pepper, one.webhooks.secret_key, two.webhooks.secret_key}) == 4


def test_quiet_check_prints_only_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    command_here("init", str(file), "--database", DATABASE, "--upstream", "ethereum/mainnet=https://node.example/")
    done = command_here("check", "--offline", "--quiet", "--config", str(file))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    file.write_text(file.read_text() + "\n[log]\nlevel = 'loud'\n")
    done = command_here("check", "--offline", "--quiet", "--config", str(file))
    assert (done.returncode, done.stdout) == (2, "")
    assert "log.level" in done.stderr


def test_file_without_upstreams_says_how_to_add_them(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    done = command_here("init", str(file))
    assert done.returncode == 0
    assert "it has no upstreams yet" in done.stdout
    assert f"set database.url in {file} to the address of yours" in done.stdout
    settings.load(file, environ={})
    assert "# [[upstreams]]" in file.read_text()


def test_own_chain_is_known_by_its_directory(tmp_path: Path) -> None:
    (tmp_path / "chains").mkdir()
    shipped = (settings.CONFIG / "chains" / "zora.toml").read_text()
    own = shipped.replace('"zora"', '"mychain"').replace("7777777", "424242").replace("999999999", "424243")
    (tmp_path / "chains" / "mychain.toml").write_text(own)
    file, node = tmp_path / "penstock.toml", "mychain/mainnet=https://node.example/"
    done = command_here("init", str(file), "--upstream", node)
    assert (done.returncode, done.stderr) == (
        2, "penstock: --upstream: there is no network mychain/mainnet; did you mean hychain/mainnet?\n"
    )  # fmt: skip
    done = command_here("init", str(file), "--upstream", node, "--directory", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    written, tables = settings.load_with_tables(file, environ={})
    assert written.upstreams[0].network == "mychain/mainnet"
    assert tables.chains.find("mychain", "mainnet") is not None


def test_missing_answers_are_requested_on_a_terminal(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "r+b", buffering=0) as terminal:
        asking = subprocess.Popen(
            [sys.executable, "-m", "proxy", "init", str(file)], cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        terminal.write(
            f"{DATABASE}\nethereum/mainnet=https://node.example/\nbase/mainnet=https://base.example/\n\n".encode()
        )
        printed = shown(terminal)
        assert asking.wait(60) == 0, printed
    assert "Postgres URL" in printed
    written = settings.load(file, environ={})
    assert written.database.url == DATABASE
    assert [each.network for each in written.upstreams] == ["ethereum/mainnet", "base/mainnet"]


def shown(terminal: FileIO) -> str:
    """The output of a program on a terminal, up to its end."""
    output = b""
    try:
        while part := terminal.read(4096):
            output += part
    except OSError:  # The program has ended: the other side is closed.
        pass
    return output.decode()


def test_existing_file_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text("mine")
    done = command_here("init", str(file))
    assert done.returncode == 2
    assert "exists already" in done.stderr
    assert file.read_text() == "mine"


def test_unknown_network_is_refused_with_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    done = command_here("init", str(file), "--upstream", "etherum/mainnet=https://node.example")
    assert done.returncode == 2
    assert "did you mean ethereum/mainnet?" in done.stderr
    assert "write CHAIN/NETWORK=URL" in command_here("init", str(file), "--upstream", "mainnet").stderr
    assert not file.exists()
