"""Runs `python -m proxy serve` like an operator, with its own Postgres, settings file and log."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from tests.service import ROOT, end_with_the_tests, until, workers_of

PEPPER = "canary-pepper-0123456789-0123456789"
READY_S = 120.0


# Lets the service connect to servers of the test.
OPEN_EGRESS = """\
[egress]
allow = ["127.0.0.0/8"]
http = true
ports = []"""


def settings_text(database_url: str, upstream_url: str, **server: Any) -> str:
    """Return a minimal settings file with free ports."""
    own = {"port": 0, "workers": 2, "drain_s": 10.0, **server}
    lines = "\n".join(f"{name} = {orjson.dumps(value).decode()}" for name, value in own.items())
    return f"""
[server]
{lines}
[metrics]
port = 0
[follower]
networks = []
[database]
url = "{database_url}"
[keys]
pepper = "{PEPPER}"
[[upstreams]]
network = "ethereum/sepolia"
url = "{upstream_url}"
"""


@dataclass
class Production:
    """A running `serve`."""

    process: subprocess.Popen[bytes]
    log_file: Path
    config: Path
    port: int = 0
    metrics_port: int = 0
    key: str = field(default="", repr=False)

    def log(self) -> list[dict[str, Any]]:
        return [orjson.loads(line) for line in self.log_file.read_bytes().splitlines() if line.startswith(b"{")]

    def said(self, message: str) -> list[dict[str, Any]]:
        return [line for line in self.log() if line["message"] == message]

    def worker_pids(self) -> list[int]:
        return workers_of(self.process.pid)

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


def launch(
    config: Path, log_file: Path, *, role: str = "all", files: tuple[int, int] | None = None, root: Path = ROOT
) -> Production:
    """Start `serve`; `files`: its soft and hard limit on open files; `root`: the directory of its sources."""
    limits = ("prlimit", f"--nofile={files[0]}:{files[1]}") if files else ()
    with log_file.open("wb") as output:
        process = subprocess.Popen(
            [*limits, sys.executable, "-m", "proxy", "serve", "--config", str(config), "--role", role],
            cwd=root,
            env={name: value for name, value in os.environ.items() if name != "DATABASE_URL"},
            stdout=output,
            stderr=output,
            preexec_fn=end_with_the_tests,
        )
    return Production(process, log_file, config)


async def start(config: Path, log_file: Path, key: str, *, role: str = "all", root: Path = ROOT) -> Production:
    running = launch(config, log_file, role=role, root=root)
    running.key = key
    await ready(running)
    return running


async def ready(running: Production) -> None:
    await until(lambda: running.said("serving") or running.process.poll() is not None, within_s=READY_S)
    serving = running.said("serving")
    assert serving, running.log_file.read_text()
    running.port, running.metrics_port = serving[0]["port"], serving[0]["metrics_port"]


async def stop(running: Production) -> int:
    if running.process.poll() is None:
        running.send_signal(signal.SIGTERM)
    return await asyncio.to_thread(running.process.wait, 40.0)


async def failed(config: Path, log_file: Path, within_s: float = 30.0) -> tuple[int, str]:
    """Run a `serve` that refuses to start, and return its exit code and output."""
    running = launch(config, log_file)
    await asyncio.to_thread(running.process.wait, within_s)
    return running.process.returncode, log_file.read_text()
