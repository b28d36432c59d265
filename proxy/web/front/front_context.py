"""How the hot path's replies look: the same headers as everywhere else, put together from prepared bytes."""

from __future__ import annotations

import asyncio
import time
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import msgspec
import orjson

from proxy.core import limits
from proxy.core.access import Key
from proxy.core.jsonrpc import HEAD, error_reply
from proxy.core.limits import TOLERANCE_S
from proxy.errors import Fault, Unauthorized
from proxy.services.accounts.admission import Admission
from proxy.services.rpc.calls import Rpc
from proxy.telemetry import AccessLines
from proxy.web.front.request_heads import RequestHead, RequestHeadReader
from proxy.web.gate import STEM
from proxy.web.reply import SERVER
from proxy.wire.write_buffer import WriteBuffer

if TYPE_CHECKING:
    from proxy.web.front.reply_writer import ReplyWriting

_LINE: Final = (
    b'{"time":"%b","level":"info","logger":"penstock.access","message":"request","request_id":"%b","network":"%b",'
    b'"method":"%b","status":%d,"ms":%.3f,"key":"%b","units":%d,"cache":"%b"}\n'
)
_HEX: Final = [b"%02x" % number for number in range(256)]
DIGITS: Final = [b"%d" % number for number in range(1024)]
_CLOSE: Final = b"Connection: close\r\n"
_UNITS: Final = [b"X-Compute-Units: %d\r\n" % units for units in range(256)]
CACHE: Final = {"": b"", "hit": b"X-Cache: hit\r\n", "miss": b"X-Cache: miss\r\n", "join": b"X-Cache: join\r\n"}


def reply_length(size: int) -> bytes:
    """The end of a reply's head and the beginning of its body, for an id and a result of this size."""
    return b"Content-Length: %d\r\n\r\n%b" % (size + len(HEAD) + len(',"result":}'), HEAD)


REPLY_LENGTHS: Final = [reply_length(size) for size in range(1024)]


def _upstream_line(front: ReplyWriting) -> bytes:
    """Which upstream answered, by its name in the metrics. Memory, a batch and a refusal have none."""
    route, flight = front.head.route, front.flight
    if flight is not None:
        label = flight.answered_label
    else:
        is_short = front.policy is not None and front.policy.short and not front.cache and route.only is not None
        label = route.upstreams[0].label if is_short else ""
    return b"X-Upstream: %b\r\n" % label.encode() if label else b""


class FrontContext:
    """What all fronts of a worker share."""

    def __init__(
        self,
        heads: RequestHeadReader,
        rpc: Rpc,
        admission: Admission,
        write_buffer: WriteBuffer,
        *,
        max_head: int,
        max_requests: int,
        log: AccessLines | None,
        shows_upstream: bool = False,
    ) -> None:
        self.heads = heads
        self.rpc = rpc
        self.write_buffer = write_buffer
        self.loop = asyncio.get_running_loop()
        self.max_head = max_head
        self.max_requests = max_requests
        self.log = log
        self.windows = admission.windows
        self._admission = admission
        self.draining = False
        # Whether replies say which upstream they came from.
        self.shows_upstream = shows_upstream
        # Whether a reply's end needs more than its bytes and a log line: a close, a header more.
        self.careful = shows_upstream
        self._served = 0
        self._request_ids = b"%b%06x" % (STEM, 0)
        self.reset_lines: dict[int, bytes] = {}
        self._stamp = b""
        self.ok_stamp = b""
        self.tick()

    def __repr__(self) -> str:
        return f"<FrontContext {self.heads!r}>"

    def tick(self) -> None:
        """Once a second: the date changes."""
        self._stamp = f"\r\nServer: {SERVER}\r\nDate: {formatdate(usegmt=True)}\r\n".encode()
        self.ok_stamp = b"HTTP/1.1 200 OK\r\nContent-Type: application/json" + self._stamp + b"X-Request-Id: "
        # What turns an edge, which is of the monotonic clock, into the moment its bucket is full, rounded up.
        self._second = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()).encode()
        self.resets = time.time() - time.monotonic() + 1.0 + (1.0 - 1e-6)

    def drain(self) -> None:
        """From now on every reply is its connection's last."""
        self.draining = self.careful = True

    # Replies

    def request_id(self) -> bytes:
        """A new one: unique over workers and restarts, two digits at a time."""
        self._served = served = (self._served + 1) & 0xFFFFFFFF
        if not served & 0xFF:
            self._request_ids = b"%b%06x" % (STEM, served >> 8)
        return self._request_ids + _HEX[served & 0xFF]

    def result(self, front: ReplyWriting, result: bytes | msgspec.Raw, now: float) -> bytes:
        """A whole reply with a result. The front writes the same out for calls that went the short way."""
        head = front.head
        key = head.key
        rate = key.requests_per_second
        edge = max(self.windows.edge(key.slot), now - 1.0)
        held = int((now - edge + TOLERANCE_S) * rate)
        resets = int(edge + self.resets)
        units = front.units
        size = len(front.id) + len(result)
        request_id = head.request_id or self.request_id()
        self.note(front, 200, request_id, now)
        return b"".join(
            (
                self.ok_stamp,
                request_id,
                key.limit_line,
                b"%d" % (held if 0 < held < rate else rate if held > 0 else 0),
                self.reset_lines.get(resets) or self.reset_line(resets),
                _UNITS[units] if units < 256 else b"X-Compute-Units: %d\r\n" % units,
                CACHE[front.cache],
                _upstream_line(front) if self.shows_upstream else b"",
                _CLOSE if front.left <= 1 or self.draining else b"",
                REPLY_LENGTHS[size] if size < 1024 else reply_length(size),
                front.id,
                b',"result":',
                result,
                b"}",
            )
        )

    def reset_line(self, resets: int) -> bytes:
        if len(self.reset_lines) > 8:
            self.reset_lines.clear()
        line = self.reset_lines[resets] = b"\r\nX-RateLimit-Reset: %d\r\n" % resets
        return line

    def error(self, front: ReplyWriting, error: bytes) -> bytes:
        body = error_reply(front.id, error)
        return self.ok(front, len(body)) + body

    def ok(self, front: ReplyWriting, size: int | None) -> bytes:
        """The head of a result of this size; without one, of a reply in chunks."""
        units = front.units
        return b"".join(
            (
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json",
                self._stamp,
                self._common(front, 200),
                _UNITS[units] if units < 256 else b"X-Compute-Units: %d\r\n" % units,
                CACHE[front.cache],
                _upstream_line(front) if self.shows_upstream else b"",
                b"Transfer-Encoding: chunked\r\n\r\n" if size is None else b"Content-Length: %d\r\n\r\n" % size,
            )
        )

    def empty(self, front: ReplyWriting) -> bytes:
        units = b"X-Compute-Units: %d\r\n" % front.units
        cache = CACHE[front.cache]
        return b"".join((b"HTTP/1.1 204 No Content", self._stamp, self._common(front, 204), units, cache, b"\r\n"))

    def fault(self, front: ReplyWriting, fault: Fault) -> bytes:
        body = orjson.dumps(fault.body())
        extra = "".join(f"{name}: {value}\r\n" for name, value in fault.headers.items())
        line = f"HTTP/1.1 {fault.status} {HTTPStatus(fault.status).phrase}\r\nContent-Type: application/json"
        tail = f"{extra}Content-Length: {len(body)}\r\n\r\n"
        return b"".join((line.encode(), self._stamp, self._common(front, fault.status), tail.encode(), body))

    def _common(self, front: ReplyWriting, status: int) -> bytes:
        """Request id, the three rate headers, and whether the connection ends here."""
        head = front.head
        request_id = head.request_id or self.request_id()
        now = time.monotonic()
        self.note(front, status, request_id, now)
        close = _CLOSE if front.left <= 1 or self.draining else b""
        # A key that has expired is nobody's: as for any unknown key, its rates are not told.
        rates = self._rates(head.key, now) if now < head.key.dies_at else b"\r\n"
        return b"".join((b"X-Request-Id: ", request_id, rates, close))

    def _rates(self, key: Key, now: float) -> bytes:
        # A bucket that has been full for a while is full now: its window has not ended in the past.
        edge = max(self.windows.edge(key.slot), now - 1.0)
        remaining = limits.remaining(edge, now, key.requests_per_second)
        resets = int(edge + self.resets)
        return b"".join((key.limit_line, b"%d" % remaining, self.reset_lines.get(resets) or self.reset_line(resets)))

    # Decisions that are rare

    def refusal(self, head: RequestHead, now: float) -> Fault:
        """A key that may not do anything here: disabled, expired, without a fitting scope, or a test key on a live network."""
        key = head.key
        if key.dies_at <= now:
            key.alive = False
            return Unauthorized("the API key is not valid")
        refusal = self._admission.may(key, head.route.any_scope, head.route.network)
        return refusal or Unauthorized("the API key is not valid")

    def note(self, front: ReplyWriting, status: int, request_id: bytes, now: float) -> None:
        """The request's line in the access log."""
        if self.log is None:
            return
        head = front.head
        self.log.add(
            _LINE
            % (
                self._second,
                request_id,
                head.route.network.id.encode(),
                front.policy.method.name.encode() if front.policy else b"",
                status,
                (now - front.began) * 1000,
                head.key.id.encode(),
                front.units,
                front.cache.encode(),
            )
        )
