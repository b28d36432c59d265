"""`penstock transfers export`: the file has the transfers of the chain, in order."""

from __future__ import annotations

import asyncio
import csv
import random
from pathlib import Path
from typing import Any

import pytest

from proxy.chains.evm.address import checksum
from proxy.core.transfer_history import NAMES
from tests.chain_upstream import LittleChain
from tests.follower.harness import NETWORK
from tests.follower.test_backfill import settings_file
from tests.follower.test_coin_transfers import blocks, keeping, trace
from tests.service import command_here


async def export(*arguments: str) -> tuple[int, str]:
    done = await asyncio.to_thread(command_here, "transfers", "export", *arguments)
    return done.returncode, done.stdout + done.stderr


def expected(chain: LittleChain, first: int, last: int) -> list[dict[str, str]]:
    found = []
    for number, block_hash, _, name, index, item, category, contract, *rest in chain.moves(first, last):
        sender, recipient, token, amount = rest
        found.append(
            {
                "block_number": str(number),
                "block_hash": block_hash,
                "tx_hash": name,
                "log_index": "" if category in (1, 2) else str(index),
                "category": NAMES[category],
                "from": checksum(sender),
                "to": checksum(recipient),
                "contract": checksum(contract) if contract else "",
                "token_id": str(token) if category in (721, 1155) else "",
                "value": str(amount),
                "status": "failed" if category == 1 and item else "included",
            }
        )
    return found


def without_time(row: dict[str, Any]) -> dict[str, str]:
    return {name: "" if value is None else str(value) for name, value in row.items() if name != "timestamp"}


async def test_file_has_the_transfers_of_the_chain(database: str, tmp_path: Path) -> None:
    async with keeping(database) as harness:
        harness.chain.mine(*blocks(random.Random(7), 60))
        async with harness.leading() as (follower, term):
            await follower.step(term)
            assert await trace(harness)
        given = ("--config", settings_file(harness, tmp_path / "penstock.toml"), "--chain", NETWORK)
        whole, part = tmp_path / "whole.csv", tmp_path / "part.csv"
        code, output = await export(*given, "--output", str(whole))
        assert code == 0, output
        assert [without_time(row) for row in csv.DictReader(whole.read_text().splitlines())] == expected(
            harness.chain, 0, 60
        )
        assert f"{len(expected(harness.chain, 0, 60)):,} transfers" in output
        code, output = await export(*given, "--output", str(part), "--from", "10", "--to", "20")
        assert [without_time(row) for row in csv.DictReader(part.read_text().splitlines())] == expected(
            harness.chain, 10, 20
        )
        assert sorted(each.name for each in tmp_path.iterdir()) == ["part.csv", "penstock.toml", "whole.csv"]
        code, output = await export(*given, "--output", str(whole))
        assert (code, "exists already" in output) == (2, True), output
        code, output = await export(*given, "--output", str(tmp_path / "x"), "--from", "5", "--to", "4")
        assert (code, "--to 4" in output) == (2, True), output
        await check_parquet(harness.chain, given, tmp_path / "whole.parquet")


async def check_parquet(chain: LittleChain, given: tuple[str, ...], path: Path) -> None:
    """The same rows, or an error that names the missing package."""
    code, output = await export(*given, "--format", "parquet", "--output", str(path))
    try:
        parquet: Any = __import__("pyarrow.parquet").parquet
    except ImportError:
        assert (code, "penstock[export]" in output, path.exists()) == (2, True, False), output
        return
    assert code == 0, output
    assert [without_time(row) for row in parquet.read_table(path).to_pylist()] == expected(chain, 0, 60)


@pytest.mark.parametrize("chain", ["nowhere", "base"])
async def test_network_without_an_index_is_named(database: str, tmp_path: Path, chain: str) -> None:
    async with keeping(database) as harness:
        config = settings_file(harness, tmp_path / "penstock.toml")
        code, output = await export("--config", config, "--chain", chain, "--output", str(tmp_path / "x.csv"))
        assert (code, f"--chain {chain}" in output) == (2, True), output
