"""Work that is done while somebody wants it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

# Who leaves often comes back: what was begun goes on for a moment.
LINGER_S = 2.0


class Demand:
    """Whether anybody wants something: `changed` is called whenever that may have changed."""

    def __init__(self, is_wanted: Callable[[], bool], linger_s: float = LINGER_S) -> None:
        self._is_wanted = is_wanted
        self._linger_s = linger_s
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Demand {self._is_wanted()}>"

    def changed(self) -> None:
        self._changed.set()

    async def run(self, work: Callable[[], Awaitable[None]], stopped: Callable[[], None]) -> None:
        """A loop: the work runs while it is wanted. `stopped` is called in the moment in which it is ended, so that whoever
        comes while it still clears away waits for the next one; and again if it has left something by then."""
        while True:
            await self._until(wanted=True)
            async with asyncio.TaskGroup() as group:
                task = group.create_task(_run(work))
                await self._until_nobody_comes_back()
                task.cancel()
                stopped()
            if not self._is_wanted():
                stopped()

    async def _until(self, *, wanted: bool) -> None:
        while self._is_wanted() is not wanted:
            self._changed.clear()
            await self._changed.wait()

    async def _until_nobody_comes_back(self) -> None:
        while True:
            await self._until(wanted=False)
            try:
                async with asyncio.timeout(self._linger_s):
                    await self._until(wanted=True)
            except TimeoutError:
                # Somebody may have come in the very turn in which the time was up.
                if not self._is_wanted():
                    return


async def _run(work: Callable[[], Awaitable[None]]) -> None:
    await work()
