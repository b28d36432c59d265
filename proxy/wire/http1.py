"""Parsing HTTP/1.1 replies: headers and chunked bodies, without I/O.

Only the status, framing, encoding and Retry-After of an upstream's reply are used; none of its headers reaches a client. Two
lengths, a length beside a transfer encoding, or anything that is not plainly HTTP/1.x is an error that closes the connection.
"""

from __future__ import annotations

import math
import re
import time
from functools import lru_cache
from typing import Literal

from proxy.core.retry_after import retry_after_s

CHUNKED = -1
UNTIL_CLOSE = -2
# Bounds the memory of headers that never end. Trailers are bounded by it too.
MAX_HEADER_BYTES = 65_536

# Bounds the memory of a line that never ends: a chunk's size, or a trailer.
MAX_CHUNK_LINE = 4096

_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [^\r\n]*)?")
# The bytes that are allowed in headers, without line ends.
_PLAIN = bytes(byte for byte in range(256) if byte == 9 or (byte >= 32 and byte != 127))
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_READ = frozenset((b"connection", b"content-length", b"content-encoding", b"transfer-encoding", b"retry-after"))
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,11})[ \t]*(?:;.*)?", re.DOTALL)


class BadReply(Exception):
    """The bytes are not a reply with valid framing."""


class ReplyHeaders:
    """How to read the body that follows. `length`: its bytes, CHUNKED or UNTIL_CLOSE."""

    __slots__ = ("close", "decoded", "length", "plain", "retry_after", "status")

    def __init__(
        self,
        status: int,
        length: int,
        *,
        close: bool,
        plain: bool,
        retry_after: bytes = b"",
        decoded: ReplyHeaders | None = None,
    ) -> None:
        # The headers that sinks get in place of these when a gzip body is decompressed for them. None for other bodies.
        self.decoded = decoded
        self.status = status
        self.length = length
        self.close = close
        self.plain = plain
        # As received, or empty.
        self.retry_after = retry_after

    def __repr__(self) -> str:
        return f"<ReplyHeaders {self.status} length {self.length}{' close' if self.close else ''}>"

    @property
    def wants_rest(self) -> bool:
        """Whether the upstream limits our rate: with a 429, or with a 503 that includes Retry-After."""
        return self.status == 429 or (self.status == 503 and self.retry_after_s > 0)

    @property
    def retry_after_s(self) -> int:
        return math.ceil(retry_after_s(self.retry_after.decode("latin-1"), time.time())) if self.retry_after else 0


def read_headers(headers: bytes) -> ReplyHeaders:
    """Parse headers that end with an empty line. Raises BadReply."""
    lines = headers[:-4].split(b"\r\n")
    # With the allowed bytes removed, only the line ends may be left: a bare CR or LF is ambiguous.
    if len(headers.translate(None, _PLAIN)) != 2 * len(lines) + 2:
        raise BadReply("control bytes")
    status = _STATUS.fullmatch(lines[0])
    if status is None:
        raise BadReply("status line")
    framing = _framing(lines)
    code = int(status[2])
    if code == 101:
        raise BadReply("another protocol")
    connection = framing.get(b"connection", b"").lower()
    close = b"close" in connection or (status[1] == b"0" and b"keep-alive" not in connection)
    length = _length(framing, code)
    encoding = framing.get(b"content-encoding", b"identity").lower()
    retry_after = framing.get(b"retry-after", b"")
    close = close or length == UNTIL_CLOSE
    decoded = None
    if encoding == b"gzip" and length:
        decoded = ReplyHeaders(code, CHUNKED, close=close, plain=True, retry_after=retry_after)
    is_plain = encoding == b"identity"
    return ReplyHeaders(code, length, close=close, plain=is_plain, retry_after=retry_after, decoded=decoded)


# Many servers send the same headers in every reply, so parsed ones are cached.
read_known_headers = lru_cache(maxsize=64)(read_headers)


def _framing(lines: list[bytes]) -> dict[bytes, bytes]:
    framing: dict[bytes, bytes] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if not colon:
            raise BadReply("header line")
        if kind := _kind(name):
            if kind in framing and kind != b"connection":
                raise BadReply("header twice")
            framing[kind] = b"%b,%b" % (framing.get(kind, b""), value) if kind == b"connection" else value.strip(b" \t")
    return framing


@lru_cache(maxsize=1024)
def _kind(name: bytes) -> bytes:
    """The name in lower case if it is used here, else empty. Upstreams use few names, so the cache mostly hits."""
    if not _NAME.fullmatch(name):
        raise BadReply("header name")
    low = name.lower()
    return low if low in _READ else b""


def _length(framing: dict[bytes, bytes], status: int) -> int:
    if status < 200 or status in (204, 304):
        return 0
    encoding, text = framing.get(b"transfer-encoding"), framing.get(b"content-length")
    if encoding is not None:
        if text is not None or encoding.lower() != b"chunked":
            raise BadReply("framing")
        return CHUNKED
    if text is None:
        return UNTIL_CLOSE
    if not text.isdigit() or len(text) > 15:
        raise BadReply("length")
    return int(text)


class Chunks:
    """An incremental parser of a chunked body."""

    __slots__ = ("_left", "_line", "_state", "_trailed", "done", "rest")

    def __init__(self) -> None:
        self._state: Literal["size", "data", "end", "trailer"] = "size"
        self._line = b""
        self._left = 0
        self._trailed = 0
        self.done = False
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        """Returns the body bytes in this data. When `done`, `rest` contains the bytes after the body."""
        out: list[bytes] = []
        at, end = 0, len(data)
        while at < end and not self.done:
            if self._state == "data":
                piece = data[at : at + self._left]
                at += len(piece)
                self._left -= len(piece)
                out.append(piece)
                if not self._left:
                    self._state = "end"
                continue
            stop = data.find(b"\n", at, at + MAX_CHUNK_LINE)
            line = self._line + (data[at : at + MAX_CHUNK_LINE] if stop < 0 else data[at:stop])
            if len(line) >= MAX_CHUNK_LINE:
                raise BadReply("chunk line")
            if stop < 0:
                self._line = line
                return b"".join(out)
            at = stop + 1
            self._line = b""
            self._take_line(line)
        if self.done:
            self.rest = data[at:]
        return b"".join(out)

    def _take_line(self, line: bytes) -> None:
        if not line.endswith(b"\r"):
            raise BadReply("chunk line end")
        text = line[:-1]
        match self._state:
            case "size":
                size = _CHUNK_SIZE.fullmatch(text)
                if size is None:
                    raise BadReply("chunk size")
                self._left = int(size[1], 16)
                self._state = "data" if self._left else "trailer"
            case "end":
                if text:
                    raise BadReply("chunk end")
                self._state = "size"
            case "trailer":
                self.done = not text
                self._trailed += len(line)
                if self._trailed > MAX_HEADER_BYTES:
                    raise BadReply("trailers")
            case "data":
                raise AssertionError("data has no lines")
