"""Long-lived work inside one process: named loops that are started again when they fail, and work that a stop may cut short.

The only place that may create a bare task.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

log = logging.getLogger("penstock.process")

# What a machine is for: whether it has workers, and which parts run beside them (see `background`).
ROLES: dict[str, tuple[bool, tuple[str, ...]]] = {
    "all": (True, ("follower", "deliverer")),
    "gateway": (True, ()),
    "follower": (False, ("follower",)),
    "deliverer": (False, ("deliverer",)),
}

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
CANCEL_AGAIN_S = 1.0

T = TypeVar("T")


class Tasks:
    """Supervised loops. A loop that raises is logged and started again, after a pause that grows; one that returns is done."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"<Tasks {', '.join(sorted(name for name, task in self._tasks.items() if not task.done()))}>"

    def start(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.get_running_loop().create_task(self._run(name, loop), name=name)
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._tasks.pop(name) if self._tasks.get(name) is task else None)

    async def _run(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return await loop()
            except asyncio.CancelledError:
                raise
            except Exception:
                log.exception("loop failed", extra={"loop": name, "again_in_s": pause_s})
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    async def close(self) -> None:
        """Cancelled until they end: a cancellation can be lost, where it meets what its task was waiting for."""
        while running := [task for task in self._tasks.values() if not task.done()]:
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=CANCEL_AGAIN_S)
        self._tasks.clear()


async def until_set(event: asyncio.Event, *, within_s: float) -> bool:
    """Whether it is, after at most so long."""
    try:
        async with asyncio.timeout(within_s):
            return await event.wait()
    except TimeoutError:
        return False


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The work's result; None when the stop comes first: then the work was cancelled, and has ended."""
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


def tell(process: asyncio.subprocess.Process, number: int) -> None:
    """Signal a child, if it still runs.

    Not by the object's own method: that collects a child which has just ended, and asyncio, whose part it is, complains.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
