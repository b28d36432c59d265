"""`init` writes a settings file that `check` accepts."""

from __future__ import annotations

import stat
from pathlib import Path

from proxy import settings
from tests.service import command_here

DATABASE = "postgresql://me@db.example/penstock"


def test_file_is_complete_private_and_has_fresh_secrets(tmp_path: Path) -> None:
    files = [tmp_path / "one.toml", tmp_path / "two.toml"]
    for file in files:
        words = ("--database", DATABASE, "--upstream", 'ethereum/mainnet=https://node.example/"key"')
        done = command_here("init", str(file), *words)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"then python -m proxy check --config {file} --connect" in done.stdout
        assert f"python -m proxy serve --config {file}\n" in file.read_text()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    one, two = (settings.load(file, environ={}) for file in files)
    assert one.database.url == DATABASE
    assert one.upstreams[0].url == 'https://node.example/"key"'
    assert len({one.keys.pepper, two.keys.pepper, one.webhooks.secret_key, two.webhooks.secret_key}) == 4


def test_file_without_upstreams_says_how_to_add_them(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    done = command_here("init", str(file))
    assert done.returncode == 0
    assert "it has no upstreams yet" in done.stdout
    settings.load(file, environ={})
    assert "# [[upstreams]]" in file.read_text()


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
