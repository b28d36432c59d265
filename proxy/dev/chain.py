"""The development chain: a Hardhat node, run with the Node.js from its npm packages."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import aiohttp

from proxy.dev.child import Child, Program, inherited_environment
from proxy.dev.npm_packages import DEVNET, node_binary

CHAIN_ID = "0x7a69"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def development_chain(state_dir: Path, log_file: Path, home: Path = DEVNET) -> tuple[Child, str]:
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
            *(str(node_binary(home)), str(home / "node_modules/hardhat/dist/src/cli.js")),
            *("--config", str(home / "hardhat.config.mjs"), "node", "--hostname", "127.0.0.1", "--port", str(port)),
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
