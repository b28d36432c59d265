"""Dictionaries of bounded size: the oldest entries make room, and only some of them."""

from __future__ import annotations

import pytest

from proxy.core.bounded import make_room


@pytest.mark.parametrize("most", [1, 2, 16, 100])
def test_table_never_has_more_entries_than_it_may(most: int) -> None:
    table: dict[int, str] = {}
    for number in range(10 * most):
        make_room(table, most)
        table[number] = "entry"
        assert len(table) <= most
        assert number in table


def test_oldest_entries_are_dropped_and_the_others_stay() -> None:
    table = dict.fromkeys(range(160), True)
    make_room(table, 161)
    assert len(table) == 160
    make_room(table, 160)
    assert [*table] == [*range(10, 160)]
