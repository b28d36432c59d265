"""Run work only while there is demand for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

# Clients that unsubscribe often subscribe again, so the work continues this long after the last one left.
LINGER_S = 2.0


class Demand:
    """Tracks whether something is in demand. Call `changed` whenever the answer may have changed."""

    def __init__(self, exists: Callable[[], bool], linger_s: float = LINGER_S) -> None:
        self._exists = exists
        self._linger_s = linger_s
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Demand {self._exists()}>"

    def changed(self) -> None:
        self._changed.set()

    async def run(self, work: Callable[[], Awaitable[None]], stopped: Callable[[], None]) -> None:
        """Loop: run the work while there is demand. `stopped` resets its state in the same turn in which the work is
        cancelled, so that a listener that arrives during the clean-up waits for the next run; and once more afterwards,
        because the clean-up may have changed state again."""
        while True:
            await self._wait_until(exists=True)
            async with asyncio.TaskGroup() as group:
                task = group.create_task(_run(work))
                await self._wait_until_idle()
                task.cancel()
                stopped()
            if not self._exists():
                stopped()

    async def _wait_until(self, *, exists: bool) -> None:
        while self._exists() is not exists:
            self._changed.clear()
            await self._changed.wait()

    async def _wait_until_idle(self) -> None:
        while True:
            await self._wait_until(exists=False)
            try:
                async with asyncio.timeout(self._linger_s):
                    await self._wait_until(exists=True)
            except TimeoutError:
                # Demand may have returned in the very turn in which the timeout expired.
                if not self._exists():
                    return


async def _run(work: Callable[[], Awaitable[None]]) -> None:
    await work()
