"""How far a network is, with one, two, three and five upstreams, of which one lags or lies."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.heads import (
    REMEMBERED_BLOCKS,
    SOON_S,
    STALE_S,
    Branch,
    HeadDoubts,
    NetworkHead,
    most_voted,
    preferred,
    short_hash_of,
)
from proxy.core.upstream_health import Standing, UpstreamHealth

BLOCK_S = 12.0
BEHIND = 2


class Chain:
    """Reports of several upstreams, one every few seconds."""

    def __init__(self, *heads: int, operators: str = "") -> None:
        """`operators`: one letter for each upstream. Without it, each has its own."""
        self.heads = NetworkHead(block_time_s=BLOCK_S, finality_blocks=64, behind_blocks=BEHIND)
        self.members = tuple(
            UpstreamHealth(f"up{index}", index=index, operator=operators[index : index + 1])
            for index in range(len(heads))
        )
        self.now = 1000.0
        self.said = ""
        self.report(*heads)

    def report(self, *heads: int | None, after_s: float = BLOCK_S / 2) -> Chain:
        """None: this one does not answer."""
        self.now += after_s
        for member, head in zip(self.members, heads, strict=True):
            if head is not None:
                member.saw_head(head, self.now)
        self.said = self.heads.observe(self.members, self.now)
        return self

    @property
    def lagging(self) -> set[int]:
        return {member.index for member in self.members if member.lagging}


def test_nothing_is_known_before_anyone_has_spoken() -> None:
    chain = Chain(0, 0)
    assert (chain.heads.tip, chain.heads.final, chain.said) == (0, -1, "still")
    assert chain.heads.is_plausible(10**9, chain.now)


def test_single_upstream_is_believed_whatever_it_says() -> None:
    chain = Chain(100)
    assert (chain.heads.tip, chain.said) == (100, "moved")
    assert chain.report(5000).heads.tip == 5000
    assert chain.report(4999).heads.tip == 4999
    assert chain.said == "lowered"
    assert chain.report(3).heads.tip == 3
    assert (chain.said, chain.lagging) == ("reset", set())


@pytest.mark.parametrize(
    ("heads", "tip"),
    [((100,), 100), ((100, 99), 100), ((100, 101, 101), 101), ((101, 100, 99), 100), ((98, 99, 100, 101, 102), 101)],
)
def test_tip_is_what_enough_upstreams_have(heads: tuple[int, ...], tip: int) -> None:
    assert Chain(*heads).heads.tip == tip


@pytest.mark.parametrize("count", [3, 5])
@pytest.mark.parametrize("lead", [10, 1000, 10**12])
def test_one_that_claims_the_future_moves_nothing_from_the_very_first_report(count: int, lead: int) -> None:
    chain = Chain(100 + lead, *[100] * (count - 1))
    assert (chain.heads.tip, chain.lagging) == (100, {0})
    for block in range(101, 120):
        chain.report(block + lead, *[block] * (count - 1))
        assert (chain.heads.tip, chain.lagging) == (block, {0})


def test_impossible_head_counts_before_the_others_have_reported() -> None:
    chain = Chain(100, 100, 100)
    member = chain.members[0]
    for head, is_ahead in ((100_000, True), (101, False)):
        member.saw_head(head, chain.now)
        chain.heads.place(member, chain.now)
        assert (member.ahead, member.lagging) == (is_ahead, is_ahead)


def test_one_of_two_that_claims_the_future_is_not_believed_once_the_two_have_agreed() -> None:
    chain = Chain(100, 100)
    for block in range(101, 120):
        chain.report(block + 1000, block)
        assert (chain.heads.tip, chain.lagging) == (block, {0})


@pytest.mark.parametrize("count", [2, 3, 5])
def test_one_that_is_far_behind_is_out_and_comes_back_when_it_has_caught_up(count: int) -> None:
    chain = Chain(*[100] * count)
    for block in range(101, 120):
        chain.report(1, *[block] * (count - 1))
        assert (chain.heads.tip, chain.lagging) == (block, {0})
    chain.report(119 - BEHIND, *[119] * (count - 1))
    assert chain.lagging == set()


def test_allowance_is_counted_in_blocks_and_ends_where_it_says() -> None:
    chain = Chain(100, 100, 100)
    assert chain.report(103 - BEHIND, 103, 103).lagging == set()
    assert chain.report(103 - BEHIND - 1, 103, 103).lagging == {0}


def test_most_that_lag_have_no_vote_and_the_one_that_goes_on_is_followed() -> None:
    chain = Chain(100, 100, 100)
    for block in range(101, 130):
        chain.report(block, 90, 91)
    assert (chain.heads.tip, chain.lagging) == (129, {1, 2})


def test_reports_that_are_old_have_no_vote() -> None:
    chain = Chain(100, 100, 100)
    for block in range(101, 140):
        chain.report(block, None, None)
    assert chain.heads.tip == 139
    assert 0 not in chain.lagging


def test_without_any_report_nothing_changes() -> None:
    chain = Chain(100, 100, 100)
    heard_at = chain.heads.heard_at
    chain.report(None, None, None, after_s=STALE_S + 1)
    assert (chain.said, chain.heads.tip, chain.heads.heard_at) == ("still", 100, heard_at)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_chain_that_was_reset_is_believed_when_all_say_so(count: int) -> None:
    chain = Chain(*[1000] * count)
    chain.report(*[3] * count)
    assert (chain.heads.tip, chain.said, chain.lagging) == (3, "reset", set())
    assert chain.report(*[4] * count).heads.tip == 4


def test_reset_is_not_believed_while_one_still_has_the_old_head() -> None:
    chain = Chain(1000, 1000, 1000).report(3, 3, 1000)
    assert (chain.heads.tip, chain.lagging) == (1000, {0, 1})


@pytest.mark.parametrize(
    ("heads", "after", "tip", "said"),
    [
        ((100, 100, 100), (99, 99, 99), 99, "lowered"),
        ((100, 100, 100), (98, 98, 100), 98, "lowered"),
        ((100, 100), (98, 98), 98, "lowered"),
        ((100, 99), (98, 99), 99, "lowered"),
        # One of several has lost the block: the others still have it.
        ((100, 100, 100), (98, 100, 100), 100, "still"),
        ((100, 100), (98, 100), 100, "still"),
        # An upstream that falls silent has lost nothing.
        ((101, 101, 99, 99), (101, None, 99, 99), 101, "still"),
    ],
)
def test_block_that_most_of_its_upstreams_have_lost_is_gone(
    heads: tuple[int, ...], after: tuple[int | None, ...], tip: int, said: str
) -> None:
    chain = Chain(*heads).report(*after, after_s=1.0)
    assert (chain.heads.tip, chain.said) == (tip, said)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_upstream_that_claims_the_future_does_not_keep_the_head_of_the_other_from_going_back(depth: int) -> None:
    chain = Chain(100, 100).report(1101, 101)
    assert chain.report(1101 - depth, 101 - depth, after_s=1.0).heads.tip == 101 - depth


def test_head_moves_on_from_the_block_that_it_went_back_to() -> None:
    chain = Chain(100, 100, 100).report(98, 98, 98)
    assert chain.report(99, 98, 98).heads.tip == 98
    assert chain.report(99, 99, 98).heads.tip == 99
    assert chain.report(100, 99, 99).heads.tip == 99


def test_upstream_that_is_ahead_of_what_is_possible_is_not_said_to_lag_behind() -> None:
    chain = Chain(100, 100, 100).report(101, 101, 1000)
    assert [member.ahead for member in chain.members] == [False, False, True]
    assert chain.lagging == {2}


@pytest.mark.parametrize("standing", ["forked", "wrong_chain", "unchecked"])
def test_upstream_of_another_chain_or_branch_has_no_vote(standing: Standing) -> None:
    chain = Chain(100, 100)
    chain.members[0].set_standing(standing, chain.now)
    assert chain.report(101, 100).heads.tip == 100
    assert chain.report(101, 99).heads.tip == 99


# The branch


def test_block_is_replaced_when_its_hash_or_its_parent_differs() -> None:
    branch = Branch()
    assert not branch.note(100, "100a", "99a")
    assert not branch.note(100, "100a", "99a")
    assert not branch.note(101, "101a", "100a")
    assert branch.note(101, "101b", "100a")
    assert not branch.note(102, "102b", "101b")
    assert branch.note(103, "103c", "102c")
    assert not branch.note(90, "90c", "")


def test_branch_remembers_a_bounded_number_of_blocks() -> None:
    branch = Branch()
    for number in range(2000):
        assert not branch.note(number, f"{number}", f"{number - 1}")
    assert repr(branch) == f"<Branch of {REMEMBERED_BLOCKS} blocks>"


def test_most_voted_hash_wins_and_a_tie_goes_to_the_longer_branch() -> None:
    members = Chain(100, 100, 101).members
    votes = list(zip(members, ["a", "a", "b"], strict=True))
    assert most_voted(votes) == ["a"]
    assert most_voted(votes[1:]) == ["a", "b"]
    assert preferred(["a", "b"], votes[1:]) == "b"
    assert most_voted([]) == []


# Operators


@pytest.mark.parametrize(
    ("operators", "hashes", "most"),
    [
        # Two of one operator against one each of two others, and against one other.
        ("aabc", "XXYY", "Y"),
        ("aab", "XXY", "XY"),
        # The upstreams of one operator: most of them decide what it votes for.
        ("aaa", "XXY", "X"),
        ("aa", "XY", "XY"),
        ("aab", "XYY", "Y"),
        ("aaabbc", "XXYYYX", "X"),
    ],
)
def test_operator_has_one_vote_for_a_branch(operators: str, hashes: str, most: str) -> None:
    members = Chain(*[100] * len(operators), operators=operators).members
    assert most_voted(list(zip(members, hashes, strict=True))) == [*most]


@pytest.mark.parametrize(
    ("operators", "heads", "agreed"),
    [
        ("aabc", (103, 103, 100, 100), 100),
        ("aabc", (100, 99, 103, 102), 102),
        # With fewer than three operators, a single upstream decides nothing.
        ("aaa", (103, 100, 100), 100),
        ("aab", (103, 100, 100), 100),
    ],
)
def test_operator_alone_does_not_move_the_head(operators: str, heads: tuple[int, ...], agreed: int) -> None:
    chain = Chain(*[100] * len(operators), operators=operators)
    assert chain.report(*heads).heads.agreed == agreed


@pytest.mark.parametrize(("operators", "agreed"), [("baa", 100), ("bac", 10**6), ("aaa", 10**6)])
def test_impossible_head_needs_a_second_operator_while_the_others_are_away(operators: str, agreed: int) -> None:
    chain = Chain(100, 100, 100, operators=operators)
    chain.members[0].standing = "forked"
    assert chain.report(100, 10**6, 10**6, after_s=1.0).heads.agreed == agreed


@pytest.mark.parametrize(
    ("operators", "after", "tip"),
    [
        ("aab", (98, 98, 100), 100),
        ("aabc", (98, 98, 100, 100), 100),
        ("aabc", (98, 98, 98, 100), 98),
        ("aaa", (98, 98, 100), 98),
    ],
)
def test_operator_alone_does_not_take_a_block_back(operators: str, after: tuple[int, ...], tip: int) -> None:
    chain = Chain(*[100] * len(operators), operators=operators)
    assert chain.report(*after, after_s=1.0).heads.tip == tip


def test_mark_tells_hashes_apart_and_fits_the_shared_memory() -> None:
    marks = {short_hash_of(str(number)) for number in range(1000)}
    assert len(marks) == 1000
    assert all(0 < mark < 1 << 63 for mark in marks)


# The tip


def test_announced_block_raises_the_tip_and_no_upstream_lags_for_it() -> None:
    chain = Chain(100, 100, 100)
    chain.heads.raise_to(101)
    assert chain.heads.tip == 101
    chain.report(101, 100, 100)
    assert (chain.heads.tip, chain.heads.agreed, chain.lagging) == (101, 100, set())
    chain.heads.raise_to(100)
    assert chain.heads.tip == 101


def test_block_is_plausible_as_far_as_the_time_that_passed_allows() -> None:
    chain = Chain(100, 100, 100)
    assert chain.heads.is_plausible(100 + BEHIND, chain.now)
    assert not chain.heads.is_plausible(110, chain.now)
    assert chain.heads.is_plausible(110, chain.now + 2 * BLOCK_S)
    assert not chain.heads.is_plausible(1100, chain.now + 10 * BLOCK_S)


def test_final_is_counted_from_the_agreed_head_and_not_from_an_announced_one() -> None:
    chain = Chain(100, 100, 100)
    chain.heads.raise_to(102)
    assert chain.heads.final == 100 - 64


@given(st.lists(st.tuples(*[st.integers(-1, 1)] * 3), max_size=60), st.sampled_from([-1000, 10, 1000]))
def test_tip_never_goes_back_and_stays_with_the_honest_whatever_one_says(
    steps: list[tuple[int, ...]], lie: int
) -> None:
    """Three honest upstreams at most one block apart, and one liar."""
    chain = Chain(2000 + lie, 2000, 2000, 2000)
    block, tip, honest = 2000, chain.heads.tip, [2000] * 3
    for step in steps:
        block += 1
        honest = [max(before, block + each) for before, each in zip(honest, step, strict=True)]
        chain.report(block + lie, *honest)
        assert tip <= chain.heads.tip <= max(honest) + 1
        tip = chain.heads.tip
        assert not chain.lagging & {1, 2, 3}


@pytest.mark.parametrize(
    ("found", "asked_at", "has_moved"),
    [(102, 1.0, False), (101, 2.5, True), (101, 3.0, False), (103, 1.0, False), (102, 2.5, False)],
)
def test_poll_that_was_sent_before_the_head_rose_does_not_take_it_back(
    found: int, asked_at: float, has_moved: bool
) -> None:
    health = UpstreamHealth("up")
    health.saw_head(101, 2.0)
    health.saw_head(102, 3.0)
    assert health.has_moved_since(asked_at, found) is has_moved


@pytest.mark.parametrize(("found", "asked_at", "has_moved"), [(102, 2.5, True), (102, 3.0, False), (100, 2.5, False)])
def test_poll_that_was_sent_before_the_head_went_back_does_not_raise_it(
    found: int, asked_at: float, has_moved: bool
) -> None:
    health = UpstreamHealth("up")
    health.saw_head(102, 2.0)
    health.saw_head(100, 3.0)
    assert health.has_moved_since(asked_at, found) is has_moved


@pytest.mark.parametrize("count", [1, 2, 3])
def test_shorter_branch_that_another_worker_has_found_is_not_left_for_older_reports(count: int) -> None:
    chain = Chain(*[105] * count)
    chain.heads.lower_to(103, chain.members, chain.now)
    assert chain.report(*[None] * count, after_s=0.1).heads.tip == 103
    assert chain.report(*[103] * count, after_s=0.1).heads.tip == 103
    assert chain.report(*[104] * count).heads.tip == 104


def test_head_is_in_doubt_while_some_have_lost_it() -> None:
    chain = Chain(105, 105, 105)
    assert not chain.heads.is_doubtful(chain.members, chain.now)
    chain.report(103, 105, 105)
    assert chain.heads.is_doubtful(chain.members, chain.now)
    chain.members[0].set_standing("forked", chain.now)
    assert chain.heads.is_doubtful(chain.members, chain.now)
    assert not chain.heads.is_doubtful(chain.members, chain.now + 2 * STALE_S)
    chain.members[0].set_standing("good", chain.now)
    assert chain.report(103, 103, 105).said == "lowered"
    assert not chain.heads.is_doubtful(chain.members, chain.now)


def test_doubts_that_were_wrong_are_checked_ever_more_rarely() -> None:
    doubts, now, checks = HeadDoubts(), 1000.0, 0
    assert doubts.check_at == math.inf
    for _ in range(6000):
        now += 0.01
        doubts.doubt(100)
        if doubts.check_at <= now:
            checks += 1
            doubts.checked(100, now)
    # At 0, 0.2, 0.6, 1.4 … seconds of a minute.
    assert checks == 9
    doubts.doubt(100)
    doubts.checked(98, now)
    assert doubts.check_at == math.inf
    doubts.doubt(98)
    assert doubts.check_at == now + SOON_S
