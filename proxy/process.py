"""Long-lived work inside one process: named loops that are started again when they fail.

The only place that may create a bare task.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger("penstock.process")

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0


class Tasks:
    """Supervised loops. A loop that raises is logged and started again, after a pause that grows; one that returns is done."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"<Tasks {', '.join(sorted(name for name, task in self._tasks.items() if not task.done()))}>"

    def start(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        self._tasks[name] = asyncio.get_running_loop().create_task(self._run(name, loop), name=name)

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
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()
