"""Libraries, tools and wallets that are given a URL with a key in it, and nothing else. Each runs unmodified."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.dev.npm_packages import DEVNET, node_binary
from tests.client_scripts import ENVIRONMENT, run_script
from tests.guide_pages import installed
from tests.service import Service

RUN_S = 60.0
SCRIPTED = (
    "viem",
    "viem batches",
    "viem socket",
    "ethers",
    "ethers socket",
    "wagmi",
    "alchemy-sdk",
    "metamask",
    "web3.py",
)
HARDHAT_CONFIG = """
import { defineConfig } from "hardhat/config";
export default defineConfig({ networks: { penstock: { type: "http", url: process.env.RPC_URL } } });
"""
HARDHAT_SCRIPT = """
import { network } from "hardhat";
const { provider } = await network.connect("penstock");
const ask = async (method, params = []) => String(BigInt(await provider.request({ method, params })));
const balance = await ask("eth_getBalance", [process.env.ADDRESS, "latest"]);
console.log(JSON.stringify([await ask("eth_chainId"), await ask("eth_blockNumber"), balance]));
"""


def task_of(service: Service) -> dict[str, Any]:
    key = service.keys["growth"]
    return {
        "url": f"{service.base}/rpc/dev/mainnet/{key}",
        "socket_url": f"{service.ready['ws_url']}/v1/ws/dev/mainnet/{key}",
        "address": service.ready["funded_account"]["address"],
    }


async def expected(service: Service) -> dict[str, int]:
    """The same values from the chain itself."""

    async def ask(method: str, *params: str) -> int:
        call = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        async with service.nodes.post(service.ready["upstream_url"], data=orjson.dumps(call)) as response:
            return int((await response.json())["result"], 16)

    address = service.ready["funded_account"]["address"]
    balance = await ask("eth_getBalance", address, "latest")
    return {"chain_id": 31337, "block": await ask("eth_blockNumber"), "balance": balance}


def same(seen: dict[str, int], before: dict[str, int], after: dict[str, int]) -> bool:
    """Other tests may send transactions meanwhile."""
    is_between = before["block"] <= seen["block"] <= after["block"]
    return seen["chain_id"] == 31337 and is_between and seen["balance"] in (before["balance"], after["balance"])


@pytest.mark.parametrize("client", SCRIPTED)
async def test_library_works_with_only_a_url(service: Service, client: str) -> None:
    before = await expected(service)
    file = "url_only.py" if client == "web3.py" else "url_only.mjs"
    seen = await asyncio.to_thread(run_script, file, {"client": client, **task_of(service)}, within_s=RUN_S)
    assert same(seen, before, await expected(service)), (before, seen)


async def test_metamask_takes_a_url_with_a_password(service: Service) -> None:
    """It sends the user name and password of the URL as Basic authentication."""
    before, task = await expected(service), task_of(service)
    url = f"{service.base}/rpc/dev/mainnet".replace("://", f"://penstock:{service.keys['growth']}@")
    seen = await asyncio.to_thread(
        run_script, "url_only.mjs", {**task, "client": "metamask", "url": url}, within_s=RUN_S
    )
    assert same(seen, before, await expected(service)), (before, seen)


@pytest.mark.skipif(installed("cast") is None, reason="npm has no cast for this architecture")
async def test_cast_works_with_only_a_url(service: Service) -> None:
    cast, task = installed("cast"), task_of(service)
    before = await expected(service)

    async def ask(*words: str) -> int:
        argv = [str(cast), *words, "--rpc-url", task["url"]]
        done = await asyncio.to_thread(
            subprocess.run, argv, env=ENVIRONMENT, capture_output=True, text=True, timeout=RUN_S, check=True
        )
        return int(done.stdout)

    seen = {
        "chain_id": await ask("chain-id"),
        "block": await ask("block-number"),
        "balance": await ask("balance", task["address"]),
    }
    assert same(seen, before, await expected(service)), (before, seen)


async def test_hardhat_works_with_only_a_url(service: Service, tmp_path: Path) -> None:
    task, before = task_of(service), await expected(service)
    (tmp_path / "node_modules").symlink_to(DEVNET / "node_modules")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "hardhat.config.mjs").write_text(HARDHAT_CONFIG)
    (tmp_path / "ask.mjs").write_text(HARDHAT_SCRIPT)
    hardhat = DEVNET / "node_modules" / ".bin" / "hardhat"
    done = await asyncio.to_thread(
        subprocess.run,
        [
            str(node_binary()),
            str(hardhat.resolve()),
            "--config",
            "hardhat.config.mjs",
            "run",
            "--no-compile",
            "ask.mjs",
        ],
        cwd=tmp_path,
        env={
            **ENVIRONMENT,
            "RPC_URL": task["url"],
            "ADDRESS": task["address"],
            "HARDHAT_DISABLE_TELEMETRY_PROMPT": "true",
        },
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    chain_id, block, balance = map(int, json.loads(done.stdout.splitlines()[-1]))
    seen = {"chain_id": chain_id, "block": block, "balance": balance}
    assert same(seen, before, await expected(service)), (before, seen)
