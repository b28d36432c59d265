"""Kills a process at its n-th write to a socket, for every n, and runs its work again: the end must be that of a model.

Postgres cannot run in virtual time, so webhooks, usage and the ledger of gas policies are explored in this way. Every
statement, commit and request is a write to a socket. Nothing leaves the process between two of them, so killing it before each
write covers every state that a crash can leave behind.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from asyncio import selector_events
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

# The work of a process. A process that is started after a crash does the same work again.
Work = Callable[[], Awaitable[None]]

# A run takes a second or two. One that takes this long hangs, which is a failure.
LONGEST_S = 120.0

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["tests.simulation.crash_cases"])


async def writes_of(work: Work, *, die_before: int = 0) -> int | None:
    """Do the work in a process of its own. Returns how many writes it took; None if the process was killed before the
    write with the number `die_before`."""
    reader, writer = _forks.Pipe(duplex=False)
    process = _forks.Process(target=_run, args=(work, die_before, writer))
    process.start()
    writer.close()
    await asyncio.to_thread(process.join, LONGEST_S)
    if process.exitcode is None:
        process.kill()
    if process.exitcode == -signal.SIGKILL and die_before:
        return None
    assert process.exitcode == 0, f"{work} ended with {process.exitcode}"
    count: int = reader.recv()
    return count


def spread(count: int, most: int) -> Iterator[int]:
    """The numbers from 1 to `count`, or so many of them at equal distances."""
    most = min(most, count)
    return (1 + place * count // most for place in range(most))


def _run(work: Work, die_before: int, writer: Connection) -> None:
    countdown = _Countdown(die_before)
    transport: Any = vars(selector_events)["_SelectorSocketTransport"]
    transport.write = countdown.before(transport.write)
    asyncio.run(_finish(work))
    writer.send(countdown.writes)


async def _finish(work: Work) -> None:
    await work()


class _Countdown:
    """Counts the writes of this process, and kills it instead of one of them."""

    def __init__(self, die_before: int) -> None:
        self.writes = 0
        self._die_before = die_before

    def __repr__(self) -> str:
        return f"<_Countdown {self.writes} of {self._die_before}>"

    def before(self, write: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def counted(transport: Any, data: Any) -> None:
            self.writes += 1
            if self.writes == self._die_before:
                os.kill(os.getpid(), signal.SIGKILL)
            write(transport, data)

        return counted
