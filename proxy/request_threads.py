"""Threads for work of requests that would block the event loop: compressing and decoding megabytes.

The threads of asyncio's default executor serve all work in the order in which it came. Here clients have a queue each and take
turns, and one client holds no more threads than are free: a flood of one account's work delays only itself, and not the
worker's own files, which use the default executor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from proxy.connection_queue import ConnectionQueue
from proxy.tasks import client_of_task

T = TypeVar("T")
# One client gets half of them. More would only compete for the cores.
THREADS = 4
# The loop comes first where it shares a core with threads that compress. On Linux each thread has its own niceness.
NICENESS = 10


class RequestThreads:
    def __init__(self, niceness: int = 0) -> None:
        """`niceness`: only for work that releases the interpreter. A thread that holds it and gets no core, because other
        processes come first, would hold up the event loop for as long."""
        initializer = partial(_give_way, niceness) if niceness else None
        self._threads = ThreadPoolExecutor(THREADS, "request", initializer=initializer)
        # Work belongs to requests under way, which have their own limits.
        self._turns = ConnectionQueue(THREADS, per_client=sys.maxsize)

    def __repr__(self) -> str:
        return f"<RequestThreads {self._turns!r}>"

    async def run(self, work: Callable[[], T]) -> T:
        """The result of work for the request of the current task."""
        return await self.start(client_of_task.get(), work)

    def start(self, client: str, work: Callable[[], T]) -> asyncio.Future[T]:
        """Do the work in the client's turn. If the future is cancelled before that, it is not done."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        turn = self._turns.request(client)
        if turn is None:
            self._begin(client, work, result)
        else:
            turn.add_done_callback(lambda _: self._begin(client, work, result))
        return result

    def _begin(self, client: str, work: Callable[[], T], result: asyncio.Future[T]) -> None:
        if result.done():
            self._turns.leave(client)
            return
        # Also if the client leaves meanwhile, its thread is busy until the work is done.
        working = asyncio.get_running_loop().run_in_executor(self._threads, work)
        working.add_done_callback(lambda done: self._end(client, done, result))

    def _end(self, client: str, done: asyncio.Future[T], result: asyncio.Future[T]) -> None:
        self._turns.leave(client)
        if result.done():
            done.exception()  # mark it as retrieved
        elif (error := done.exception()) is not None:
            result.set_exception(error)
        else:
            result.set_result(done.result())


def _give_way(niceness: int) -> None:
    with contextlib.suppress(OSError):  # a sandbox may refuse it
        mine = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), mine + niceness)


# For the process: their threads start with the first work.
request_threads = RequestThreads()
compression_threads = RequestThreads(NICENESS)
