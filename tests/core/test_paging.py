"""Pages of a list."""

from __future__ import annotations

import pytest

from proxy.core.paging import Page


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
