"""Foreign programs as children that never outlive us.

A child has a session of its own, so that Ctrl-C reaches only us and we end everything in order; the kernel signals it when
we die (PR_SET_PDEATHSIG), so that not even SIGKILL leaves an orphan. Its output goes to a file.
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
from proxy.tasks import tell

log = logging.getLogger("penstock.dev")

PR_SET_PDEATHSIG = 1
# A log file larger than this is begun anew at the next start.
MAX_LOG_BYTES = 10 * 1024 * 1024
PROBE_S = 0.05
# Before a child that died is started again: the kernel may have to clean up after it.
RESTART_S = 0.3
LONGEST_RESTART_S = 5.0

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """How a child is run, how it says that it is ready, and how it is asked to end."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    is_ready: Callable[[], Awaitable[bool]]
    ready_within_s: float
    stop_signal: signal.Signals
    log_file: Path
    before_exec: Callable[[], None] | None = None


class Child:
    """A program kept running: started again when it dies, until it is stopped."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.process: asyncio.subprocess.Process | None = None

    def __repr__(self) -> str:
        running = self.process is not None and self.process.returncode is None
        return f"<Child {self.program.name} {'running' if running else 'stopped'}>"

    async def start(self) -> None:
        """Return when it is ready; StartError, with the end of its log, when it never is."""
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

    async def keep(self, again: Callable[[], Awaitable[None]] | None = None) -> None:
        """Supervised: whenever the child dies, start it again, and do what makes it whole; after a failure more patiently."""
        pause_s = RESTART_S
        while True:
            assert self.process is not None
            code = await self.process.wait()
            log.error("%s ended (%s): starting it again; its log is %s", self.program.name, code, self.program.log_file)
            await asyncio.sleep(pause_s)
            try:
                await self.start()
                if again is not None:
                    await again()
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
            tell(process, number)
            with suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await process.wait()
                    return


def die_with_parent(number: signal.Signals) -> None:
    """For a child, before it becomes its program and after any change of user, at which the kernel forgets the wish."""
    _libc.prctl(PR_SET_PDEATHSIG, int(number))


def inherited_environment(**more: str) -> dict[str, str]:
    return {**os.environ, **more}
