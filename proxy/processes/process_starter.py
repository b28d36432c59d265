"""Starts the supervisor's processes: as forks of the fork server, or each as a separate interpreter.

A process starts in milliseconds as a fork, in about a second otherwise. The second way is left where the kernel has no pidfds
(before Linux 5.3, and in some containers), and if the fork server does not start.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO

from proxy.processes.fork_server import ForkRequest
from proxy.processes.fork_server_process import ForkServerLost, ForkServerProcess, start_fork_server
from proxy.processes.supervised_process import ChildProcess
from proxy.tasks import send_signal

log = logging.getLogger("penstock.supervisor")

# A server that dies with a request is replaced, and the request repeated, this often.
ATTEMPTS = 2


class ExecutedProcess:
    """A process that runs a separate interpreter."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.pid = process.pid
        self.stdout = process.stdout
        self._stdin = process.stdin
        self._process = process

    def __repr__(self) -> str:
        return f"<ExecutedProcess {self.pid} {'ended' if self.has_ended else 'running'}>"

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def wait(self) -> None:
        await self._process.wait()

    def write(self, data: bytes) -> None:
        self._stdin.write(data)

    def send_signal(self, number: int) -> None:
        send_signal(self._process, number)


class ProcessStarter:
    """Call `start` any number of times, `renew` before a reload, and at the end `retire` and then `close`."""

    def __init__(
        self, modules: Sequence[str], environment: Mapping[str, str], *, fds: Sequence[int], log_to: Path | None
    ) -> None:
        """`modules`: what the processes import. `fds`: the files that they may inherit."""
        self._modules = modules
        self._environment = environment
        self._fds = fds
        self._log_to = log_to
        self._server: ForkServerProcess | None = None
        # Servers that fork no more and wait for the end of their processes.
        self._retired: list[ForkServerProcess] = []
        self._is_stale = True
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<ProcessStarter {self._server!r}>"

    def renew(self) -> None:
        """Import the code again before the next process starts: it may have changed, or may be compiled now."""
        self._is_stale = True

    async def start(self, request: ForkRequest) -> ChildProcess:
        with self._log() as stderr:
            for _ in range(ATTEMPTS):
                async with self._lock:
                    server = await self._current(stderr)
                    if server is None:
                        break
                    try:
                        return await server.fork(request, stderr)
                    except ForkServerLost as exc:
                        log.warning("starting another fork server", extra={"reason": str(exc)})
                        await self._discard(server)
            return await self._execute(request, stderr)

    async def retire(self) -> None:
        """Start no more processes."""
        async with self._lock:
            if self._server is not None:
                await self._retire(self._server)
                self._server = None

    async def close(self) -> None:
        """Call this when all processes have ended."""
        await asyncio.gather(*(server.end() for server in self._retired))
        self._retired.clear()

    async def _current(self, stderr: BinaryIO | None) -> ForkServerProcess | None:
        if not self._is_stale or not _has_pidfds():
            return self._server
        self._is_stale = False
        try:
            server = await start_fork_server(self._modules, fds=self._fds, environment=self._environment, stderr=stderr)
        except ForkServerLost as exc:
            log.error("the fork server did not start", extra={"reason": str(exc), "keeps_old": bool(self._server)})
            return self._server
        if self._server is not None:
            await self._retire(self._server)
        self._server = server
        return server

    async def _retire(self, server: ForkServerProcess) -> None:
        for each in [each for each in self._retired if each.has_ended]:
            self._retired.remove(each)
            await each.end()
        try:
            await server.retire()
            self._retired.append(server)
        except ForkServerLost:
            await server.kill()

    async def _discard(self, server: ForkServerProcess) -> None:
        """Its processes keep running."""
        self._server = None
        self._is_stale = True
        await server.kill()

    async def _execute(self, request: ForkRequest, stderr: BinaryIO | None) -> ExecutedProcess:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "proxy", *request.words),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            pass_fds=request.fds,
            env=self._environment,
            start_new_session=True,
        )
        return ExecutedProcess(process)

    def _log(self) -> AbstractContextManager[BinaryIO | None]:
        return self._log_to.open("ab") if self._log_to else nullcontext()


def _has_pidfds() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True
