"""The strict head reader against aiohttp's parser: heads that the reader accepts must mean the same to both.

Thousands of heads are made by random changes to good ones. PENSTOCK_SEED selects others.
"""

from __future__ import annotations

import asyncio
import base64
import os
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.helpers import HeadersMixin
from aiohttp.http_parser import HttpRequestParser
from aiohttp.http_writer import HttpVersion11

from proxy.core import directives
from proxy.core.access import Key
from proxy.core.directives import BY_HEADER
from proxy.web.api_middleware import _WELL_FORMED
from proxy.web.authentication import key_of_request
from proxy.web.front.handler_connection import MAX_HEADERS, MAX_LINE_BYTES, MAX_TARGET_BYTES
from proxy.web.front.request_headers import (
    LONGEST_REMEMBERED,
    MAX_HOT_HEADER_BYTES,
    MOST_REMEMBERED,
    RequestHeaderReader,
    RequestHeaders,
)
from proxy.web.request_bodies import _is_json
from proxy.web.request_targets import TargetReader, read_target
from tests.http_client import rpc
from tests.web.worker import LIVE, NO_CACHE, Worker, on_uvloop, running_worker
from tests.wire.upstreams import Scripted

HEADS = 200_000
PATH = f"/v1/rpc/{LIVE}"


def reader_of(
    worker: Worker, *, max_header_bytes: int = MAX_HOT_HEADER_BYTES, max_body: int = 100_000, is_tracing: bool = False
) -> RequestHeaderReader:
    """A new reader with the worker's routes and keys."""
    routes = {PATH: worker.app.networks.routes[LIVE]}
    return RequestHeaderReader(
        routes,
        lambda text: worker.app.keyring.find(text, 0.0),
        TargetReader(),
        max_header_bytes=max_header_bytes,
        max_body=max_body,
        is_tracing=is_tracing,
    )


# Random heads


class Chance:
    """Makes heads: a good one, with a few changed lines and sometimes changed bytes."""

    def __init__(self, seed: int, keys: Iterable[str]) -> None:
        self._random = random.Random(seed)
        self._keys = [key.encode() for key in keys]

    def heads(self, count: int) -> Iterator[bytes]:
        pick, changes = self._random.random, (self._change_line, self._change_line, self._double, self._swap, self._add)
        for _ in range(count):
            lines = self._good()
            while pick() < 0.5:
                self._random.choice(changes)(lines)
            head = b"\r\n".join((*lines, b"", b""))
            if pick() < 0.4:
                head = self._change_bytes(head)
            yield head

    def _good(self) -> list[bytes]:
        text, place = self._random.choice(self._keys), self._random.randrange(6)
        key = (b"X-API-Key: ", b"Authorization: Bearer ", b"Authorization: Basic ", b"X-API-Key: ", b"X: ", b"X: ")[
            place
        ]
        key += base64.b64encode(b"x:" + text) if place == 2 else text
        in_url = (b"", b"", b"", b"/" + text, b"/" + text, b"?apiKey=" + text)[place]
        length = b"Content-Length: %d" % self._random.choice((1, 40, 130, 9999, 0))
        lines = [b"Host: x", b"Content-Type: application/json", length, key, b"User-Agent: f", b"Accept: */*"]
        self._random.shuffle(lines)
        return [b"POST %b%b HTTP/1.1" % (PATH.encode(), in_url), *lines]

    def _change_line(self, lines: list[bytes]) -> None:
        at = self._random.randrange(len(lines))
        name, colon, value = lines[at].partition(b":")
        lines[at] = self._random.choice(
            (
                name.upper() + colon + value,
                name.swapcase() + colon + value,
                name + colon + value.strip(),
                name + colon + self._space() + value + self._space(),
                name + self._space() + colon + value,
                self._space() + lines[at],
                name + colon,
                name,
                name + colon + self._random.choice(VALUES),
                self._random.choice(NAMES) + colon + value,
            )
        )

    def _space(self) -> bytes:
        return self._random.choice((b"", b" ", b"\t", b"  ", b"\x0b", b"\x0c", b"\xc2\xa0", b"\r\n ", b"\0"))

    def _double(self, lines: list[bytes]) -> None:
        lines.insert(self._random.randrange(1, len(lines) + 1), self._random.choice(lines))

    def _swap(self, lines: list[bytes]) -> None:
        one, two = self._random.randrange(len(lines)), self._random.randrange(len(lines))
        lines[one], lines[two] = lines[two], lines[one]

    def _add(self, lines: list[bytes]) -> None:
        line = self._random.choice(NAMES) + b": " + self._random.choice((*VALUES, *self._keys))
        lines.insert(self._random.randrange(1, len(lines) + 1), line)

    def _change_bytes(self, head: bytes) -> bytes:
        at = self._random.randrange(len(head) - 4)
        odd = self._random.choice(BYTES) if self._random.random() < 0.5 else bytes([self._random.randrange(256)])
        match self._random.randrange(4):
            case 0:
                return head[:at] + odd + head[at:]
            case 1:
                return head[:at] + head[at + 1 :]
            case 2:
                return head[:at] + odd + head[at + 1 :]
            case _:
                return head[:at] + head[at : at + 3] + head[at:]


NAMES = (
    b"Content-Length", b"Transfer-Encoding", b"Connection", b"Host", b"Expect", b"Upgrade", b"TE",
    b"Content-Type", b"X-API-Key",
    b"Authorization", b"Cache-Control", b"X-Request-Id", b"Content-Encoding", b"User-Agent", b"X",
    b"Cookie", b"Keep-Alive",
    b"Proxy-Connection", b"Trailer", b"Sec-WebSocket-Key1", b"HTTP2-Settings", b"Content_Length", b"", b"Server", b"ETag",
    b"Content-Location", b"Content-Range", b"Max-Forwards", b"Range", b"X-Forwarded-For", b"Accept",
    b"x-api-key", b"Date", b"X-Retry", b"x-timeout-ms", b"X-Max-Stale", b"X-Upstream",
    "Content-Length\u017f".encode(), b"X\x80", b"X Y", b"(x)", b"Age", b"From", b"Referer", b"Origin",
)  # fmt: skip
VALUES = (
    b"", b"1", b"0", b"40", b"+40", b"-1", b"040", b"4 0", b"40, 40", b"0x28", b"4_0", b"40\x0b",
    b"99999999999", b"chunked",
    b"identity", b"gzip", b"close", b"keep-alive", b"Keep-Alive", b"keep-alive, close", b"upgrade",
    b"Upgrade, TE", b"h2c",
    b"application/json", b"application/json; charset=utf-8", b"application/json;charset=x", b"text/plain", b"websocket",
    b"no-cache", b"No-Cache, max-age=0", b"100-continue", b"Bearer x", b"\xff\xfe", b"a" * 300,
    b"trailers", b"req-1", b"\xc3\xa9",
    b'"quoted, text"', b"a:b:c", b"a;b=c", b"x\ty", b"\x7f", b"\x1b[0m", "\u2028".encode(), b"same", b"a" * 65,
)  # fmt: skip
BYTES = (
    b"\r", b"\n", b"\r\n", b"\r\n\r\n", b"\n\n", b"\0", b" ", b"\t", b":", b"\x0b", b"\x80", b"\xff",
    b"\r\r\n", b"\n\r", b"\r\n ",
    b"\r\nContent-Length: 5", b"\r\nTransfer-Encoding: chunked", b"\nContent-Length: 7", b"HTTP/1.0", b";", b",",
)  # fmt: skip


# How aiohttp reads them


class _Request(HeadersMixin):
    """The part of a request that the gate reads."""

    def __init__(self, headers: Any) -> None:
        self.headers = self._headers = headers


class Theirs:
    """aiohttp's parser with the connection limiter's settings, fed one message after another."""

    def __init__(self, find: Callable[[str], Key | None]) -> None:
        self._find = find
        self._parser = self._new_parser()

    def _new_parser(self) -> Any:
        loop = asyncio.get_running_loop()
        return HttpRequestParser(
            BaseProtocol(loop),
            loop,
            2**16,
            max_line_size=MAX_TARGET_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
            auto_decompress=False,
        )

    def compare(self, raw: bytes, ours: RequestHeaders) -> None:
        """The parser continues with the next message, which would not parse if this one were framed differently."""
        messages, upgraded, tail = self._parser.feed_data(raw + b"a" * ours.length)
        if ours.closes:  # It reads no message after this one.
            self._parser = self._new_parser()
        ((message, payload),) = messages
        assert not upgraded
        assert not tail
        assert payload.is_eof()
        assert payload.total_bytes == ours.length
        target = read_target(message.url.raw_path_qs)
        assert (message.method, target.text, message.version) == ("POST", PATH, HttpVersion11)
        assert (message.upgrade, message.chunked, message.compression) == (False, False, None)
        assert message.should_close == ours.closes
        headers = message.headers
        assert "Expect" not in headers
        assert "Transfer-Encoding" not in headers
        assert headers.getall("Content-Length") == [headers["Content-Length"]]
        assert int(headers["Content-Length"]) == ours.length
        asked: Any = _Request(headers)
        assert _is_json(asked)
        assert headers.get("Content-Encoding", "identity").lower() == "identity"
        presented = key_of_request(headers, target)
        assert presented is not None
        assert ours.key is self._find(presented.text)
        assert ours.key.allow_in_url or not presented.is_in_url
        fresh = "no-cache" in headers.get("Cache-Control", "").lower()
        given = [(BY_HEADER[name.lower()], text) for name, text in headers.items() if name.lower() in BY_HEADER]
        assert ours.directives == directives.read(given, fresh=fresh)
        request_id = headers.get("X-Request-Id", "")
        assert ours.request_id.decode() == (request_id if _WELL_FORMED.fullmatch(request_id) else "")
        assert ours.size == len(raw)
        assert ours.total == len(raw) + ours.length


@on_uvloop
async def test_accepted_heads_mean_the_same_to_aiohttp() -> None:
    seed = int(os.environ.get("PENSTOCK_SEED", "1"))
    async with Scripted() as upstream, running_worker(upstream.url) as worker:
        worker.add_key("other", allow_in_url=True)
        reader, theirs = reader_of(worker), Theirs(lambda text: worker.app.keyring.find(text, 0.0))
        accepted = 0
        for index, made in enumerate(Chance(seed, worker.keys.values()).heads(HEADS)):
            # Like the front, read up to the first empty line.
            raw = made[: made.index(b"\r\n\r\n") + 4]
            head = reader.read(raw)
            if head is None:
                continue
            accepted += 1
            try:
                theirs.compare(raw, head)
            except Exception as exc:
                raise AssertionError(f"seed {seed}, head {index}: {raw!r}") from exc
        assert accepted > HEADS // 10, "the heads are too wild to say anything"


# Heads that the reader must leave to aiohttp, and heads that it accepts


def head_with(worker: Worker, *lines: str, length: int = 5, without: str = "") -> bytes:
    good = {
        "Host": "x",
        "X-API-Key": worker.keys["main"],
        "Content-Type": "application/json",
        "Content-Length": str(length),
    }
    good.pop(without, None)
    text = "\r\n".join((f"POST {PATH} HTTP/1.1", *(f"{name}: {value}" for name, value in good.items()), *lines))
    return f"{text}\r\n\r\n".encode("latin-1")


@on_uvloop
async def test_ordinary_heads_are_accepted_and_others_left_to_aiohttp() -> None:
    async with Scripted() as upstream, running_worker(upstream.url) as worker:
        reader = reader_of(worker, max_body=10)
        kept: tuple[list[str], ...] = (
            [], ["Accept: */*", "Accept-Encoding: gzip, br", "User-Agent: x"], ["Connection: keep-alive"],
            ["Connection: close"], ["Cache-Control: no-cache"], ["X-Request-Id: a"], ["traceparent: 00-1-2-01"],
            ["X-Forwarded-For: 1.2.3.4"],
        )  # fmt: skip
        for lines in kept:
            assert reader.read(head_with(worker, *lines)) is not None, lines
        left = (
            ["Expect: 100-continue"], ["Transfer-Encoding: chunked"], ["Connection: close, x"], ["Connection: upgrade"],
            ["Upgrade: h2c"], ["Content-Length: 5"], ["Host: y"], ["X-API-Key: z"], ["TE: trailers"],
            ["X"], [": x"], [" folded"],
            ["Origin: https://x"], ["Content-Encoding: gzip"], ["User-Agent: a", "User-Agent: b"], ["X: \0"], ["X : y"],
            [f"X-{n}: y" for n in range(64)],
        )  # fmt: skip
        for lines in left:
            assert reader.read(head_with(worker, *lines)) is None, lines
        assert reader.read(head_with(worker, without="Content-Type")) is not None
        for without in ("Host", "X-API-Key", "Content-Length"):
            assert reader.read(head_with(worker, without=without)) is None, without
        for length in (0, 11, 99_999_999):
            assert reader.read(head_with(worker, length=length)) is None, length
        assert reader.read(head_with(worker, length=10)) is not None
        assert reader.read(head_with(worker, "X: " + "a" * MAX_HOT_HEADER_BYTES)) is None


# The cache


def remembered(reader: RequestHeaderReader) -> int:
    return int(repr(reader).split()[1])


@on_uvloop
async def test_head_is_cached_when_it_is_seen_twice() -> None:
    async with Scripted() as upstream, running_worker(upstream.url) as worker:
        reader = reader_of(worker)
        raw = head_with(worker)
        assert reader.read(raw) is not None
        assert remembered(reader) == 0
        head = reader.read(raw)
        assert remembered(reader) == 1
        assert reader.read(raw) is reader.read(bytes(bytearray(raw))) is head


@on_uvloop
async def test_heads_that_never_repeat_are_not_cached() -> None:
    async with Scripted() as upstream, running_worker(upstream.url) as worker:
        reader = reader_of(worker)
        for index in range(2 * MOST_REMEMBERED):
            assert reader.read(head_with(worker, f"traceparent: {index}")) is not None
        assert remembered(reader) <= 1  # Two hashes may collide.


@on_uvloop
async def test_cache_of_heads_is_bounded() -> None:
    async with Scripted() as upstream, running_worker(upstream.url) as worker:
        reader = reader_of(worker)
        most = 0
        for index in range(MOST_REMEMBERED + 500):
            raw = head_with(worker, f"traceparent: {index}")
            assert reader.read(raw) is not None
            assert reader.read(raw) is not None
            most = max(most, remembered(reader))
        assert most == MOST_REMEMBERED
        assert MOST_REMEMBERED // 2 < remembered(reader) <= MOST_REMEMBERED  # Only the oldest are dropped.
        raw = head_with(worker, "X-Long: " + "a" * LONGEST_REMEMBERED)
        before = remembered(reader)
        for _ in range(3):
            assert reader.read(raw) is not None
        assert remembered(reader) == before


@on_uvloop
async def test_cached_head_is_dropped_when_its_key_is_revoked_or_changed() -> None:
    async with Scripted() as upstream, running_worker(upstream.url) as worker:
        reader = reader_of(worker)
        raw = head_with(worker)
        for _ in range(3):
            assert reader.read(raw) is not None
        key = worker.app.keyring.find(worker.keys["main"], 0.0)
        assert key is not None
        worker.app.keyring.remove(key)
        assert reader.read(raw) is None
        assert remembered(reader) == 0
        worker.keys.clear()
        changed = worker.add_key("main", scopes=["rpc:read"])
        head = reader.read(raw)
        assert head is not None
        assert head.key is changed


@on_uvloop
async def test_heads_with_unknown_keys_are_not_cached() -> None:
    async with Scripted() as upstream, running_worker(upstream.url) as worker:
        reader = reader_of(worker)
        raw = head_with(worker, "X-API-Key: svc_live_nobody", without="X-API-Key")
        for _ in range(3):
            assert reader.read(raw) is None
        assert remembered(reader) == 0


@pytest.mark.parametrize("cuts", [0, 1, 3])
@on_uvloop
async def test_request_in_pieces_counts_as_seen_once(cuts: int) -> None:
    """Its head is read once, in however many pieces its body arrives."""
    async with (
        Scripted() as upstream,
        running_worker(upstream.url, **NO_CACHE) as worker,
        await worker.connect() as client,
    ):
        body = rpc("net_listening", ["x" * 100])
        for index in range(20):
            data = worker.post(body, Traceparent=str(index))
            at = [len(data) - 30 * cut for cut in range(cuts, 0, -1)]
            for start, end in zip([0, *at], [*at, len(data)], strict=True):
                await client.write(data[start:end])
                for _ in range(3):
                    await asyncio.sleep(0)
            assert (await client.reply()).status == 200
        assert remembered(worker.app.front.header_reader) == 0


# Heads that differ in one value


@on_uvloop
async def test_heads_that_differ_in_one_ignored_value_have_a_template() -> None:
    async with Scripted() as upstream, running_worker(upstream.url) as worker:
        reader = reader_of(worker)
        heads = [head_with(worker, f"X-Trace-Id: {index:08d}", "Accept: */*") for index in range(3)]
        meaning = [reader.read(raw) for raw in heads]
        assert meaning[0] is not None
        assert meaning[0] is meaning[1] is meaning[2]
        shape = reader.template(heads[0], heads[1], meaning[0])
        assert shape is not None
        assert all(shape.fits(raw + b"12345") for raw in heads)
        meaning[0].key.alive = False
        assert not shape.fits(heads[0] + b"12345")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("X-Request-Id: a1", "X-Trace: 1"), ("X-Request-Id: a2", "X-Trace: 1")),
        (("X-Trace: 1", "X-Span: 1"), ("X-Trace: 2", "X-Span: 2")),
        (("X-Trace: 1", "Accept: 1"), ("X-Trace: 1", "Accept: 12")),
        (("X-Trace: 1", "TE: a"), ("X-Trace: 1", "TE: b")),
    ],
    ids=["a value that decides", "two values", "another size", "not for us"],
)
@on_uvloop
async def test_heads_that_differ_otherwise_have_no_template(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    async with Scripted() as upstream, running_worker(upstream.url) as worker:
        reader = reader_of(worker)
        plain = reader.read(head_with(worker))
        assert plain is not None
        assert reader.template(head_with(worker, *one), head_with(worker, *other), plain) is None


@on_uvloop
async def test_heads_that_fit_a_template_parse_to_the_same_result() -> None:
    chance = random.Random(4)
    hostile = (b"\r\nX-API-Key: x", b"\r\n\r\nPOST", b"\r", b"\n", b"\0", b"\x7f", b"\xff", b": ", b"\t", b"\r\nTE: y")
    async with Scripted() as upstream, running_worker(upstream.url) as worker:
        reader = reader_of(worker)
        good = [head_with(worker, f"X-Trace: {index:032x}", "Accept: */*") for index in range(2)]
        head = reader.read(good[1])
        assert head is not None
        shape = reader.template(good[0], good[1], head)
        assert shape is not None
        fitting = 0
        for _ in range(20_000):
            value = chance.randbytes(16).hex().encode()
            for _ in range(chance.randrange(3)):
                at, text = chance.randrange(33), chance.choice(hostile)
                value = (value[:at] + text + value[at + len(text) :])[:32]
            raw = good[0].replace(b"%032x" % 0, value.ljust(32, b" "))
            if shape.fits(raw + b"12345"):
                fitting += 1
                assert reader.read(raw[: raw.index(b"\r\n\r\n") + 4]) is head, raw
        assert fitting > 5_000


async def test_sampled_head_is_handed_over_only_if_requests_are_traced() -> None:
    async with Scripted() as upstream, running_worker(upstream.url) as worker:
        line = "traceparent: 00-{}-b7ad6b7169203331-0{}"
        one, other = (head_with(worker, line.format(digit * 32, 0)) for digit in "12")
        sampled = head_with(worker, line.format("1" * 32, 1))
        assert reader_of(worker).read(sampled) is not None
        tracing = reader_of(worker, is_tracing=True)
        assert tracing.read(sampled) is None
        found = tracing.read(one)
        assert found is not None
        # A template would accept any value of the header, sampled or not.
        assert tracing.template(one, other, found) is None
        assert reader_of(worker).template(one, other, found) is not None
