"""Token lists in the configuration: logos by chain and address, and all faults of all files reported."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.errors import StartError
from proxy.settings import CONFIG, load_tables

ADDRESS = "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The configuration, with no token lists in it."""
    shutil.copytree(CONFIG, tmp_path / "config", ignore=shutil.ignore_patterns("devnet", "tokens"))
    (tmp_path / "config" / "tokens").mkdir()
    return tmp_path / "config"


def write(config: Path, name: str, *tokens: dict[str, Any]) -> None:
    (config / "tokens" / name).write_bytes(orjson.dumps({"name": "A list", "version": {"major": 1}, "tokens": tokens}))


def token(logo: str | None = "https://example.com/a.png", **more: Any) -> dict[str, Any]:
    return {"chainId": 1, "address": ADDRESS, "symbol": "A", **({"logoURI": logo} if logo else {}), **more}


def test_logos_are_found_by_chain_and_address_and_the_last_list_wins(config: Path) -> None:
    write(config, "a.json", token(), token("ipfs://bafy/b.png", chainId=137), token(None, chainId=10))
    write(config, "b.json", token("https://example.com/b.png", address=ADDRESS.upper().replace("X", "x")))
    mint = "EPjFWdd5AufqSSqeM2qN1xzybapC8G4wEGGkZwyTDt1v"
    write(config, "c.json", token(chainId=101, address=mint))
    assert load_tables(config).logos == {
        (1, ADDRESS.lower()): "https://example.com/b.png",
        (137, ADDRESS.lower()): "ipfs://bafy/b.png",
        (101, mint): "https://example.com/a.png",
    }


def test_every_fault_is_named_with_its_file(config: Path) -> None:
    write(config, "a.json", token("javascript:alert(1)"))
    write(config, "b.json", token(address="0x12"))
    (config / "tokens" / "c.json").write_text("{")
    (config / "tokens" / "d.json").write_text("[]")
    with pytest.raises(StartError) as raised:
        load_tables(config)
    assert [fault.split(":")[0] for fault in raised.value.faults] == ["a.json", "b.json", "c.json", "d.json"]


def test_shipped_lists_are_read() -> None:
    assert len(load_tables().logos) >= 5
