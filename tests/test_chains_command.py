"""`chains` lists networks and writes the file of a new chain."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

from proxy import settings
from tests.rpc_upstreams import Chain, ScriptedUpstream, scripted
from tests.service import command_here

OWN_ID = 424242
MULTICALL = "0xcA11bde05977b3631167028862bE2a173976CA11"


class OwnChain(Chain):
    """A chain with a block every two seconds."""

    def block(self, number: int) -> dict[str, Any]:
        return {**super().block(number), "timestamp": hex(1_700_000_000 + 2 * number), "baseFeePerGas": "0x7"}


class OwnNode(ScriptedUpstream):
    def _eth_getCode(self, params: list[Any]) -> str:
        return "0x60" if params[0] == MULTICALL else "0x"


async def run(*words: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(command_here, "chains", *words)


async def test_file_of_a_new_chain_has_the_facts_of_its_node(tmp_path: Path) -> None:
    async with scripted(1, OwnChain(identity=str(OWN_ID)), OwnNode) as (node,):
        words = ("--upstream", node.url, "--name", "mine", "--symbol", "MINE", "--directory", str(tmp_path))
        done = await run("add", str(OWN_ID), *words)
        again = await run("add", str(OWN_ID), *words)
        wrong = await run("add", "7", "--upstream", node.url, "--name", "other", "--directory", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert 'network = "mine/mainnet"' in done.stdout
    assert f'directory = "{tmp_path}"' in done.stdout
    found = settings.load_tables(own=str(tmp_path)).chains.find("mine", "mainnet")
    assert found is not None
    assert (found.facts.chain_id, found.facts.block_time_s, found.facts.legacy_fees) == (OWN_ID, 2.0, False)
    assert (found.chain.native.symbol, found.chain.multicall, found.chain.entry_points) == ("MINE", MULTICALL, {})
    assert again.returncode == 2
    assert "exists already" in again.stderr
    assert wrong.returncode == 1
    assert f"the node's chain id is {OWN_ID}, not 7" in wrong.stderr
    assert not (tmp_path / "chains" / "other.toml").exists()


async def test_block_time_of_a_short_chain_is_measured_without_its_first_block(tmp_path: Path) -> None:
    class YoungChain(OwnChain):
        def block(self, number: int) -> dict[str, Any]:
            return {**super().block(number), **({"timestamp": "0x0"} if number == 0 else {})}

    times = {}
    for name, head, words in (
        ("eight", 8, ()),
        ("one", 1, ()),
        ("none", 0, ()),
        ("given", 8, ("--block-time", "0.25")),
    ):
        async with scripted(1, YoungChain(identity=str(OWN_ID), head=head), OwnNode) as (node,):
            more = ("--upstream", node.url, "--name", name, "--directory", str(tmp_path / name))
            done = await run("add", str(OWN_ID), *more, *words)
        assert (done.returncode, done.stderr) == (0, "")
        found = settings.load_tables(own=str(tmp_path / name)).chains.find(name, "mainnet")
        assert found is not None
        times[name] = found.facts.block_time_s
    assert times == {"eight": 2.0, "one": 12.0, "none": 12.0, "given": 0.25}


async def test_invalid_name_writes_no_file(tmp_path: Path) -> None:
    async with scripted(1, OwnChain(identity=str(OWN_ID)), OwnNode) as (node,):
        done = await run("add", str(OWN_ID), "--upstream", node.url, "--name", "Mine", "--directory", str(tmp_path))
    assert done.returncode == 2
    assert "Mine.toml: name" in done.stderr
    assert not list((tmp_path / "chains").iterdir())


async def test_known_chain_is_not_added_again(tmp_path: Path) -> None:
    done = await run("add", "1", "--upstream", "http://127.0.0.1:1", "--name", "mine", "--directory", str(tmp_path))
    assert done.returncode == 2
    assert "chain id 1 is ethereum/mainnet, which is known already: add an upstream for it" in done.stderr


async def test_list_includes_every_network() -> None:
    done = await run("list")
    assert "ethereum/sepolia" in done.stdout
    assert "solana/mainnet" in done.stdout
