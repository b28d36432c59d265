"""Starts the service as a user does, with `python -m proxy dev`, and waits for its ready file."""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import aiohttp
import orjson

from proxy.__main__ import main
from proxy.dev.child import die_with_parent
from tests import prepared_cluster

# The output streams belong to the process, so only one thread at a time may redirect them.
_output_lock = threading.Lock()
# Every account needs its own email address.
_serial = itertools.count(1)
ROOT = Path(__file__).resolve().parent.parent
START_S = 150.0
# Changes take effect within a second; the rest is slack for a busy machine.
SOON_S = 15.0


@dataclass
class Service:
    """A running development service and the content of its ready file."""

    process: subprocess.Popen[bytes]
    data: Path
    ready: dict[str, Any]
    session: aiohttp.ClientSession = field(repr=False)
    # For direct calls to the development chain and the bundler.
    nodes: aiohttp.ClientSession = field(repr=False)
    # One open connection to each worker, by process id, and the lock for their use: see tests/http_client.
    clients: dict[int, Any] = field(default_factory=dict, repr=False)
    clients_lock: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)

    @property
    def base(self) -> str:
        return str(self.ready["base_url"])

    @property
    def port(self) -> int:
        return urlsplit(self.base).port or 0

    @property
    def keys(self) -> dict[str, str]:
        return dict(self.ready["keys"])

    async def rpc(
        self, method: str, params: Any = (), *, key: str = "enterprise", network: str = "dev/mainnet", **headers: str
    ) -> aiohttp.ClientResponse:
        """Make one JSON-RPC call; return the response with its body read."""
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

    async def send(self, method: str, path: str, body: Any = None, *, key: str = "enterprise") -> tuple[int, Any]:
        """Send a request of the REST API; return the status and the JSON of the reply."""
        headers = {"X-API-Key": self.keys.get(key, key), "Content-Type": "application/json"}
        data = None if body is None else orjson.dumps(body)
        async with self.session.request(method, self.base + path, data=data, headers=headers) as response:
            return response.status, orjson.loads(await response.read())

    async def get(self, url: str, **headers: str) -> aiohttp.ClientResponse:
        """GET a path from the root of the service, or a full URL."""
        whole = url if url.startswith("http") else self.base.removesuffix("/v1") + url
        async with self.session.get(whole, headers=headers) as response:
            await response.read()
            return response

    async def cli(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command against the running service, in a thread of this process."""
        return await asyncio.to_thread(command_here, *words, "--data", str(self.data))

    async def cli_json(self, *words: str) -> Any:
        """Run a command with --json in this process; return its output."""
        done = await self.cli(*words, "--json")
        assert done.returncode == 0, done.stderr
        return orjson.loads(done.stdout)

    async def new_account(self, plan: str = "free", *words: str) -> dict[str, Any]:
        named = ("--name", "Flow", "--email", f"flow{next(_serial)}@example.com", "--plan", plan)
        account: dict[str, Any] = await self.cli_json("accounts", "create", *named, *words)
        return account

    async def new_key(self, account: str, *words: str) -> dict[str, Any]:
        """Create a key and wait until every worker has it; return its row, with the key itself under `key`."""
        from tests.http_client import is_known_everywhere

        made: dict[str, Any] = await self.cli_json("keys", "create", "--account", account, *words)
        await is_known_everywhere(self, made["key"])
        return made

    def worker_pids(self) -> list[int]:
        return workers_of(self.process.pid)

    def child_pid(self, name: str) -> int:
        return next(pid for pid, line in children(self.process.pid) if name in line)


def command(*words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "proxy", *words],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def command_here(
    *words: str, env: Mapping[str, str] | None = None, typed: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, which takes a tenth of the time of a new one. `typed`: its standard input."""
    with (
        _output_lock,
        patch.dict(os.environ, env or {}),
        patch("sys.stdin", io.StringIO(typed)),
        redirect_stdout(io.StringIO()) as printed,
        redirect_stderr(io.StringIO()) as errors,
    ):
        try:
            code = main(words)
        except SystemExit as exc:  # argparse has printed the usage
            code = int(exc.code or 0)
    return subprocess.CompletedProcess(words, code, printed.getvalue(), errors.getvalue())


# Processes, read from /proc


def _parents() -> Iterable[tuple[int, int]]:
    """Process id and parent id of every process, without zombies. Tests poll this: it must be cheap."""
    for name in os.listdir("/proc"):
        if name.isdecimal() and (stat := _read(int(name), "stat")):
            state, parent = stat.rsplit(b")", 1)[1].split(None, 2)[:2]
            if state != b"Z":
                yield int(name), int(parent)


def _read(pid: int, name: str) -> bytes:
    """A file in /proc; empty if the process has ended."""
    try:
        with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


def _command_line(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")


def children(pid: int) -> list[tuple[int, str]]:
    return [(child, _command_line(child)) for child, parent in _parents() if parent == pid]


def descendants(pid: int) -> dict[int, str]:
    """All descendants of a process, in any session, with their command lines."""
    below: dict[int, list[int]] = {}
    for child, parent in _parents():
        below.setdefault(parent, []).append(child)
    found: dict[int, str] = {}
    todo = [pid]
    while todo:
        for child in below.get(todo.pop(), ()):
            found[child] = _command_line(child)
            todo.append(child)
    return found


def workers_of(supervisor: int) -> list[int]:
    return processes_named("worker", supervisor)


def processes_named(command: str, supervisor: int) -> list[int]:
    """The supervisor's processes that run an internal command. The fork server is between."""
    return sorted(pid for pid, line in descendants(supervisor).items() if f" -m proxy {command} " in line)


# In the environment of the service and so of every process that it starts: its data directory.
RUN = "RUN_OF_TEST"


def processes_of(data: Path) -> list[int]:
    """All processes that runs on this data directory have started, directly or not, and that still run."""
    mark = f"{RUN}={data}".encode()
    return [pid for pid, _ in _parents() if mark in _read(pid, "environ").split(b"\0")]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def owner_of(server_port: int, client_port: int, pids: Iterable[int]) -> int | None:
    """The process that holds the server's end of a connection; None while it is in the kernel's accept queue."""
    inode = ""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        parts = line.split()
        ends = [int(end.rsplit(":", 1)[1], 16) for end in parts[1:3]]
        if ends == [server_port, client_port]:
            inode = parts[9]
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                if os.readlink(link) == f"socket:[{inode}]":
                    return pid
            except OSError:
                continue
    return None


async def until(condition: Any, *, within_s: float = 45.0, every_s: float = 0.02) -> Any:
    """Wait until the condition, a function or coroutine function, returns a true value; return that value."""
    end = time.monotonic() + within_s
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not true within {within_s} s: {condition}")
        await asyncio.sleep(every_s)


async def holds(condition: Callable[[], object], *, for_s: float, every_s: float = 0.01) -> None:
    """Fail at the first moment within this time at which the condition is not true."""
    end = time.monotonic() + for_s
    while (now := time.monotonic()) < end:
        assert condition(), f"not true {end - now:.3f} s before the end: {condition}"
        await asyncio.sleep(every_s)
    assert condition()


# Starting and stopping


def launch(
    data: Path, *words: str, env: Mapping[str, str] | None = None, bundler: bool = False
) -> subprocess.Popen[bytes]:
    """Start the service on a free port, without waiting for it. The bundler is optional, since it takes seconds to start."""
    data.mkdir(parents=True, exist_ok=True)
    port = () if "--port" in words else ("--port", "0")
    ready = ("--ready-file", str(data / "ready.json"), *(() if bundler else ("--no-bundler",)))
    return subprocess.Popen(
        [sys.executable, "-m", "proxy", "dev", *port, "--data", str(data), *ready, *words],
        cwd=ROOT,
        env={**os.environ, RUN: str(data), **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=end_with_the_tests,
    )


def end_with_the_tests() -> None:
    """For a process that a test starts: an aborted run must leave nothing behind."""
    die_with_parent(signal.SIGTERM)


def node_session() -> aiohttp.ClientSession:
    """A session with a connection for each request. Node.js closes idle ones, and a call sent at that moment fails."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))


async def start(data: Path, *words: str, env: Mapping[str, str] | None = None, bundler: bool = False) -> Service:
    """Start the service and wait until it is ready. In a new directory it finds a migrated database."""
    ready_file = data / "ready.json"
    ready_file.unlink(missing_ok=True)  # A killed run leaves its file behind.
    if not data.exists() or not any(data.iterdir()):
        await prepared_cluster.copy_to(data / "postgres")
    process = launch(data, *words, env=env, bundler=bundler)
    try:
        await until(lambda: ready_file.exists() or process.poll() is not None, within_s=START_S)
        if process.poll() is not None:
            assert process.stdout is not None
            raise AssertionError(f"the service did not start:\n{process.stdout.read().decode()}")
    except BaseException:
        process.kill()
        process.communicate()
        raise
    ready = orjson.loads(ready_file.read_bytes())
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    return Service(process, data, ready, session, node_session())


async def stop(service: Service, number: signal.Signals = signal.SIGINT) -> int:
    """Send Ctrl-C and return the exit code. All output is read, so that the process cannot block on it."""
    await service.session.close()
    await service.nodes.close()
    for client in service.clients.values():
        await client.close()
    if service.process.poll() is None:
        service.process.send_signal(number)
    return (await finished(service.process, within_s=40.0))[0]


async def finished(process: subprocess.Popen[bytes], *, within_s: float = 20.0) -> tuple[int, str]:
    """The exit code and all output. A process that does not exit in time is killed, which fails the test."""
    try:
        printed, _ = await asyncio.to_thread(process.communicate, timeout=within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        printed, _ = await asyncio.to_thread(process.communicate)
        raise AssertionError(f"the process did not exit within {within_s} s:\n{printed.decode()}") from None
    return process.returncode, printed.decode()
