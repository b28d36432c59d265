"""Reply heads and chunked bodies, as good upstreams send them and as hostile ones might."""

from __future__ import annotations

import itertools
import time
from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.wire.http1 import CHUNKED, UNTIL_CLOSE, BadReply, Chunks, ReplyHeaders, read_headers
from tests.wire.upstreams import chunked


def head(*lines: bytes, status: bytes = b"HTTP/1.1 200 OK") -> ReplyHeaders:
    return read_headers(b"\r\n".join((status, *lines, b"", b"")))


# Heads


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"HTTP/1.1 200 OK", 200),
        (b"HTTP/1.1 200 ", 200),
        (b"HTTP/1.1 200", 200),
        (b"HTTP/1.1 404 Not Found: sorry", 404),
        (b"HTTP/1.0 599 \xe9", 599),
        (b"HTTP/1.1 100 Continue", 100),
    ],
)
def test_status_line_is_read(line: bytes, status: int) -> None:
    assert head(b"Content-Length: 1", status=line).status == status


NO_STATUS_LINES = (
    b"", b"200 OK", b"HTTP/1.1", b"HTTP/1.1 ", b"HTTP/1.1 20", b"HTTP/1.1 2000", b"HTTP/1.1 600 X", b"HTTP/1.1 099 X",
    b"HTTP/2 200 OK", b"HTTP/1.2 200 OK", b"HTTP/11 200 OK", b"http/1.1 200 OK", b"HTTP/1.1  200 OK", b" HTTP/1.1 200 OK",
    b"\r\nHTTP/1.1 200 OK", b"HTTP/1.1\t200 OK", b"HTTP/1.1 +20 OK", b"HTTP/1.1 200 O\nK", b"HTTP/1.1 200 O\rK",
    b"HTTP/1.1 101 Switching Protocols", b"ICY 200 OK", b"POST / HTTP/1.1",
)  # fmt: skip


@pytest.mark.parametrize("line", NO_STATUS_LINES)
def test_anything_else_in_its_place_is_refused(line: bytes) -> None:
    with pytest.raises(BadReply):
        head(b"Content-Length: 1", status=line)


@pytest.mark.parametrize(
    ("lines", "length", "close"),
    [
        ([b"Content-Length: 5"], 5, False),
        ([b"content-length:5"], 5, False),
        ([b"CONTENT-LENGTH: \t 5 \t"], 5, False),
        ([b"Content-Length: 0"], 0, False),
        ([b"Content-Length: 007"], 7, False),
        ([b"Transfer-Encoding: chunked"], CHUNKED, False),
        ([b"transfer-encoding:CHUNKED"], CHUNKED, False),
        ([], UNTIL_CLOSE, True),
        ([b"Connection: close", b"Content-Length: 5"], 5, True),
        ([b"Connection: Keep-Alive, Close", b"Content-Length: 5"], 5, True),
        ([b"Connection: close", b"Connection: keep-alive", b"Content-Length: 5"], 5, True),
        ([b"Connection: keep-alive", b"Connection: close", b"Content-Length: 5"], 5, True),
        ([b"Connection: keep-alive", b"Content-Length: 5"], 5, False),
        ([b"X-Content-Length: 9", b"Content-Length: 5", b"Content-Lengths: 3"], 5, False),
        ([b"Set-Cookie: a", b"Set-Cookie: b", b"Date: x", b"Date: y", b"Content-Length: 5"], 5, False),
        ([b"X-Odd: \xff\xe9 : ;", b"Content-Length: 5"], 5, False),
    ],
)
def test_framing_is_read(lines: list[bytes], length: int, close: bool) -> None:
    found = head(*lines)
    assert (found.length, found.close, found.plain) == (length, close, True)


@pytest.mark.parametrize(
    "lines",
    [
        [b"Content-Length: 5", b"Content-Length: 5"],
        [b"Content-Length: 5", b"content-length: 6"],
        [b"Content-Length: 5", b"Transfer-Encoding: chunked"],
        [b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"],
        [b"Transfer-Encoding: gzip, chunked"],
        [b"Transfer-Encoding: chunked, gzip"],
        [b"Transfer-Encoding: identity"],
        [b"Transfer-Encoding: xchunked"],
        [b"Transfer-Encoding:"],
        [b"Content-Length:"],
        [b"Content-Length: +5"],
        [b"Content-Length: -5"],
        [b"Content-Length: 5, 5"],
        [b"Content-Length: 0x5"],
        [b"Content-Length: 5 5"],
        [b"Content-Length: 1_0"],
        ["Content-Length: ٥".encode()],
        [b"Content-Length: " + b"9" * 16],
        [b"Content-Length : 5"],
        [b"Content-Length\t: 5"],
        [b" Content-Length: 5"],
        [b"Transfer-Encoding : chunked", b"Content-Length: 5"],
        [b"X: y", b" Content-Length: 5"],
        [b"X: y", b"\tfolded", b"Content-Length: 5"],
        [b"X: y\nContent-Length: 5", b"Content-Length: 6"],
        [b"X: y\rContent-Length: 5", b"Content-Length: 6"],
        [b"X: y\0", b"Content-Length: 6"],
        [b"X", b"Content-Length: 5"],
        [b": y", b"Content-Length: 5"],
        [b"X Y: z", b"Content-Length: 5"],
        ["X-é: z".encode(), b"Content-Length: 5"],
    ],
)
def test_framing_that_two_readers_may_read_differently_is_refused(lines: list[bytes]) -> None:
    with pytest.raises(BadReply):
        head(*lines)


@pytest.mark.parametrize("status", [b"100 Continue", b"103 Early Hints", b"204 No Content", b"304 Not Modified"])
def test_replies_without_a_body_have_none_whatever_they_say(status: bytes) -> None:
    assert head(b"Content-Length: 5", status=b"HTTP/1.1 " + status).length == 0
    assert head(status=b"HTTP/1.1 " + status).length == 0


def test_old_version_closes_unless_it_says_otherwise() -> None:
    old = b"HTTP/1.0 200 OK"
    assert head(b"Content-Length: 5", status=old).close
    assert not head(b"Content-Length: 5", b"Connection: keep-alive", status=old).close
    assert head(b"Connection: keep-alive", status=old).close


@pytest.mark.parametrize(
    ("value", "plain"), [(b"gzip", False), (b"identity", True), (b"Identity", True), (b"br, gzip", False)]
)
def test_compression_is_noticed(value: bytes, plain: bool) -> None:
    assert head(b"Content-Length: 5", b"Content-Encoding: " + value).plain is plain


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"7", 7),
        (b"0", 0),
        (b"soon", 0),
        (b"-1", 0),
        (b"1" * 9, 111_111_111),
        (b"1" * 10, 0),
        (b"Wed, 21 Oct 2015 07:28:00 GMT", 0),
        (b"Wed, 99 Oct 9999999 07:28:00 GMT", 0),
    ],
)
def test_pause_asked_for_is_read(value: bytes, seconds: int) -> None:
    assert head(b"Content-Length: 5", b"Retry-After: " + value, status=b"HTTP/1.1 429 X").retry_after_s == seconds


def test_pause_asked_for_as_a_date_is_read() -> None:
    date = formatdate(time.time() + 1000, usegmt=True).encode()
    found = head(b"Content-Length: 5", b"Retry-After: " + date, status=b"HTTP/1.1 503 X")
    assert 900 < found.retry_after_s <= 1001
    assert found.wants_rest


@pytest.mark.parametrize(
    ("status", "lines", "wants_rest"),
    [
        (b"429", [], True),
        (b"429", [b"Retry-After: 3"], True),
        (b"503", [b"Retry-After: 3"], True),
        (b"503", [b"Retry-After: 0"], False),
        (b"503", [], False),
        (b"200", [b"Retry-After: 3"], False),
    ],
)
def test_upstream_asks_for_rest_by_429_or_by_503_with_a_time(
    status: bytes, lines: list[bytes], wants_rest: bool
) -> None:
    assert head(b"Content-Length: 5", *lines, status=b"HTTP/1.1 " + status + b" X").wants_rest is wants_rest


@given(st.binary(max_size=120))
def test_any_bytes_are_a_head_or_refused(data: bytes) -> None:
    try:
        found = read_headers(data + b"\r\n\r\n")
    except BadReply:
        return
    assert data.startswith(b"HTTP/1.")
    assert found.length >= UNTIL_CLOSE


# Chunks

BODY = b'{"jsonrpc":"2.0","id":1,"result":"\r\n0\r\n\r\n"}'
CODED = b"5;ext=1\r\n" + BODY[:5] + b"\r\n0A \r\n" + BODY[5:15] + b"\r\n" + chunked(BODY[15:], 100)[:-2]
TAIL = b"X-Trailer: a\r\nX-Other: b\r\n\r\n"


def decode(*pieces: bytes) -> tuple[bytes, bool, bytes]:
    """The body, whether it is complete, and what came behind it."""
    chunks = Chunks()
    out = []
    for at, piece in enumerate(pieces):
        out.append(chunks.feed(piece))
        if chunks.done:
            return b"".join(out), True, chunks.rest + b"".join(pieces[at + 1 :])
    return b"".join(out), False, b""


@pytest.mark.parametrize("rest", [b"", b"HTTP/1.1 200 OK\r\n"])
@pytest.mark.parametrize("end", [b"\r\n", TAIL])
def test_chunks_cut_at_every_byte(end: bytes, rest: bytes) -> None:
    data = CODED + end + rest
    assert decode(data) == (BODY, True, rest)
    for cut in range(1, len(data)):
        assert decode(data[:cut], data[cut:]) == (BODY, True, rest), cut
    assert decode(*(data[at : at + 1] for at in range(len(data)))) == (BODY, True, rest)


def test_chunks_are_not_done_before_their_end() -> None:
    data = CODED + TAIL
    for cut in range(len(data)):
        body, done, _ = decode(data[:cut])
        assert not done
        assert BODY.startswith(body)


@given(st.binary(max_size=3000), st.integers(1, 700), st.lists(st.integers(0, 5000)), st.binary(max_size=9))
def test_chunks_of_any_size_cut_anywhere(body: bytes, size: int, cuts: list[int], rest: bytes) -> None:
    data = chunked(body, size) + rest
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[start:end] for start, end in itertools.pairwise(edges)]
    assert decode(*pieces) == (body, True, rest)


NO_CHUNKS = (
    b"\r\n", b";\r\n", b" \r\n", b"x\r\n", b"0x5\r\nhello\r\n", b"+5\r\n", b"-5\r\n", b"1_0\r\n", b"5 5\r\n", b"5,\r\n",
    b"5\nhello\r\n0\r\n\r\n", b"5\r\nhello\n0\r\n\r\n", b"5\r\nhelloo\r\n", b"5\r\nhell\r\n0\r\n\r\n", b"0\r\n\n",
    b"f" * 12 + b"\r\n", b"5" + b" " * 5000 + b"\r\n", b"0\r\n" + b"a" * 5000, b"5;" + b"e" * 5000, "٥\r\n".encode(),
)  # fmt: skip


@pytest.mark.parametrize("data", NO_CHUNKS)
def test_chunks_that_are_none_are_refused(data: bytes) -> None:
    with pytest.raises(BadReply):
        decode(data)
    with pytest.raises(BadReply):
        decode(*(data[at : at + 1] for at in range(len(data))))


def test_trailers_without_end_are_refused() -> None:
    with pytest.raises(BadReply):
        decode(b"0\r\n", *[b"X-Trailer: a\r\n"] * 10_000)
