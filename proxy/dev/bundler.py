"""The bundler beside the development chain: alto, on the Node.js that the chain's npm packages bring."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

import aiohttp

from proxy.dev.accounts import BUNDLER_EXECUTOR, BUNDLER_UTILITY
from proxy.dev.chain import DEVNET, free_port, node_binary
from proxy.dev.child import Child, Program

BUNDLER = DEVNET / "bundler"
_ALTO = BUNDLER / "node_modules/@pimlico/alto/esm/cli/alto.js"
MISSING = f"not installed: run `make run`, or `npm ci --ignore-scripts --legacy-peer-deps` in {BUNDLER}"
# It reads options from variables with its prefix, and a file of them in the directory where it is started.
_OWN = {"OTEL_SDK_DISABLED": "true", "DOTENV_CONFIG_PATH": os.devnull, "NO_COLOR": "1"}
_FOREIGN = ("ALTO_", "SENTRY_", "NODE_OPTIONS")


def is_installed() -> bool:
    return _ALTO.exists()


def bundler(chain_url: str, entry_points: Iterable[str], log_file: Path) -> tuple[Child, str]:
    """The child, and the address that it will answer on. The chain must have its contracts before it is started."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    async def answers() -> bool:
        call = {"jsonrpc": "2.0", "id": 1, "method": "eth_supportedEntryPoints", "params": []}
        try:
            async with aiohttp.ClientSession() as session, session.post(url, json=call) as response:
                return bool((await response.json()).get("result"))
        except (aiohttp.ClientError, OSError, ValueError):
            return False

    options = {
        "port": str(port),
        "rpc-url": chain_url,
        "entrypoints": ",".join(entry_points),
        "executor-private-keys": BUNDLER_EXECUTOR.private_key,
        "utility-private-key": BUNDLER_UTILITY.private_key,
        "min-executor-balance": "0",
        # Needs a tracer in JavaScript, which the development chain has not.
        "safe-mode": "false",
        "block-time": "1000",
        "log-level": "warn",
    }
    program = Program(
        name="bundler",
        argv=(
            *(str(node_binary()), "--require", str(BUNDLER / "loopback.cjs"), str(_ALTO)),
            *(word for name, value in options.items() for word in (f"--{name}", value)),
        ),
        env={name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)} | _OWN,
        is_ready=answers,
        ready_within_s=60.0,
        stop_signal=signal.SIGTERM,
        log_file=log_file,
    )
    return Child(program), url
