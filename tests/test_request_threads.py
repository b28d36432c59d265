"""Threads for work of requests: shared between clients, and given back however a request ends."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from proxy.request_threads import NICENESS, THREADS, RequestThreads, compression_threads, request_threads
from proxy.tasks import client_of_task
from tests.service import until

FREE = f"<RequestThreads <ConnectionQueue {THREADS} free, 0 held, 0 waiting>>"


async def test_work_of_one_client_leaves_threads_to_others() -> None:
    threads, gate = RequestThreads(), threading.Event()
    busy = [threads.start("greedy", gate.wait) for _ in range(100)]
    async with asyncio.timeout(45):
        assert await threads.start("other", lambda: "done") == "done"
    gate.set()
    assert all(await asyncio.gather(*busy))
    assert repr(threads) == FREE


async def test_work_that_is_given_up_before_its_turn_is_not_done() -> None:
    threads, gate, done = RequestThreads(), threading.Event(), list[int]()
    busy = [threads.start("one", gate.wait) for _ in range(THREADS)]
    waiting = threads.start("one", lambda: done.append(1))
    waiting.cancel()
    busy[0].cancel()
    gate.set()
    await asyncio.gather(*busy[1:])
    await until(lambda: repr(threads) == FREE)
    assert not done


async def test_error_of_the_work_is_raised() -> None:
    threads = RequestThreads()
    client_of_task.set("one")
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    assert repr(threads) == FREE


async def test_only_threads_that_compress_give_way_to_other_processes() -> None:
    """One that holds the interpreter and does not get a core would hold up the event loop."""

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    mine = os.getpriority(os.PRIO_PROCESS, 0)
    assert await request_threads.start("one", niceness) == mine
    assert await compression_threads.start("one", niceness) == min(mine + NICENESS, 19)
