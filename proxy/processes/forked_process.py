"""A process that the fork server has started, seen from the supervisor, which is not its parent."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress


class ForkedProcess:
    """Call `watch` once. The pidfd identifies the process even after its number was given to another one."""

    def __init__(self, pid: int, pidfd: int, stdin: asyncio.WriteTransport, stdout: asyncio.StreamReader) -> None:
        self.pid = pid
        self.stdout = stdout
        self._stdin = stdin
        self._pidfd = pidfd
        self._ended = asyncio.Event()

    def __repr__(self) -> str:
        return f"<ForkedProcess {self.pid} {'ended' if self.has_ended else 'running'}>"

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def watch(self) -> None:
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_end)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        # The first process of a container inherits the children of a fork server that has died.
        with suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        self._stdin.close()
        self._ended.set()

    async def wait(self) -> None:
        await self._ended.wait()

    def write(self, data: bytes) -> None:
        self._stdin.write(data)

    def send_signal(self, number: int) -> None:
        if not self.has_ended:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)
