"""Garbage collection at chosen times, for a bounded share of the event loop's time.

By default the interpreter collects after so many new objects, wherever that happens, and visits each young object with all its
members: also the parsed bodies of large requests, which are freed by reference a moment later. Beside a hundred clients that
send such bodies, these collections stopped the event loop for 3 to 25 ms at a time, 3 % of its time in all. Here an object is
visited once while it is young, with few others, and then about every two minutes. The interpreter's count of young objects also
goes down when an old one is freed, so it may be far too low: how long a collection took says when the next one is due.
"""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Final

# A collection of young objects begins once there are this many more than after the last one, or when it would take as long as
# this if they became more as fast as before, or after this time: objects in cycles are kept until then, and some hold a
# request's body.
MOST_YOUNG: Final = 2_000
YOUNG_S: Final = 0.001
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
        since_s, ended = started - ended, time.monotonic()
        took_s = ended - started
        if started >= full_at:
            young_at, full_at = ended + LONGEST_S, ended + max(FULL_AFTER_S, took_s * PAUSE_RATIO)
        else:
            young_at = ended + min(LONGEST_S, since_s * YOUNG_S / max(took_s, 1e-6))
