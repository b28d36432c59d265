"""Garbage collection at chosen times, for a bounded share of the event loop's time.

By default the interpreter collects after so many new objects, wherever that happens, and visits each young object with all its
members: also the parsed bodies of large requests, which are freed by reference a moment later. Beside a hundred clients that
send such bodies, these collections stopped the event loop for 3 to 25 ms at a time, 3 % of its time in all.
"""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Final

# The pause after a collection is so many times as long as the collection.
PAUSE_RATIO: Final = 500
# Bounds of the pause. Objects in cycles are kept for so long, and some hold a request's body.
SHORTEST_S: Final = 1.0
LONGEST_S: Final = 10.0
# The least time between collections of all objects, which include the entries of every cache.
FULL_AFTER_S: Final = 120.0
YOUNG, ALL = 1, 2


def take_over() -> None:
    """Exclude what the start has created from collections: modules, tables and services live as long as the process, and a
    full collection would visit them all for 50 ms. From now on only `collect_rarely` collects."""
    gc.collect()
    gc.freeze()
    gc.disable()


async def collect_rarely() -> None:
    full_at = time.monotonic() + FULL_AFTER_S
    pause_s = SHORTEST_S
    while True:
        await asyncio.sleep(pause_s)
        started = time.monotonic()
        gc.collect(ALL if started >= full_at else YOUNG)
        ended = time.monotonic()
        if started >= full_at:
            full_at = ended + max(FULL_AFTER_S, (ended - started) * PAUSE_RATIO)
        pause_s = min(max((ended - started) * PAUSE_RATIO, SHORTEST_S), LONGEST_S)
