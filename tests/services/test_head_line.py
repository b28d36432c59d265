"""Heads for many listeners: told in several turns of the loop, and still as if in one moment."""

import asyncio
from collections.abc import Sequence

import pytest

from proxy.core.head_chain import ChainBlock
from proxy.errors import Fault
from proxy.services.feed.dispatch import LISTENERS, HeadDispatch
from proxy.services.feed.topics import FeedEvent

MANY = 3 * LISTENERS + 5


class Ear:
    def __init__(self) -> None:
        self.heard: list[int] = []

    def on_events(self, events: Sequence[FeedEvent]) -> None:
        self.heard += [event.block for event in events]

    def on_end(self, why: Fault) -> None:
        raise AssertionError(why)

    async def room(self) -> None: ...


def block(number: int) -> ChainBlock:
    return ChainBlock(number, f"0x{number:064x}", f"0x{number - 1:064x}", b"{}")


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_everybody_hears_everything_in_order() -> None:
    line, ears = HeadDispatch(), [Ear() for _ in range(MANY)]
    line.listeners = dict.fromkeys(ears)
    line.tell([block(1), block(2)])
    line.tell([block(3)])
    assert ears[0].heard == [1, 2]
    assert ears[-1].heard == []
    await settled()
    assert all(ear.heard == [1, 2, 3] for ear in ears)


async def test_few_hear_of_it_at_once() -> None:
    line, ear = HeadDispatch(), Ear()
    line.listeners[ear] = None
    line.tell([block(1)])
    assert ear.heard == [1]


async def test_who_leaves_in_the_middle_hears_no_more_and_who_joins_hears_what_comes_then() -> None:
    line, ears, late = HeadDispatch(), [Ear() for _ in range(MANY)], Ear()
    line.listeners = dict.fromkeys(ears)
    line.tell([block(1)])
    del line.listeners[ears[-1]]
    line.listeners[late] = None
    line.tell([block(2)])
    await settled()
    assert ears[-1].heard == []
    assert late.heard == [2]
    assert ears[-2].heard == [1, 2]


async def test_line_that_was_done_begins_again() -> None:
    line, ears = HeadDispatch(), [Ear() for _ in range(LISTENERS)]
    line.listeners = dict.fromkeys(ears)
    line.tell([block(1)])
    await settled()
    line.tell([block(2)])
    await settled()
    assert all(ear.heard == [1, 2] for ear in ears)


async def test_listener_that_fails_does_not_end_it_for_the_others() -> None:
    class Broken(Ear):
        def on_events(self, events: Sequence[FeedEvent]) -> None:
            raise RuntimeError

    line, ears = HeadDispatch(), [Ear() for _ in range(MANY)]
    line.listeners = dict.fromkeys([Broken(), *ears])
    with pytest.raises(RuntimeError):
        line.tell([block(1)])
    await settled()
    assert ears[-1].heard == [1]
    line.listeners = dict.fromkeys(ears)
    line.tell([block(2)])
    await settled()
    assert ears[0].heard == [2]
    assert ears[-1].heard == [1, 2]
