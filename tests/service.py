"""The service as a user starts it: `python -m proxy dev`, waited for by its ready file."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

ROOT = Path(__file__).resolve().parent.parent
START_S = 90.0


@dataclass
class Service:
    """A running development service and what its ready file says."""

    process: subprocess.Popen[bytes]
    data: Path
    ready: dict[str, Any]
    session: aiohttp.ClientSession = field(repr=False)

    @property
    def base(self) -> str:
        return str(self.ready["base_url"])

    @property
    def keys(self) -> dict[str, str]:
        return dict(self.ready["keys"])

    async def rpc(
        self, method: str, params: Any = (), *, key: str = "enterprise", network: str = "dev/mainnet", **headers: str
    ) -> aiohttp.ClientResponse:
        """One JSON-RPC call; the response with its body read."""
        call = {"jsonrpc": "2.0", "id": 1, "method": method, "params": list(params)}
        return await self.post(f"/rpc/{network}", call, key=key, **headers)

    async def post(
        self, path: str, body: Any, *, key: str | None = "enterprise", **headers: str
    ) -> aiohttp.ClientResponse:
        sent = {"Content-Type": "application/json", **headers}
        if key is not None:
            sent.setdefault("X-API-Key", self.keys.get(key, key))
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        async with self.session.post(self.base + path, data=data, headers=sent) as response:
            await response.read()
            return response

    def cli(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command beside the running service."""
        return command(*words, "--data", str(self.data))

    def worker_pids(self) -> list[int]:
        return sorted(pid for pid, line in _children(self.process.pid) if "worker" in line)

    def child_pid(self, name: str) -> int:
        return next(pid for pid, line in _children(self.process.pid) if name in line)


def command(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "proxy", *words],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _children(pid: int) -> list[tuple[int, str]]:
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(directory.joinpath("stat").read_text().rsplit(")", 1)[1].split()[1])
            line = directory.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, ValueError):
            continue
        if parent == pid:
            found.append((int(directory.name), line))
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def until(condition: Any, *, within_s: float = 15.0, every_s: float = 0.02) -> Any:
    """Wait for a condition (called, awaited if need be) to be true; its value."""
    end = time.monotonic() + within_s
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {within_s} s: {condition}")
        await asyncio.sleep(every_s)


async def start(data: Path, *words: str, env: dict[str, str] | None = None) -> Service:
    """Start the service on any free port and wait until it is ready."""
    data.mkdir(parents=True, exist_ok=True)
    ready_file = data / "ready.json"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "proxy",
            "dev",
            "--port",
            "0",
            "--data",
            str(data),
            "--ready-file",
            str(ready_file),
            *words,
        ],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        await until(lambda: ready_file.exists() or process.poll() is not None, within_s=START_S)
        if process.poll() is not None:
            assert process.stdout is not None
            raise AssertionError(f"the service did not start:\n{process.stdout.read().decode()}")
    except BaseException:
        process.kill()
        raise
    ready = orjson.loads(ready_file.read_bytes())
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    return Service(process, data, ready, session)


async def stop(service: Service, number: signal.Signals = signal.SIGINT) -> int:
    """Ctrl-C, and the exit code; everything that it printed is read, so that it cannot block."""
    await service.session.close()
    if service.process.poll() is None:
        service.process.send_signal(number)
    try:
        await asyncio.to_thread(service.process.communicate, timeout=40)
    except subprocess.TimeoutExpired:
        service.process.kill()
        await asyncio.to_thread(service.process.communicate)
    return int(service.process.returncode)
