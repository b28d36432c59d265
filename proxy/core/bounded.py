"""Dictionaries of bounded size, for caches that only save work.

`LruCache` costs a move on every read. Where a read is on the path of a call, a plain dict is read instead, and room is made
when something is added to a full one.
"""

from __future__ import annotations

from itertools import islice
from typing import Final, TypeVar

K = TypeVar("K")
V = TypeVar("V")

# The part of a full table that is dropped at once, and at most so many entries. One at a time would cost a search for the
# oldest each; all of them would stop the event loop for milliseconds, and everything would have to be found again.
DROPPED_PART: Final = 16
MOST_DROPPED: Final = 1024


def make_room(table: dict[K, V], most: int) -> None:
    """Drop the oldest entries of a table that has this many."""
    if len(table) >= most:
        for key in list(islice(table, max(1, min(most // DROPPED_PART, MOST_DROPPED)))):
            del table[key]
