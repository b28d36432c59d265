"""Pages of a list: the API's `page`, `limit` and `total`."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Page:
    number: int
    limit: int

    @property
    def offset(self) -> int:
        return (self.number - 1) * self.limit


class DayRows(NamedTuple):
    """The rows of a list in the table of one day: their number, and the times of the oldest and the newest."""

    day: datetime.date
    rows: int
    oldest: datetime.datetime
    newest: datetime.datetime


def days_of(page: Page, days: Sequence[DayRows]) -> tuple[list[datetime.date], int]:
    """The days whose tables have rows of the page, newest first, and the offset of the page among the rows of these days.

    Tables may overlap in time: a row can be in the table of a day before its own time.
    """
    left = sorted(days, key=lambda each: each.oldest, reverse=True)
    offset = page.offset
    # Leave out days that end before the page begins.
    while len(left) > 1 and left[0].rows <= offset and left[0].oldest > max(each.newest for each in left[1:]):
        offset -= left.pop(0).rows
    reached = 0
    for last in left:
        reached += last.rows
        if reached >= offset + page.limit:
            return [each.day for each in left if each.newest >= last.oldest], offset
    return [each.day for each in left], offset
