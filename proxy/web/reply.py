"""Builds replies: JSON by orjson, errors with the API's error body, and large bodies compressed and in slices."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

import orjson
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload

from proxy.core import encodings
from proxy.errors import Fault
from proxy.request_threads import compression_threads
from proxy.services.rpc.held_body import SLICE_BYTES, ReplyShare, slices
from proxy.settings import TlsSettings
from proxy.turn_queue import next_turn

# A larger body is written in slices.
WRITTEN_AT_ONCE = 262_144
# Bodies from this size on are compressed in a thread.
COMPRESS_APART = 262_144
JSON = "application/json"
SERVER = "Penstock"


def fixed_headers(tls: TlsSettings) -> dict[str, str]:
    """The headers that are the same in every reply. RFC 6797, 7.2: no Strict-Transport-Security without TLS."""
    hsts = {"Strict-Transport-Security": f"max-age={tls.hsts_s}"} if tls.is_used and tls.hsts_s else {}
    return {"Server": SERVER, **hsts}


def header_lines(headers: Mapping[str, str]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1")


class SlicedBody(Payload):
    """A large body. It is written in slices, in turn with other clients: the kernel may take megabytes at once."""

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        super().__init__(pieces)
        self.pieces = pieces
        self._length = sum(map(len, pieces))

    def __repr__(self) -> str:
        return f"<SlicedBody of {self.size} bytes>"

    @property
    def size(self) -> int:
        return self._length

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return b"".join(self.pieces).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        for piece in _slices_of(self.pieces):
            await writer.write(piece)
            await next_turn()


def _slices_of(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The pieces in slices: short ones are joined."""
    short: list[bytes | memoryview] = []
    size = 0
    for piece in pieces:
        short.append(piece)
        size += len(piece)
        if size >= SLICE_BYTES:
            yield from slices(short[0] if len(short) == 1 else b"".join(short))
            short, size = [], 0
    if short:
        yield b"".join(short)


class HeldResponse(web.Response):
    """A reply whose memory is given back once it is written, or dropped."""

    def __init__(
        self, pieces: Sequence[bytes | memoryview], share: ReplyShare, *, status: int = 200, headers: Mapping[str, str]
    ) -> None:
        is_large = sum(map(len, pieces)) > WRITTEN_AT_ONCE
        super().__init__(status=status, body=SlicedBody(pieces) if is_large else b"".join(pieces), headers=headers)
        self._share = share
        weakref.finalize(self, share.give_all)

    async def write_eof(self, data: bytes = b"") -> None:
        try:
            await super().write_eof(data)
        finally:  # The client may have left.
            self._share.give_all()


def slice_body(reply: web.StreamResponse) -> None:
    """Replace a large body by one that is written in slices."""
    if not isinstance(reply, web.Response) or type(reply) not in (web.Response, HeldResponse):
        return
    if isinstance(reply.body, bytes) and len(reply.body) > WRITTEN_AT_ONCE:
        reply.body = SlicedBody([reply.body])


async def compress(request: web.Request, reply: web.StreamResponse, *, least: int) -> None:
    """Compress a reply of `least` bytes or more if the client accepts that; 0 compresses none. Replies to requests with a
    cookie are not compressed: from the sizes of many compressed ones, an attacker could learn a secret in them (BREACH)."""
    body = reply.body if isinstance(reply, web.Response) else None
    pieces = body.pieces if isinstance(body, SlicedBody) else [body] if isinstance(body, bytes) else []
    size = sum(map(len, pieces))
    if not 0 < least <= size or "Content-Encoding" in reply.headers or "Cookie" in request.headers:
        return
    assert isinstance(reply, web.Response)
    encoding = encodings.accepted(",".join(request.headers.getall("Accept-Encoding", ())))
    # A cache between the client and us may keep the reply to a GET, in either form. Packed files say so themselves.
    if (encoding or request.method == "GET") and "Accept-Encoding" not in reply.headers.getall("Vary", ()):
        reply.headers.add("Vary", "Accept-Encoding")
    if encoding:
        if size < COMPRESS_APART:
            reply.body = encodings.compress(encoding, b"".join(pieces))
        else:
            reply.body = await compression_threads.run(lambda: encodings.compress_apart(encoding, pieces))
        reply.headers["Content-Encoding"] = encodings.NAMES[encoding]


class EncodedList(NamedTuple):
    """A list in the data of a reply that is JSON already: a long one is encoded in turns of its account."""

    json: bytes
    length: int


async def encoded_reply(data: Any, *, status: int, headers: Mapping[str, str] | None) -> web.Response:
    """The reply of an operation. After a large one is encoded, other clients have their turns before its data is freed."""
    reply = json_reply(data, status=status, headers=headers)
    if (reply.content_length or 0) > WRITTEN_AT_ONCE:
        await next_turn()
    return reply


def json_reply(data: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    body = orjson.dumps(data, default=_encoded)
    return web.Response(body=body, status=status, headers=headers, content_type=JSON)


def _encoded(value: object) -> orjson.Fragment:
    if isinstance(value, EncodedList):
        return orjson.Fragment(value.json)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def fault_reply(fault: Fault, site: str) -> web.Response:
    """`site`: see `Fault.body`."""
    return json_reply(fault.body(site), status=fault.status, headers=fault.headers)


def raw_fault(fault: Fault, site: str, headers: Mapping[str, str]) -> bytes:
    """A complete HTTP reply for a connection without a parsed request. The connection is closed after it."""
    body = orjson.dumps(fault.body(site))
    extra = "".join(f"{name}: {value}\r\n" for name, value in {**fault.headers, **headers}.items())
    lines = (
        f"HTTP/1.1 {fault.status} {HTTPStatus(fault.status).phrase}\r\nContent-Type: {JSON}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n{extra}\r\n"
    )
    return lines.encode("ascii") + body
