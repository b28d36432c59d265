"""Server-sent events, by the rules and the examples of the HTML specification (9.2.6)."""

from __future__ import annotations

import random

import pytest

from proxy.core.event_stream import BadEvents, EventReader, SentEvent, comment

BODY = (
    b'\xef\xbb\xbf: a comment\n\nevent: head\ndata: {"slot":"1"}\n\r\ndata:first\ndata:  second\nid: 7\r\rretry: 10\n\n'
    b"event:block\r\ndata\r\n\r\nevent: lost\n\ndata: tail"
)
EVENTS = [SentEvent(b"head", b'{"slot":"1"}'), SentEvent(b"", b"first\n second"), SentEvent(b"block", b"")]


def test_events_are_read_as_the_specification_says() -> None:
    assert EventReader().feed(BODY) == EVENTS


@pytest.mark.parametrize("seed", range(50))
def test_pieces_do_not_matter(seed: int) -> None:
    rng, reader, found = random.Random(seed), EventReader(), []
    at = 0
    while at < len(BODY):
        end = at + rng.randint(0, 5)
        found += reader.feed(BODY[at:end])
        at = end
    assert found == EVENTS


def test_written_event_is_read_again() -> None:
    written = b"".join(each.encoded() for each in EVENTS)
    assert EventReader().feed(written + comment("a\nb")) == EVENTS


def test_event_that_never_ends_is_refused() -> None:
    reader = EventReader(longest=100)
    for _ in range(8):
        assert reader.feed(b"data: 12345\n") == []
    with pytest.raises(BadEvents, match="longer than 100"):
        reader.feed(b"data: 12345\n")
