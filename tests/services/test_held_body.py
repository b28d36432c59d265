"""The life of a large result between its upstream and its client: `held_body.TRANSITIONS`, event by event."""

from __future__ import annotations

import pytest

from proxy import compiled
from proxy.core.upstream_health import UpstreamHealth
from proxy.memory_budget import BudgetLine, MemoryBudget
from proxy.services.rpc.held_body import FREE_BYTES, TRANSITIONS, HeldBody, ReplyShare
from proxy.services.rpc.streamed_reply import MOST_UNREAD, StreamedReply
from proxy.wire.upstream import Upstream, UpstreamConnection

pytestmark = pytest.mark.skipif(
    compiled.in_use(), reason="a connection of this test cannot inherit from a compiled one: make source runs it"
)

# The smallest result that is counted.
LARGE = 2 * FREE_BYTES


class Source(UpstreamConnection):
    """A connection that sends a large reply, and is only paused and resumed."""

    def __init__(self) -> None:
        super().__init__(Upstream(UpstreamHealth("upstream"), depth=1, batch=1))
        self.is_paused = False

    @property
    def bytes_left(self) -> int:
        return LARGE

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False


class Reader:
    """The owner of a held body, with room for one large result in its account."""

    def __init__(self) -> None:
        self.replies: BudgetLine = MemoryBudget(8 * LARGE).of("replies")
        self.share = ReplyShare(self.replies, "one")
        self.source = Source()
        self.given_up = 0
        self.body = HeldBody(self.share, self.source, self._give_up)

    def _give_up(self) -> None:
        self.given_up += 1

    def fill(self) -> int:
        """Take the account's room. Returns how much that was."""
        size = 0
        while self.replies.take("one", FREE_BYTES):
            size += FREE_BYTES
        return size


def test_result_with_room_is_held_and_counted_once() -> None:
    reader = Reader()
    assert reader.body.hold(LARGE, may_wait=True)
    assert (reader.body.state, reader.replies.total, reader.source.is_paused) == ("holding", LARGE, False)
    assert reader.body.add(b"a" * LARGE)
    assert (reader.body.size, reader.replies.total) == (LARGE, LARGE)
    reader.body.end()
    assert reader.body.state == "over"
    reader.body.drop()
    assert reader.replies.total == 0


def test_result_without_room_stays_unread_until_others_gave_back_theirs() -> None:
    reader = Reader()
    size = reader.fill()
    assert not reader.body.hold(LARGE, may_wait=False)
    assert reader.body.hold(LARGE, may_wait=True)
    assert (reader.body.state, reader.source.is_paused) == ("unread", True)
    assert reader.body.add(b"the beginning has arrived already")
    reader.replies.give_back("one", size)
    assert (reader.body.state, reader.source.is_paused) == ("holding", False)
    assert reader.source.on_stalled is None
    reader.body.drop()
    assert reader.replies.total == 0


@pytest.mark.parametrize("ends", [True, False])
def test_unread_result_leaves_the_line_when_its_turn_comes_or_when_it_ends(ends: bool) -> None:
    reader = Reader()
    size = reader.fill()
    assert reader.body.hold(LARGE, may_wait=True)
    reader.body.end() if ends else reader.body.turn_came()
    assert (reader.body.state, reader.source.is_paused) == ("over" if ends else "passing", False)
    reader.replies.give_back("one", size)
    assert reader.replies.total == 0


def test_unread_result_is_given_up_if_others_need_its_connection() -> None:
    reader = Reader()
    reader.fill()
    assert reader.body.hold(LARGE, may_wait=True)
    reader.source.evict_reader()
    assert reader.given_up == 1


@pytest.mark.parametrize("has_room", [True, False])
def test_rest_of_a_result_that_its_client_does_not_read_is_held_or_given_up(has_room: bool) -> None:
    reader = Reader()
    reader.body.client_stalled()
    assert (reader.body.state, reader.source.is_paused) == ("paused", True)
    if not has_room:
        reader.fill()
    reader.body.on_evicted()
    assert (reader.body.state, reader.given_up) == (("holding", 0) if has_room else ("paused", 1))
    assert reader.source.is_paused == (not has_room)
    if has_room:
        assert reader.replies.total == LARGE
        reader.body.client_reads()
        assert (reader.body.state, reader.replies.total) == ("passing", 0)


def test_client_that_stalls_again_can_be_evicted_again() -> None:
    reader = Reader()
    for _ in range(2):
        reader.body.client_stalled()
        reader.source.evict_reader()
        assert (reader.body.state, reader.source.is_paused, reader.replies.total) == ("holding", False, LARGE)
        reader.body.client_reads()
    reader.fill()
    reader.body.client_stalled()
    reader.source.evict_reader()
    assert reader.given_up == 1


def test_room_of_pieces_that_are_passed_on_is_given_back() -> None:
    reader = Reader()
    assert reader.body.hold(LARGE, may_wait=True)
    reader.body.turn_came()
    reader.body.passed_on(LARGE)
    assert reader.replies.total == 0


async def streamed(reader: Reader) -> StreamedReply:
    """The reply to a REST request whose body has filled what its client may leave unread."""
    reply = StreamedReply(reader.share)
    beginning = b'{"status":200,"body":' + b"a" * MOST_UNREAD
    reply.on_stream(memoryview(beginning), len(beginning) + LARGE, reader.source)
    assert (reply.length, reader.source.is_paused) == (MOST_UNREAD + LARGE, False)
    reply.on_stream_piece(b"b")
    assert reader.source.is_paused
    return reply


async def test_body_of_a_rest_reply_is_read_on_when_its_client_reads() -> None:
    reader = Reader()
    reply = await streamed(reader)
    assert await reply.next_piece() == b"a" * MOST_UNREAD
    assert not reader.source.is_paused
    reply.on_stream_end()
    assert [await reply.next_piece(), await reply.next_piece()] == [b"b", b""]
    assert reader.replies.total == 0


async def test_rest_of_a_rest_reply_is_held_if_others_need_the_connection() -> None:
    reader = Reader()
    reply = await streamed(reader)
    reader.source.evict_reader()
    assert (reader.source.is_paused, reader.replies.total) == (False, LARGE)
    reply.on_stream_piece(b"c" * LARGE)
    reply.on_stream_end()
    assert not reader.source.is_paused
    assert len(b"".join([await reply.next_piece() for _ in range(3)])) == MOST_UNREAD + 1 + LARGE
    reply.drop()
    assert reader.replies.total == 0


async def test_rest_reply_is_cut_off_if_there_is_no_room_for_its_rest() -> None:
    reader = Reader()
    reply = await streamed(reader)
    size = reader.fill()
    reader.source.evict_reader()
    assert [len(await reply.next_piece()), await reply.next_piece()] == [MOST_UNREAD, b"b"]
    with pytest.raises(ConnectionAbortedError):
        await reply.next_piece()
    reply.drop()
    assert reader.replies.total == size


def test_every_state_can_end_and_none_begins_again() -> None:
    assert {state for state, events in TRANSITIONS.items() if events.get("end") == "over"} == set(TRANSITIONS)
    assert set(TRANSITIONS["over"].values()) == {"over"}
