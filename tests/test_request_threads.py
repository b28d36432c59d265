"""Threads for work of requests: shared between clients, and given back however a request ends."""

from __future__ import annotations

import asyncio
import threading

import pytest

from proxy.request_threads import THREADS, RequestThreads
from proxy.tasks import client_of_task
from tests.service import until

FREE = f"<RequestThreads <ConnectionQueue {THREADS} free, 0 held, 0 waiting>>"


async def test_work_of_one_client_leaves_threads_to_others() -> None:
    threads, gate = RequestThreads(), threading.Event()
    busy = [threads.start("greedy", gate.wait) for _ in range(100)]
    async with asyncio.timeout(5):
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
