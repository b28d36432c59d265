"""Shares the event loop's time between connections that want much of it.

A connection serves a small request at once. All else waits here for its turns, a short step each: requests sent ahead, the
request after a refused one, bodies in many chunks, floods of frames, and every request that aiohttp serves. A client is an
account, or an address before its key is known. Clients have a queue each and are served in turn, so the connections of one
client share one place, however many they are. After SLICE_S the loop first handles everything else that has arrived.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import TypeVar

from proxy.core.access import client_prefix_of
from proxy.core.round_robin import RoundRobin
from proxy.tasks import client_of_task

# Time for steps in one turn of the loop. A call of another client waits for two turns at most: once with its request, once
# with its upstream's reply.
SLICE_S = 0.0001

# Small items that are handled in one turn, in about a millisecond.
PER_TURN = 100
T = TypeVar("T")
U = TypeVar("U")

# A short piece of work. It returns whether it has started more work that the loop does in its next turn, such as a task.
Step = Callable[[], bool]


class TurnQueue:
    __slots__ = ("_is_scheduled", "_loop", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_scheduled = False
        self._waiting: RoundRobin[Step] = RoundRobin()

    def __repr__(self) -> str:
        return f"<TurnQueue {len(self._waiting)} steps of {len([*self._waiting])} clients>"

    def add(self, client: str, step: Step) -> None:
        self._waiting.add(client_prefix_of(client), step)
        self._schedule()

    async def wait(self, client: str) -> None:
        """Return when it is the client's turn."""
        turn = self._loop.create_future()

        def start() -> bool:
            if turn.done():
                return False
            turn.set_result(None)
            return True

        self.add(client, start)
        await turn

    def _schedule(self) -> None:
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._is_scheduled = False
        end = time.monotonic() + SLICE_S
        try:
            while self._waiting and not self._waiting.pop_next()() and time.monotonic() < end:
                pass
        finally:
            self._schedule()


# The queue for the request that the current task serves.
turns_of_task: ContextVar[TurnQueue | None] = ContextVar("turns_of_task", default=None)


async def next_turn() -> None:
    """Pause long work for a request until its client's next turn. Call it after every millisecond or so."""
    turns = turns_of_task.get()
    if turns is None:
        await asyncio.sleep(0)
    else:
        await turns.wait(client_of_task.get())


async def in_turns(items: Iterable[T], work: Callable[[T], U]) -> list[U]:
    """The results of a little work on each item, of which there may be thousands."""
    results: list[U] = []
    for item in items:
        results.append(work(item))
        if len(results) % PER_TURN == 0:
            await next_turn()
    return results
