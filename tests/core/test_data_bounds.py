"""The oldest blocks of an upstream: how they are written, and how they are found and followed with few calls."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.data_bounds import ALL_BLOCKS, DATA_INDEX, Bound, BoundSearch, DataBounds, of_archive

STATE, BLOCKS = DATA_INDEX["state"], DATA_INDEX["blocks"]
MAINNET = 25_000_000


def searched(search: BoundSearch, first: int) -> Bound | None:
    """Answer as an upstream whose oldest block is `first`."""
    while (block := search.next_block) is not None:
        search.answered(block, is_held=block >= first)
    return search.bound


@given(st.integers(2, 1 << 62), st.data())
def test_search_finds_the_exact_block(head: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(1, head))
    search = BoundSearch(head, usual_kept=128)
    found = searched(search, first)
    assert found is not None
    assert found.oldest(head) == (first if first > 1 else 0)
    assert search.calls <= 12 + math.ceil(math.log2(head + 1))


@pytest.mark.parametrize(
    ("first", "calls"),
    [(1, 1), (MAINNET - 127, 3), (MAINNET - 128, 25), (MAINNET - 126, 25), (MAINNET - 89_999, 25)],
)
def test_archive_and_usual_pruned_node_are_found_with_few_calls(first: int, calls: int) -> None:
    search = BoundSearch(MAINNET, usual_kept=128)
    found = searched(search, first)
    assert found is not None
    assert found.oldest(MAINNET) == (first if first > 1 else 0)
    assert search.calls <= calls


@pytest.mark.parametrize("looks_below", [False, True])
@pytest.mark.parametrize("known", [ALL_BLOCKS, Bound(first=15_537_394), Bound(kept=128)])
def test_bound_that_has_not_changed_is_confirmed_with_one_call(known: Bound, looks_below: bool) -> None:
    search = BoundSearch(MAINNET + 500, usual_kept=128, known=known, looks_below=looks_below)
    assert searched(search, max(1, known.oldest(MAINNET + 500))) == known
    assert search.calls == 1


def test_bound_that_moves_with_the_head_is_followed_without_calls() -> None:
    before = searched(BoundSearch(MAINNET, usual_kept=128), MAINNET - 89_999)
    assert before is not None
    assert not before.kept
    search = BoundSearch(MAINNET + 300, usual_kept=128, known=before)
    after = searched(search, MAINNET + 300 - 89_999)
    assert after == Bound(kept=90_000)
    assert search.calls <= 3
    assert after.oldest(MAINNET + 1000) == MAINNET + 1000 - 89_999


def test_upstream_that_has_got_older_blocks_is_noticed() -> None:
    search = BoundSearch(MAINNET, usual_kept=128, known=Bound(first=20_000_000), looks_below=True)
    assert searched(search, 1) == ALL_BLOCKS


def test_upstream_without_its_own_head_has_no_bound() -> None:
    assert searched(BoundSearch(100, usual_kept=128), 101) is None


def test_declared_bounds_win_and_unknown_ones_exclude_nothing() -> None:
    bounds = DataBounds({"state": -128, "receipts": 700})
    bounds.bound_found("state", ALL_BLOCKS)
    assert bounds.text == "state=-128 receipts=700"
    assert [bounds.holds(STATE, block, 1000) for block in (872, 873)] == [False, True]
    assert bounds.holds(BLOCKS, 0, 1000)
    assert bounds.highest(1000) == 873
    bounds.floor_reported(950)
    assert not bounds.holds(BLOCKS, 949, 1000)


def test_bounds_are_passed_between_processes_as_text() -> None:
    bounds, other = DataBounds(), DataBounds({"logs": 5})
    bounds.bound_found("state", Bound(kept=128))
    bounds.bound_found("logs", Bound(first=9))
    other.adopt(bounds.text)
    assert other.text == "state=-128 logs=5"


def test_archive_is_short_for_bounds() -> None:
    assert set(of_archive(archive=True, usual_kept=128).values()) == {0}
    assert of_archive(archive=False, usual_kept=128) == {"state": -128, "traces": -128, "proofs": -128}
    assert of_archive(archive=False, usual_kept=0) == {}
