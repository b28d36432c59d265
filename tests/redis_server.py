"""A real redis-server on a free port. Tests can stop, freeze and restart it."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests import programs
from tests.service import until

PROGRAM = "redis-server"


def require_redis() -> None:
    """Skip the test without redis-server."""
    if programs.find(PROGRAM) is None:
        pytest.skip(f"{PROGRAM} is not installed: run python -m tests.programs")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class RedisServer:
    def __init__(self, directory: Path, *options: str) -> None:
        self._directory = directory
        self._options = options
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def start(self) -> None:
        await self.launch()
        await until(lambda: self.command("PING") == b"+PONG\r\n")

    async def launch(self) -> None:
        """Start the process. It may not accept connections yet."""
        common = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._directory)]
        self._process = await asyncio.to_thread(
            subprocess.Popen, [PROGRAM, *common, *self._options], stdout=subprocess.DEVNULL
        )

    def command(self, *words: str) -> bytes:
        """The server's reply; empty if there is none."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                connection.sendall(" ".join(words).encode() + b"\r\n")
                return connection.recv(65536)
        except OSError:
            return b""

    def size(self) -> int:
        return int(self.command("DBSIZE")[1:] or 0)

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    async def stop(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.send_signal(signal.SIGCONT)
            process.kill()
            await asyncio.to_thread(process.wait)


@asynccontextmanager
async def redis_server(directory: Path, *options: str) -> AsyncIterator[RedisServer]:
    server = RedisServer(directory, *options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
