"""Garbage collection at chosen times, for a bounded share of the event loop's time.

By default the interpreter collects after so many new objects, wherever that happens, and visits each young object with all its
members: also the parsed bodies of large requests, which are freed by reference a moment later. Beside a hundred clients that
send such bodies, these collections stopped the event loop for 3 to 25 ms at a time, 3 % of its time in all. Here an object is
visited once while it is young, with few others, and then about every two minutes.
"""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Final

# A collection of young objects begins once there are this many more than after the last one, which it visits in a few
# milliseconds, or after this time: objects in cycles are kept until then, and some hold a request's body.
MOST_YOUNG: Final = 2_000
LONGEST_S: Final = 2.0
# How often the objects are counted.
COUNT_S: Final = 0.05
# The least time between collections of all objects, which include the entries of every cache.
FULL_AFTER_S: Final = 120.0
# The pause after it is at least so many times as long as it took.
PAUSE_RATIO: Final = 500
YOUNG, ALL = 1, 2


def take_over() -> None:
    """Exclude what the start has created from collections: modules, tables and services live as long as the process, and a
    full collection would visit them all for 50 ms. From now on only `collect_rarely` collects."""
    gc.collect()
    gc.freeze()
    gc.disable()


async def collect_rarely() -> None:
    ended = time.monotonic()
    young_at, full_at = ended + LONGEST_S, ended + FULL_AFTER_S
    while True:
        await asyncio.sleep(COUNT_S)
        started = time.monotonic()
        if started < young_at and gc.get_count()[0] < MOST_YOUNG:
            continue
        gc.collect(ALL if started >= full_at else YOUNG)
        ended = time.monotonic()
        young_at = ended + LONGEST_S
        if started >= full_at:
            full_at = ended + max(FULL_AFTER_S, (ended - started) * PAUSE_RATIO)
