"""Pages of a list."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.paging import DayRows, Page, days_of


@pytest.mark.parametrize(
    ("number", "limit", "offset"), [(1, 50, 0), (1, 1, 0), (2, 1, 1), (2, 50, 50), (1_000_000, 100, 99_999_900)]
)
def test_offset_skips_the_pages_before(number: int, limit: int, offset: int) -> None:
    assert Page(number, limit).offset == offset


def test_pages_cover_a_list_without_gap_or_overlap() -> None:
    items = list(range(23))
    pages = [Page(number, 5) for number in range(1, 6)]
    assert [item for page in pages for item in items[page.offset : page.offset + page.limit]] == items


def test_page_beyond_the_end_is_empty() -> None:
    page = Page(7, 5)
    assert list(range(23))[page.offset : page.offset + page.limit] == []


START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
# Of each day: the minutes at which its rows were created.
TABLES = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=6), max_size=8)


def rows_of(number: int, minutes: list[int]) -> DayRows:
    times = [START + datetime.timedelta(minutes=each) for each in minutes]
    return DayRows(START.date() + datetime.timedelta(days=number), len(times), min(times), max(times))


@given(TABLES, st.integers(1, 12), st.integers(1, 8))
def test_days_of_a_page_have_all_its_rows(tables: list[list[int]], number: int, limit: int) -> None:
    page = Page(number, limit)
    days = [rows_of(*each) for each in enumerate(tables)]
    wanted = sorted((minute for minutes in tables for minute in minutes), reverse=True)
    found, offset = days_of(page, days)
    read = sorted(
        (minute for day, minutes in zip(days, tables, strict=True) if day.day in found for minute in minutes),
        reverse=True,
    )
    assert read[offset : offset + limit] == wanted[page.offset : page.offset + limit]


def test_page_within_a_day_reads_its_table_only() -> None:
    days = [rows_of(n, list(range(10 * n, 10 * n + 10))) for n in range(30)]
    assert days_of(Page(1, 10), days) == ([days[29].day], 0)
    assert days_of(Page(4, 5), days) == ([days[28].day], 5)
    assert days_of(Page(2, 15), days) == ([days[28].day, days[27].day], 5)
    assert days_of(Page(31, 10), days)[0] == [days[0].day]
    assert days_of(Page(1, 10), []) == ([], 0)
