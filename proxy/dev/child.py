"""External programs as child processes that never outlive this one.

A child runs in its own session, so that Ctrl-C reaches only the parent, which then stops everything in order. The kernel
signals the child when the parent dies (PR_SET_PDEATHSIG), so that even SIGKILL leaves no orphan. Its output goes to a file.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from proxy.errors import StartError
from proxy.tasks import send_signal

log = logging.getLogger("penstock.dev")

PR_SET_PDEATHSIG = 1
# A log file larger than this is deleted at the next start.
MAX_LOG_BYTES = 10 * 1024 * 1024
PROBE_S = 0.05
# Pause before a restart, so that the kernel can free the resources of the ended child.
RESTART_S = 0.3
LONGEST_RESTART_S = 5.0

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """How to run a child, check that it is ready, and stop it."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    is_ready: Callable[[], Awaitable[bool]]
    ready_within_s: float
    stop_signal: signal.Signals
    log_file: Path
    before_exec: Callable[[], None] | None = None


class Child:
    """A program that is restarted when it ends, until it is stopped."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.process: asyncio.subprocess.Process | None = None

    def __repr__(self) -> str:
        running = self.process is not None and self.process.returncode is None
        return f"<Child {self.program.name} {'running' if running else 'stopped'}>"

    async def start(self) -> None:
        """Start the program and wait until it is ready; raise StartError with the end of its log if it is not in time."""
        log_file = self.program.log_file
        with suppress(OSError):
            if log_file.stat().st_size > MAX_LOG_BYTES:
                log_file.unlink()
        with log_file.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                *self.program.argv,
                env=self.program.env,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                preexec_fn=self._before_exec,
                start_new_session=True,
            )
        await self._until_ready(self.process)

    def _before_exec(self) -> None:
        if self.program.before_exec is not None:
            self.program.before_exec()
        die_with_parent(self.program.stop_signal)

    async def _until_ready(self, process: asyncio.subprocess.Process) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self.program.ready_within_s):
                while process.returncode is None:
                    if await self.program.is_ready():
                        return
                    await asyncio.sleep(PROBE_S)
        await self.stop()
        raise StartError([f"{self.program.name} did not start; the end of {self.program.log_file}:\n{self._log_end()}"])

    def _log_end(self) -> str:
        with suppress(OSError):
            return "\n".join(self.program.log_file.read_text("utf-8", "replace").splitlines()[-15:])
        return ""

    async def keep_running(self, after_restart: Callable[[], Awaitable[None]] | None = None) -> None:
        """Restart the child whenever it ends, and call `after_restart`; after failures with growing pauses. Supervised."""
        pause_s = RESTART_S
        while True:
            assert self.process is not None
            code = await self.process.wait()
            log.error(
                "%s exited with status %s; restarting it (log: %s)", self.program.name, code, self.program.log_file
            )
            await asyncio.sleep(pause_s)
            try:
                await self.start()
                if after_restart is not None:
                    await after_restart()
                pause_s = RESTART_S
            except StartError as failed:
                log.error("%s", failed)
                await self.stop()
                pause_s = min(pause_s * 2, LONGEST_RESTART_S)

    async def stop(self, within_s: float = 10.0) -> None:
        process = self.process
        if process is None or process.returncode is not None:
            return
        for number in (self.program.stop_signal, signal.SIGKILL):
            send_signal(process, number)
            with suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await process.wait()
                    return


def die_with_parent(number: signal.Signals) -> None:
    """Have the kernel signal this process when its parent dies.

    Call it in the child before exec, and after any change of user, which resets it.
    """
    _libc.prctl(PR_SET_PDEATHSIG, int(number))


def inherited_environment(**more: str) -> dict[str, str]:
    return {**os.environ, **more}
