"""Background tasks of a process: named loops that restart after a failure, and work that a stop event cancels.

Only this module creates bare tasks, except for connections that `wire` opens and supervises itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, TypeVar

from proxy import telemetry
from proxy.errors import Unavailable

log = logging.getLogger("penstock.process")

# The roles of a machine: whether it runs workers, and which parts (see `background`).
ROLES: dict[str, tuple[bool, tuple[str, ...]]] = {
    "all": (True, ("follower", "deliverer")),
    "gateway": (True, ()),
    "follower": (False, ("follower",)),
    "deliverer": (False, ("deliverer",)),
}

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
CANCEL_AGAIN_S = 1.0

# The client whose request the current task serves: an account, or an address before the account is known. Empty in background
# work. The database pool shares its connections by it, and upstreams their capacity.
client_of_task: ContextVar[str] = ContextVar("client_of_task", default="")
# The block that data for the request of the current task must have reached; 0 for any. Older cached data is read again.
min_block_of_task: ContextVar[int] = ContextVar("min_block_of_task", default=0)

T = TypeVar("T")


class Tasks:
    """Supervised loops. A loop that raises is logged and restarted after a growing pause; one that returns is finished.

    A loop that fails because Postgres is away is logged once, in one line, until it has run for a while.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"<Tasks {', '.join(sorted(name for name, task in self._tasks.items() if not task.done()))}>"

    def start(self, name: str, loop: Callable[[], Awaitable[None]], *, of: object = None) -> None:
        """Start a loop. `name`: one of a few, for logs and metrics. `of`: distinguishes loops of the same name."""
        self._start(name if of is None else f"{name} {of}", self._run(name, loop))

    def start_once(self, name: str, work: Callable[[], Awaitable[None]], *, of: object) -> None:
        """Start work that ends. If it fails, it is not repeated: its client may have caused that."""
        self._start(f"{name} {of}", self._run_once(name, work))

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._tasks.pop(name) if self._tasks.get(name) is task else None)

    async def _run_once(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as exc:
            report_failure(name, exc, None)

    async def _run(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            began = time.monotonic()
            try:
                return await loop()
            except asyncio.CancelledError as exc:
                if is_cancelled():
                    raise
                failure: BaseException = exc  # Something that the loop awaited was cancelled.
            except Exception as exc:
                failure = exc
            if time.monotonic() - began > LONGEST_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            report_failure(name, failure, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    async def close(self) -> None:
        """Cancel all loops, again and again until they end: a cancellation can be lost if an await finishes with it."""
        while running := [task for task in self._tasks.values() if not task.done()]:
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=CANCEL_AGAIN_S)
        self._tasks.clear()


def is_cancelled() -> bool:
    """Whether the current task was cancelled, rather than something that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def report_failure(name: str, exc: BaseException, pause_s: float | None) -> None:
    """Count and log the failure of a loop. It goes on after the pause, or ends if `pause_s` is None."""
    if not isinstance(exc, Unavailable):
        telemetry.loop_failures_total.labels(name).inc()
        log.error("loop failed", extra={"loop": name, "again_in_s": pause_s}, exc_info=exc)
    elif pause_s == FIRST_PAUSE_S:
        log.warning("loop interrupted: it goes on when it can", extra={"loop": name, "reason": str(exc)})


class FirstFailure:
    """Logs the first of consecutive failures. A loop that waits for Postgres fails every second until it is back."""

    def __init__(self, logger: logging.Logger, message: str) -> None:
        self._logger = logger
        self._message = message
        self._is_reported = False

    def __repr__(self) -> str:
        return f"<FirstFailure {self._message}{', reported' if self._is_reported else ''}>"

    def report(self, **extra: object) -> None:
        if not self._is_reported:
            self._is_reported = True
            self._logger.warning(self._message, extra=extra)

    def clear(self) -> None:
        """The work has succeeded: the next failure is a new one."""
        self._is_reported = False


async def repeat(work: Callable[[], Awaitable[object]], *, every_s: float) -> None:
    """A supervised loop: do the work now and every `every_s` seconds. If Postgres is away, the next round does it."""
    while True:
        try:
            await work()
        except Unavailable:
            pass
        await asyncio.sleep(every_s)


async def until_set(event: asyncio.Event, *, within_s: float) -> bool:
    """Wait for the event, and return whether it was set in time."""
    try:
        async with asyncio.timeout(within_s):
            return await event.wait()
    except TimeoutError:
        return False


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the work's result; if `stop` is set first, cancel the work, wait for its end and return None."""
    loop = asyncio.get_running_loop()
    doing, stopping = loop.create_task(work), loop.create_task(stop.wait())
    try:
        await asyncio.wait((doing, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if not doing.done():
            doing.cancel()
        await asyncio.gather(doing, stopping, return_exceptions=True)
    return None if doing.cancelled() else doing.result()


def send_signal(process: asyncio.subprocess.Process, number: int) -> None:
    """Signal a child process if it is still running.

    `Process.send_signal` would reap a child that has just ended, and asyncio, which reaps it too, would then warn.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
