"""A listener that applies all steps holds the canonical chain, whatever forks there are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.head_chain import BrokenPath, ChainBlock, HeadChain


class World:
    """Every block ever made, and a listener that applies each step."""

    def __init__(self, depth: int = 128) -> None:
        genesis = ChainBlock(0, "g", "")
        self.blocks = {"g": genesis}
        self.made = [genesis]
        self.depth = depth
        self.chain = HeadChain(depth)
        self.view: list[ChainBlock] = []
        self.fetched = 0
        # Blocks that can no longer be had.
        self.lost: set[str] = set()

    def make(self, parent: ChainBlock) -> ChainBlock:
        block = ChainBlock(parent.number + 1, f"{parent.number + 1}-{len(self.made)}", parent.hash)
        self.blocks[block.hash] = block
        self.made.append(block)
        return block

    def extend(self, parent: ChainBlock, count: int) -> ChainBlock:
        for _ in range(count):
            parent = self.make(parent)
        return parent

    def announce(self, head: ChainBlock) -> tuple[list[ChainBlock], list[ChainBlock]]:
        """As the feed does it."""
        if self.chain.knows(head.hash):
            return [], []
        removed, added = self.chain.apply(self.path_to(head))
        for block in removed:
            # The view begins with the first head; older blocks are not in it.
            assert not self.view or self.view.pop() == block
        for block in added:
            # Blocks that are too old to be remembered are not removed.
            assert not self.view or block.parent == self.view[-1].hash
            self.view.append(block)
        del self.view[: -self.depth]
        return removed, added

    def path_to(self, head: ChainBlock) -> list[ChainBlock]:
        path = [head]
        while True:
            if (missing := self.chain.next_missing(path)) is not None:
                path.insert(0, self.blocks[missing])
            elif (older := self.chain.next_older(path)) is not None and older not in self.lost:
                self.chain.put_under([self.blocks[older]])
            else:
                return path
            self.fetched += 1

    def line_of(self, head: ChainBlock) -> list[ChainBlock]:
        line = [head]
        while line[0].parent:
            line.insert(0, self.blocks[line[0].parent])
        return line


def numbers(blocks: list[ChainBlock]) -> list[int]:
    return [block.number for block in blocks]


def test_first_head_is_the_beginning() -> None:
    world = World()
    head = world.extend(world.made[0], 5)
    assert world.announce(head) == ([], [head])
    assert world.chain.tip == head
    assert world.fetched == 0


def test_next_head_continues_and_the_same_again_is_nothing() -> None:
    world = World()
    world.announce(first := world.make(world.made[0]))
    second = world.make(first)
    assert world.announce(second) == ([], [second])
    assert world.announce(second) == world.announce(first) == ([], [])


def test_gap_is_filled_in_order() -> None:
    world = World()
    world.announce(first := world.make(world.made[0]))
    removed, added = world.announce(world.extend(first, 4))
    assert (removed, numbers(added)) == ([], [2, 3, 4, 5])


@pytest.mark.parametrize("one_by_one", [True, False])
def test_three_blocks_are_removed_newest_first_and_the_new_ones_added(one_by_one: bool) -> None:
    world = World()
    world.announce(base := world.make(world.made[0]))
    old = world.line_of(world.extend(base, 3))[2:]
    for block in old:
        world.announce(block)
    new = world.line_of(world.extend(base, 4))[2:]
    reported = [world.announce(block) for block in (new if one_by_one else new[-1:])]
    assert [block for removed, _ in reported for block in removed] == old[::-1]
    assert [block for _, added in reported for block in added] == new
    assert world.view == [base, *new]


def test_shorter_chain_takes_the_place_of_a_longer_one() -> None:
    world = World()
    world.announce(base := world.make(world.made[0]))
    world.announce(world.extend(base, 5))
    removed, added = world.announce(other := world.make(base))
    assert (numbers(removed), added) == ([6, 5, 4, 3, 2], [other])


def test_reset_below_what_is_remembered_takes_everything_back() -> None:
    world = World(depth=4)
    world.announce(start := world.extend(world.made[0], 10))
    world.announce(world.extend(start, 6))
    assert world.chain.floor == 13
    removed, added = world.announce(world.extend(world.made[0], 17))
    assert numbers(removed) == [16, 15, 14, 13]
    assert numbers(added) == [13, 14, 15, 16, 17]


def test_reorganisation_below_the_first_block_looks_for_where_the_chains_part() -> None:
    world = World()
    fork = world.extend(world.made[0], 6)
    start = world.extend(fork, 4)
    world.announce(start)
    assert world.chain.floor == 10
    new = world.line_of(world.extend(fork, 5))
    removed, added = world.announce(new[-1])
    # Blocks under the floor were never sent, so they are not in the view.
    assert numbers(removed) == [10, 9, 8, 7]
    assert added == new[7:]


def test_restarted_chain_is_followed_from_its_head() -> None:
    world = World()
    world.announce(world.extend(world.made[0], 10))
    world.lost = set(world.blocks)
    fresh = world.extend(world.made[0], 2)
    assert numbers(world.announce(fresh)[0]) == [10]
    assert world.view == [fresh]


def test_blocks_that_do_not_follow_each_other_change_nothing() -> None:
    chain = HeadChain()
    chain.apply([ChainBlock(1, "a", "")])
    for path in ([ChainBlock(3, "b", "a")], [ChainBlock(2, "b", "a"), ChainBlock(3, "c", "x")]):
        with pytest.raises(BrokenPath):
            chain.apply(path)
        assert chain.tip == ChainBlock(1, "a", "")


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6), st.booleans()), max_size=40))
def test_listener_holds_the_canonical_chain_after_any_forks(steps: list[tuple[int, int, bool]]) -> None:
    """Each step makes some blocks on one of the last that were made; some of the heads are never heard of."""
    world = World()
    world.announce(world.made[0])
    for back, count, heard in steps:
        head = world.extend(world.made[max(0, len(world.made) - 1 - back)], count)
        if heard:
            reported = [world.view[:], *world.announce(head)]
            assert world.view == world.line_of(head)
            # A block that is removed and added again in one step would be sent for nothing.
            assert not set(map(id, reported[1])) & set(map(id, reported[2]))
    assert world.chain.tip == world.view[-1]


@settings(deadline=None)
@given(st.integers(2, 6), st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), max_size=30))
def test_memory_is_bounded_and_the_tip_is_always_the_head(depth: int, steps: list[tuple[int, int]]) -> None:
    world = World(depth)
    for back, count in steps:
        head = world.extend(world.made[max(0, len(world.made) - 1 - back)], count)
        world.chain.apply(world.path_to(head))
        assert world.chain.tip == head
        assert len(world.chain._blocks) == len(world.chain._by_hash) <= depth
