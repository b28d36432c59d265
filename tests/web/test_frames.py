"""RFC 6455 in detail: valid frames are read however they are cut, and invalid ones get the right close code."""

from __future__ import annotations

import itertools
import os
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.web.websocket import frames
from proxy.web.websocket.frames import (
    BINARY,
    BYTES_PER_FRAGMENT,
    CLOSE,
    CONTINUATION,
    FRAGMENT,
    MAX_FRAGMENTS,
    PING,
    PONG,
    TEXT,
    FrameReader,
    ProtocolViolation,
)

LIMIT = 1 << 16
MASK = b"\x37\xfa\x21\x3d"


def sent(payload: bytes, opcode: int = TEXT, *, final: bool = True, bits: int = 0, mask: bytes | None = MASK) -> bytes:
    """A frame as a client writes it."""
    head = bytes(((0x80 if final else 0) | bits | opcode,))
    masked = 0x80 if mask is not None else 0
    size = len(payload)
    if size < 126:
        head += bytes((masked | size,))
    elif size < 1 << 16:
        head += bytes((masked | 126,)) + size.to_bytes(2, "big")
    else:
        head += bytes((masked | 127,)) + size.to_bytes(8, "big")
    return head + (mask + frames.unmask(payload, mask) if mask is not None else payload)


def read(data: bytes, *, limit: int = LIMIT, cut: int = 0) -> list[frames.Message]:
    """Everything in the bytes, fed whole or in pieces of this size."""
    reader = FrameReader(limit)
    found = []
    for at in range(0, len(data), cut or len(data) or 1):
        reader.feed(data[at : at + (cut or len(data))])
        while (message := reader.take()) is not None:
            if message != FRAGMENT:
                found.append(message)
    return found


def broken(data: bytes, **options: int) -> int:
    with pytest.raises(ProtocolViolation) as caught:
        read(data, **options)
    assert len(caught.value.reason.encode()) <= 123
    return caught.value.code


# Valid frames


def test_example_of_the_rfc_is_read() -> None:
    assert read(bytes.fromhex("818537fa213d7f9f4d5158")) == [(TEXT, b"Hello")]


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 125, 126, 127, 65535, 65536])
def test_message_of_every_length_form_is_read(size: int) -> None:
    text = b"x" * size
    assert read(sent(text)) == [(TEXT, text)]
    assert read(sent(text), cut=997) == [(TEXT, text)]


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 64])
def test_frames_may_be_cut_anywhere(cut: int) -> None:
    data = sent(b"one") + sent(b"", PING) + sent(b"t" * 200) + sent(b"", CLOSE)
    assert read(data, cut=cut) == [(TEXT, b"one"), (PING, b""), (TEXT, b"t" * 200), (CLOSE, b"")]


@pytest.mark.parametrize("cut", [0, 1])
def test_fragments_are_joined_with_control_frames_between(cut: int) -> None:
    data = (
        sent(b"a", final=False)
        + sent(b"!", PING)
        + sent(b"", CONTINUATION, final=False)
        + sent(b"?", PONG)
        + sent(b"b", CONTINUATION)
        + sent(b"c")
    )
    assert read(data, cut=cut) == [(PING, b"!"), (PONG, b"?"), (TEXT, b"ab"), (TEXT, b"c")]


def test_character_may_be_split_over_fragments() -> None:
    euro = "€".encode()
    assert read(sent(euro[:1], final=False) + sent(euro[1:], CONTINUATION)) == [(TEXT, euro)]


@given(st.lists(st.text(max_size=300), max_size=8), st.integers(1, 400), st.binary(min_size=4, max_size=4))
def test_messages_are_read_as_they_were_sent(texts: list[str], cut: int, mask: bytes) -> None:
    data = b"".join(sent(text.encode(), mask=mask) for text in texts)
    assert read(data, cut=cut) == [(TEXT, text.encode()) for text in texts]


def test_reader_reports_an_incomplete_message() -> None:
    reader = FrameReader(LIMIT)
    assert reader.is_between
    reader.feed(sent(b"whole"))
    assert reader.take() == (TEXT, b"whole")
    assert reader.is_between
    reader.feed(sent(b"half", final=False))
    assert reader.take() == FRAGMENT
    assert reader.take() is None
    assert not reader.is_between
    reader.feed(sent(b"", CONTINUATION) + b"\x81")
    assert reader.take() == (TEXT, b"half")
    assert reader.take() is None
    assert not reader.is_between


def test_every_take_reads_one_frame() -> None:
    reader = FrameReader(LIMIT)
    reader.feed(sent(b"", final=False) + sent(b"", CONTINUATION, final=False) + sent(b"", CONTINUATION))
    assert [reader.take() for _ in range(4)] == [FRAGMENT, FRAGMENT, (TEXT, b""), None]


def test_flood_of_empty_fragments_breaks_the_protocol_and_holds_no_memory() -> None:
    reader = FrameReader(LIMIT)
    reader.feed(sent(b"", final=False))
    for _ in range(MAX_FRAGMENTS):
        assert reader.take() == FRAGMENT
        assert repr(reader) == "<FrameReader 0 bytes, in a message>"
        reader.feed(sent(b"", CONTINUATION, final=False))
    with pytest.raises(ProtocolViolation) as caught:
        reader.take()
    assert caught.value.code == 1008


def test_small_fragments_of_a_large_message_are_read() -> None:
    text = b"x" * LIMIT
    part = BYTES_PER_FRAGMENT
    pieces = [text[at : at + part] for at in range(0, LIMIT, part)]
    data = sent(pieces[0], final=False) + b"".join(sent(piece, CONTINUATION, final=False) for piece in pieces[1:])
    assert read(data + sent(b"", CONTINUATION)) == [(TEXT, text)]
    # The next message has its own count.
    empty = (
        sent(b"", final=False) + sent(b"", CONTINUATION, final=False) * (MAX_FRAGMENTS - 1) + sent(b"", CONTINUATION)
    )
    assert read(empty * 2) == [(TEXT, b"")] * 2


def test_message_in_single_bytes_is_copied_once() -> None:
    """Bytes that have arrived must not be copied again for every further byte."""
    whole = sent(b"x" * LIMIT)
    reader = FrameReader(LIMIT)
    found = None
    for at in range(len(whole)):
        assert found is None
        reader.feed(whole[at : at + 1])
        found = reader.take()
    assert found == FRAGMENT  # A large message is returned by a later call.
    assert reader.take() == (TEXT, b"x" * LIMIT)


# Invalid frames


def test_unmasked_frame_breaks_the_protocol() -> None:
    assert broken(sent(b"Hello", mask=None)) == 1002


@pytest.mark.parametrize("bits", [0x40, 0x20, 0x10, 0x70])
def test_reserved_bit_breaks_the_protocol(bits: int) -> None:
    assert broken(sent(b"Hello", bits=bits)) == 1002


@pytest.mark.parametrize("opcode", [3, 4, 5, 6, 7, 11, 12, 13, 14, 15])
def test_unknown_opcode_breaks_the_protocol(opcode: int) -> None:
    assert broken(sent(b"", opcode)) == 1002


def test_binary_is_read_like_text() -> None:
    assert read(sent("{€}".encode(), BINARY)) == [(TEXT, "{€}".encode())]
    assert read(sent(b"{", BINARY, final=False) + sent(b"}", CONTINUATION)) == [(TEXT, b"{}")]
    assert read(sent(b"\xff\x00", BINARY)) == [(TEXT, b"\xff\x00")]
    assert broken(sent(b"{", BINARY) + sent(b"\xff")) == 1007


@pytest.mark.parametrize("opcode", [CLOSE, PING, PONG])
def test_control_frame_must_be_small_and_unfragmented(opcode: int) -> None:
    assert read(sent(b"x" * 125, opcode)) == [(opcode, b"x" * 125)]
    assert broken(sent(b"x" * 126, opcode)) == 1002
    assert broken(sent(b"", opcode, final=False)) == 1002


def test_fragments_out_of_order_break_the_protocol() -> None:
    assert broken(sent(b"no beginning", CONTINUATION)) == 1002
    assert broken(sent(b"a", final=False) + sent(b"another")) == 1002
    assert broken(sent(b"a", final=False) + sent(b"b", CONTINUATION) + sent(b"c", CONTINUATION)) == 1002


@pytest.mark.parametrize(
    "text", [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", "€".encode()[:2], b"{\xe2\x28\xa1}"]
)
def test_text_that_is_not_utf8_is_refused(text: bytes) -> None:
    assert broken(sent(text)) == 1007
    assert broken(sent(text[:1], final=False) + sent(text[1:], CONTINUATION)) == 1007


def test_length_must_have_its_shortest_form() -> None:
    assert broken(b"\x81\xfe\x00\x7d" + MASK) == 1002
    assert broken(b"\x81\xff" + (65535).to_bytes(8, "big") + MASK) == 1002
    assert broken(b"\x81\xff" + (1 << 63).to_bytes(8, "big") + MASK) == 1002


def test_message_over_the_limit_is_refused_by_its_length_alone() -> None:
    head = sent(b"x" * (LIMIT + 1))[:10]
    assert broken(head) == 1009
    assert broken(b"\x81\xff" + ((1 << 62) + 1).to_bytes(8, "big")) == 1009
    piece = sent(b"x" * (LIMIT // 2), final=False)
    more = sent(b"x" * (LIMIT // 2), CONTINUATION, final=False)
    assert read(piece + more) == []
    assert broken(piece + more + sent(b"x", CONTINUATION)) == 1009


def test_control_frame_is_read_in_the_middle_of_a_message_of_full_size() -> None:
    full = sent(b"x" * LIMIT, final=False)
    assert read(full + sent(b"!", PING) + sent(b"", CONTINUATION)) == [(PING, b"!"), (TEXT, b"x" * LIMIT)]


@given(st.binary(max_size=400))
def test_no_bytes_raise_another_exception(data: bytes) -> None:
    with suppress(ProtocolViolation):
        read(data)


# Close frames


@pytest.mark.parametrize(
    "code", [1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 1012, 1013, 1014, 3000, 3999, 4000, 4999]
)
def test_valid_close_codes_are_accepted(code: int) -> None:
    assert frames.close_code(code.to_bytes(2, "big") + "bye €".encode()) == code


@pytest.mark.parametrize("code", [0, 999, 1004, 1005, 1006, 1015, 1016, 1100, 2000, 2999, 5000, 65535])
def test_reserved_close_codes_break_the_protocol(code: int) -> None:
    with pytest.raises(ProtocolViolation) as caught:
        frames.close_code(code.to_bytes(2, "big"))
    assert caught.value.code == 1002


def test_close_without_a_code_is_normal_and_half_a_code_is_refused() -> None:
    assert frames.close_code(b"") == 1000
    with pytest.raises(ProtocolViolation) as caught:
        frames.close_code(b"\x03")
    assert caught.value.code == 1002
    with pytest.raises(ProtocolViolation) as caught:
        frames.close_code(b"\x03\xe8\xff")
    assert caught.value.code == 1007


def test_reason_is_cut_between_characters() -> None:
    frame = frames.close_frame(1013, "€" * 100)
    assert frame[1] == len(frame) - 2 <= 125
    assert frame[4:].decode() == "€" * 41


# Our frames


@pytest.mark.parametrize("size", [0, 125, 126, 65535, 65536, 100_000])
def test_our_frames_follow_the_same_rules(size: int) -> None:
    """Our frames are not masked; with a mask added, our own reader accepts them."""
    text = os.urandom(size // 2).hex().encode().ljust(size, b"0")
    ours = frames.frame(text)
    head = frames.frame_header(size)
    assert ours == head + text
    masked = bytes((head[0], head[1] | 0x80)) + head[2:] + MASK + frames.unmask(text, MASK)
    assert read(masked, limit=1 << 20) == [(TEXT, text)]


def test_payload_of_any_length_is_unmasked() -> None:
    for size, mask in itertools.product(range(9), (b"\x00\x00\x00\x00", MASK, b"\xff\xff\xff\xff")):
        text = bytes(range(size))
        by_hand = bytes(byte ^ mask[at % 4] for at, byte in enumerate(text))
        assert frames.unmask(text, mask) == by_hand
