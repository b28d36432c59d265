"""Dictionaries of bounded size, for caches that only save work.

`LruCache` moves an entry on every read. Caches on the path of a call use a plain dict instead, and drop the entries that were
added first when it is full.
"""

from __future__ import annotations

from itertools import islice
from typing import Final, TypeVar

K = TypeVar("K")
V = TypeVar("V")

# A full table drops one entry in DROPPED_PART at once, and at most MOST_DROPPED. One at a time would cost a search for the
# oldest entry each time. Dropping all of them would block the event loop for milliseconds, and lose the whole cache.
DROPPED_PART: Final = 16
MOST_DROPPED: Final = 1024


def make_room(table: dict[K, V], most: int) -> None:
    """Drop the oldest entries of a table that has this many."""
    if len(table) >= most:
        for key in list(islice(table, max(1, min(most // DROPPED_PART, MOST_DROPPED)))):
            del table[key]
