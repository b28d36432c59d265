"""The queue that shares the loop's time: clients in turn, a short slice in each turn of the loop."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

from proxy.turn_queue import SLICE_S, TurnQueue
from tests.service import until


def note(done: list[Any], step: Any, *, starts_more: bool = False) -> bool:
    done.append(step)
    return starts_more


async def emptied(queue: TurnQueue) -> None:
    await until(lambda: "0 steps" in repr(queue))


async def test_many_steps_of_one_client_leave_every_second_turn_to_another() -> None:
    queue = TurnQueue(asyncio.get_running_loop())
    done: list[str] = []
    for client in [*["2001:db8::1", "2001:db8::2"] * 3, *["acc_1"] * 2]:
        queue.add(client, partial(note, done, client))
    await emptied(queue)
    # The addresses of one IPv6 network are one client.
    assert [client == "acc_1" for client in done] == [False, True, False, True, False, False, False, False]


async def test_step_that_starts_more_work_ends_the_slice() -> None:
    queue = TurnQueue(asyncio.get_running_loop())
    done: list[int] = []
    for number in range(5):
        queue.add("acc_1", partial(note, done, number, starts_more=True))
    for expected in range(1, 6):
        await asyncio.sleep(0)
        assert done == [*range(expected)]


async def test_steps_beyond_the_slice_come_in_the_next_turn() -> None:
    queue = TurnQueue(asyncio.get_running_loop())
    done: list[int] = []

    def work() -> bool:
        end = time.monotonic() + SLICE_S
        while time.monotonic() < end:
            pass
        done.append(1)
        return False

    for _ in range(3):
        queue.add("acc_1", work)
    await asyncio.sleep(0)
    assert len(done) == 1
    await emptied(queue)
    assert len(done) == 3


async def test_step_that_fails_does_not_end_the_queue() -> None:
    failures: list[dict[str, object]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(context))
    queue = TurnQueue(loop)
    done: list[int] = []

    def fail() -> bool:
        raise ValueError

    queue.add("acc_1", fail)
    queue.add("acc_1", partial(note, done, 1))
    await emptied(queue)
    assert (len(failures), done) == (1, [1])


async def test_waiter_that_was_cancelled_takes_no_turn() -> None:
    queue = TurnQueue(asyncio.get_running_loop())
    async with asyncio.TaskGroup() as group:
        first = group.create_task(queue.wait("acc_1"))
        group.create_task(queue.wait("acc_1"))
        await asyncio.sleep(0)
        first.cancel()
    assert first.cancelled()
