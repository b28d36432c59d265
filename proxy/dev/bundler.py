"""The bundler of the development chain: Alto, run with the Node.js from the chain's npm packages."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

import aiohttp

from proxy.dev.chain import free_port
from proxy.dev.child import Child, Program
from proxy.dev.funded_accounts import BUNDLER_EXECUTOR, BUNDLER_UTILITY
from proxy.dev.npm_packages import DEVNET, node_binary

# Paths in the directory of the development chain.
_ALTO = "bundler/node_modules/@pimlico/alto/esm/cli/alto.js"
_LOOPBACK = "bundler/loopback.cjs"
MISSING = "not installed: run `make run`, or `npm ci --ignore-scripts --legacy-peer-deps` in config/devnet/bundler"
# Alto also reads options from the environment and from a .env file in the working directory: neither must reach it.
_OWN = {"OTEL_SDK_DISABLED": "true", "DOTENV_CONFIG_PATH": os.devnull, "NO_COLOR": "1"}
_FOREIGN = ("ALTO_", "SENTRY_", "NODE_OPTIONS")


def is_installed(home: Path) -> bool:
    return (home / _ALTO).exists()


def bundler(chain_url: str, entry_points: Iterable[str], log_file: Path, home: Path = DEVNET) -> tuple[Child, str]:
    """Return the child and its URL. Start it only after the contracts are deployed."""
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
        # Safe mode needs a JavaScript tracer, which the development chain lacks.
        "safe-mode": "false",
        "block-time": "1000",
        "log-level": "warn",
    }
    program = Program(
        name="bundler",
        argv=(
            *(str(node_binary(home)), "--require", str(home / _LOOPBACK), str(home / _ALTO)),
            *(word for name, value in options.items() for word in (f"--{name}", value)),
        ),
        env={name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)} | _OWN,
        is_ready=answers,
        ready_within_s=60.0,
        stop_signal=signal.SIGTERM,
        log_file=log_file,
    )
    return Child(program), url
