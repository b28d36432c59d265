"""The memory that a worker holds for its clients: bounded for the worker, each kind and each account."""

from __future__ import annotations

import pytest

from proxy.memory_budget import KINDS, BudgetLine, MemoryBudget

MOST = 16_000
# An account alone may hold half of all room for replies: the part that is kept for them, and that of no kind.
SHARE = (MOST - 6 * MOST // 16) // 2


def fill(line: BudgetLine, account: str, step: int = 1) -> int:
    """Take as much as the account may have. Returns it."""
    before = line.total
    while line.take(account, step):
        pass
    return line.total - before


@pytest.mark.parametrize("size", [1, SHARE])
def test_account_may_hold_its_share_and_not_a_byte_more(size: int) -> None:
    replies = MemoryBudget(MOST).of("replies")
    assert fill(replies, "one", size) == SHARE
    assert not replies.has_room("one", 1)
    assert replies.may_wait(SHARE)
    assert not replies.may_wait(SHARE + 1)


def test_every_further_account_finds_half_of_what_is_left() -> None:
    budget = MemoryBudget(MOST)
    replies = budget.of("replies")
    assert [fill(replies, f"account {number}") for number in range(4)] == [SHARE // 2**n for n in range(4)]
    assert budget.total <= MOST


@pytest.mark.parametrize("greedy", KINDS)
def test_no_kind_can_take_what_is_kept_for_another(greedy: str) -> None:
    budget = MemoryBudget(MOST)
    for number in range(1000):
        fill(budget.of(greedy), f"account {number}")  # type: ignore[arg-type]
    for kind in KINDS:
        if kind != greedy:
            assert fill(budget.of(kind), f"reader of {kind}") >= MOST // 16 // 2 - 1
    assert budget.total <= MOST


def test_share_of_an_account_is_for_all_kinds_together() -> None:
    budget = MemoryBudget(MOST)
    taken = sum(fill(budget.of(kind), "one") for kind in KINDS)
    assert taken == budget.total == budget.held_by("one")
    assert SHARE < taken < MOST * 48 // 128


def test_room_that_is_given_back_goes_to_those_that_wait_in_order() -> None:
    budget = MemoryBudget(MOST)
    replies, got = budget.of("replies"), list[str]()

    def waiter(account: str, size: int) -> None:
        def take() -> bool:
            if not replies.take(account, size):
                return False
            got.append(account)
            return True

        budget.wait(account, take)

    assert replies.take("one", SHARE)
    waiter("one", SHARE)
    waiter("two", SHARE)
    replies.give_back("one", 1)
    assert not got
    replies.give_back("one", SHARE - 1)
    assert got == ["one"]
    assert not budget.is_awaited("one")
    replies.give_back("one", SHARE)
    assert got == ["one", "two"]
    replies.give_back("two", SHARE)
    assert repr(budget) == f"<MemoryBudget 0 of {MOST} bytes for 0 accounts, 0 waiting>"


def test_bytes_that_are_in_memory_already_count_beyond_the_bounds() -> None:
    budget = MemoryBudget(MOST)
    replies = budget.of("replies")
    replies.take_anyway("one", 2 * MOST)
    assert not replies.take("two", 1)
    assert budget.of("bodies").total == 0
    replies.give_back("one", 2 * MOST)
    assert fill(replies, "two") == SHARE


def test_object_of_several_calls_counts_once_for_each_account() -> None:
    budget = MemoryBudget(MOST)
    replies, thing = budget.of("replies"), object()
    for account in ("one", "one", "two"):
        assert replies.take_shared(account, thing, 100)
    assert budget.total == 200
    for account in ("one", "two", "one"):
        replies.give_shared(account, thing, 100)
    assert budget.total == 0
