"""A process collects garbage at times of its own choice, and never visits what its start has made."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from proxy.processes import garbage_collection
from proxy.tasks import Tasks


class Cyclic:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def taken_over() -> Iterator[list[list[int]]]:
    made = [[number] for number in range(100)]
    garbage_collection.take_over()
    yield made
    gc.unfreeze()
    gc.enable()


def test_full_collection_visits_nothing_of_the_start(taken_over: list[list[int]]) -> None:
    assert gc.get_freeze_count() > len(taken_over)
    assert not [each for each in gc.get_objects() if each is taken_over]


@pytest.mark.usefixtures("taken_over")
def test_new_objects_start_no_collection() -> None:
    before = [each["collections"] for each in gc.get_stats()]
    held: list[list[int]] = [[] for _ in range(100_000)]
    assert [each["collections"] for each in gc.get_stats()] == before
    assert len(held) == 100_000


@pytest.mark.usefixtures("taken_over")
async def test_objects_in_cycles_are_freed_after_a_while() -> None:
    freed = asyncio.Event()
    weakref.finalize(Cyclic(), freed.set)
    assert not freed.is_set()
    tasks = Tasks()
    tasks.start("collect garbage", garbage_collection.collect_rarely)
    try:
        async with asyncio.timeout(2 * garbage_collection.LONGEST_S):
            await freed.wait()
    finally:
        await tasks.close()


@pytest.mark.usefixtures("taken_over")
async def test_collections_stay_short_while_old_objects_make_room_for_young_ones() -> None:
    """The interpreter's count of young objects stays low then."""
    old: list[list[int]] = [[] for _ in range(700_000)]
    gc.collect()
    young: list[list[int]] = []
    tasks = Tasks()
    tasks.start("collect garbage", garbage_collection.collect_rarely)
    try:
        before = gc.get_stats()[garbage_collection.YOUNG]["collections"]
        async with asyncio.timeout(3 * garbage_collection.LONGEST_S):
            while gc.get_stats()[garbage_collection.YOUNG]["collections"] < before + 5:
                del old[-1000:]
                young += [[] for _ in range(1000)]
                await asyncio.sleep(0.01)
    finally:
        await tasks.close()
    assert len(old) + len(young) == 700_000
