"""The size of the next range of blocks."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from proxy.core.range_size import FIRST_BLOCKS, GOOD_LOGS, MOST_BLOCKS, PATIENCE, RangeSize


def test_span_doubles_while_replies_are_small_up_to_its_limit() -> None:
    span = RangeSize()
    sizes = []
    for _ in range(14):
        sizes.append(span.blocks)
        span.read(span.blocks, 0)
    assert sizes[:4] == [FIRST_BLOCKS, 2 * FIRST_BLOCKS, 4 * FIRST_BLOCKS, 8 * FIRST_BLOCKS]
    assert sizes[-1] == MOST_BLOCKS


def test_span_shrinks_in_proportion_to_a_large_reply() -> None:
    span = RangeSize()
    span.read(FIRST_BLOCKS, 0)
    span.read(16, 4 * GOOD_LOGS)
    assert span.blocks == 4
    span.read(1, 100 * GOOD_LOGS)
    assert span.blocks == 1


def test_refused_span_stays_below_what_was_refused_until_it_is_tried_again() -> None:
    span = RangeSize()
    span.refused(100)
    for _ in range(PATIENCE - 1):
        span.read(span.blocks, 0)
    assert span.blocks == 100
    span.read(100, 0)
    assert span.blocks == 200
    span.refused(0)
    assert span.blocks == 1


REFUSED = st.integers(-5, MOST_BLOCKS)
# A reader requests at most MOST_BLOCKS at a time.
READ = st.tuples(st.integers(1, MOST_BLOCKS), st.integers(0, 10**6))


@given(st.lists(st.one_of(REFUSED, READ)))
@example([(MOST_BLOCKS, GOOD_LOGS + 1)])
def test_span_is_never_empty_and_never_above_its_limit(replies: list[int | tuple[int, int]]) -> None:
    span = RangeSize()
    for reply in replies:
        if isinstance(reply, int):
            span.refused(reply)
        else:
            span.read(*reply)
        assert 1 <= span.blocks <= MOST_BLOCKS, span
