"""A process under the supervisor, a worker or a part, seen from the supervisor.

It is tied to its supervisor by standard input. It reads its settings from there, and stops at end of file, so killing the
supervisor leaves no orphan. It writes one line to standard output when it is ready, and from then on a heartbeat.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from typing import Protocol

import orjson

from proxy.settings import Certificates, Settings

log = logging.getLogger("penstock.supervisor")

# Loading 100,000 keys takes about a second; a database that is just coming up takes a few.
READY_TIMEOUT_S = 60.0
# Added to the drain time before a process is killed.
STOP_GRACE_S = 5.0
READY = b"ready\n"
# Sent by the process's event loop, this often.
BEAT, BEAT_S = b".", 0.25
# How often silence is measured. The supervisor counts these steps instead of reading the clock: if the whole machine was
# paused, no process has been silent for long.
STEP_S = 0.5
# A process that is silent for this long may be busy or hang: other workers accept its new connections meanwhile.
QUIET_S = 1.0


class WorkerFailed(Exception):
    """A worker or part ended before it was ready."""


class ChildProcess(Protocol):
    """A process that this one has started, itself or through the fork server."""

    pid: int
    stdout: asyncio.StreamReader

    @property
    def has_ended(self) -> bool: ...

    async def wait(self) -> None: ...

    def write(self, data: bytes) -> None: ...

    def send_signal(self, number: int) -> None:
        """Do nothing if the process has ended."""


class SupervisedProcess:
    """A running process, worker or part, and the settings that it was started with."""

    def __init__(
        self,
        process: ChildProcess,
        settings: Settings,
        *,
        name: str = "worker",
        certificates: Certificates | None = None,
    ) -> None:
        self._process = process
        self.certificates = certificates
        self.name = name
        self._is_stopping = False
        # How long the process has been silent, in whole steps.
        self._silent_s = 0.0
        self.settings = settings
        self.pid = process.pid
        self.began = time.monotonic()

    def __repr__(self) -> str:
        return f"<SupervisedProcess {self.name} {self.pid} {'ended' if self.has_ended else 'running'}>"

    async def ready(self) -> None:
        """Send the process its settings and wait until it is ready; kill it if it does not report in time."""
        self._process.write(orjson.dumps(self.settings.tree) + b"\n")
        if self.certificates is not None:
            self._process.write(self.certificates.line())
        line = b""
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                line = await self._process.stdout.readline()
        except TimeoutError:
            pass
        finally:
            if line != READY:
                self._process.send_signal(signal.SIGKILL)
                await self._process.wait()
        if line != READY:
            raise WorkerFailed(f"{self.name} {self.pid} ended before it was ready")

    async def ended(self) -> None:
        await self._process.wait()

    @property
    def has_ended(self) -> bool:
        return self._process.has_ended

    @property
    def responds(self) -> bool:
        return not self.has_ended and self._silent_s < QUIET_S

    async def hung(self, on_change: Callable[[], None]) -> None:
        """Return when the process has sent no heartbeat for `server.worker_timeout_s`, or has ended.

        `on_change` is called when `responds` has changed meanwhile.
        """
        while self._silent_s < self.settings.server.worker_timeout_s and not self.has_ended:
            responded = self.responds
            self._silent_s = 0.0 if await self._is_heard() else self._silent_s + STEP_S
            if self.responds != responded:
                if not self.has_ended:
                    log.warning(
                        f"{self.name} {'responds again' if self.responds else 'is late'}", extra={"worker": self.pid}
                    )
                on_change()

    def send(self, line: bytes) -> None:
        """Write to the process's standard input, unless it has ended."""
        if not self.has_ended:
            self._process.write(line)

    async def _is_heard(self) -> bool:
        """Whether a heartbeat arrives within one step."""
        try:
            async with asyncio.timeout(STEP_S):
                if await self._process.stdout.read(4096):
                    return True
        except TimeoutError:
            return False
        await self._process.wait()
        return False

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    async def stop(self) -> None:
        """Send SIGTERM once, which drains the process, and kill it after the deadline."""
        if not self._is_stopping:
            self._is_stopping = True
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self.settings.server.drain_s + STOP_GRACE_S):
                await self._process.wait()
        except TimeoutError:
            log.warning(f"{self.name} killed after its drain deadline", extra={"worker": self.pid})
            self._process.send_signal(signal.SIGKILL)
            await self._process.wait()
