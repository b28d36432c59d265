"""Heads are published to many listeners over several turns of the event loop, in order."""

import asyncio
from collections.abc import Sequence

import pytest

from proxy.core.head_chain import ChainBlock
from proxy.core.usage import Tally
from proxy.errors import Fault
from proxy.services.feed.dispatch import LISTENERS_PER_TURN, HeadDispatch
from proxy.services.feed.topics import FeedEvent

MANY = 3 * LISTENERS_PER_TURN + 5


class RecordingListener:
    def __init__(self) -> None:
        self.received: list[int] = []

    def on_events(self, events: Sequence[FeedEvent]) -> None:
        self.received += [event.block for event in events]

    def on_end(self, why: Fault) -> None:
        raise AssertionError(why)

    async def room(self) -> None: ...

    account = ""

    def charge(self, units: int, tally: Tally) -> bool:
        raise AssertionError(tally)

    async def wait_for_units(self) -> None: ...


def block(number: int) -> ChainBlock:
    return ChainBlock(number, f"0x{number:064x}", f"0x{number - 1:064x}", b"{}")


async def all_published() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_every_listener_receives_every_head_in_order() -> None:
    dispatch, listeners = HeadDispatch(), [RecordingListener() for _ in range(MANY)]
    dispatch.listeners = dict.fromkeys(listeners)
    dispatch.publish([block(1), block(2)])
    dispatch.publish([block(3)])
    assert listeners[0].received == [1, 2]
    assert listeners[-1].received == []
    await all_published()
    assert all(listener.received == [1, 2, 3] for listener in listeners)


async def test_single_listener_receives_the_head_immediately() -> None:
    dispatch, listener = HeadDispatch(), RecordingListener()
    dispatch.listeners[listener] = None
    dispatch.publish([block(1)])
    assert listener.received == [1]


async def test_listener_that_leaves_receives_no_more_and_one_that_joins_receives_later_heads() -> None:
    dispatch, listeners, late = HeadDispatch(), [RecordingListener() for _ in range(MANY)], RecordingListener()
    dispatch.listeners = dict.fromkeys(listeners)
    dispatch.publish([block(1)])
    del dispatch.listeners[listeners[-1]]
    dispatch.listeners[late] = None
    dispatch.publish([block(2)])
    await all_published()
    assert listeners[-1].received == []
    assert late.received == [2]
    assert listeners[-2].received == [1, 2]


async def test_dispatch_resumes_after_it_was_idle() -> None:
    dispatch, listeners = HeadDispatch(), [RecordingListener() for _ in range(LISTENERS_PER_TURN)]
    dispatch.listeners = dict.fromkeys(listeners)
    dispatch.publish([block(1)])
    await all_published()
    dispatch.publish([block(2)])
    await all_published()
    assert all(listener.received == [1, 2] for listener in listeners)


async def test_failing_listener_does_not_affect_the_others() -> None:
    class BrokenListener(RecordingListener):
        def on_events(self, events: Sequence[FeedEvent]) -> None:
            raise RuntimeError

    dispatch, listeners = HeadDispatch(), [RecordingListener() for _ in range(MANY)]
    dispatch.listeners = dict.fromkeys([BrokenListener(), *listeners])
    with pytest.raises(RuntimeError):
        dispatch.publish([block(1)])
    await all_published()
    assert listeners[-1].received == [1]
    dispatch.listeners = dict.fromkeys(listeners)
    dispatch.publish([block(2)])
    await all_published()
    assert listeners[0].received == [2]
    assert listeners[-1].received == [1, 2]
