"""Bytes in, requests out: how a client connection on the hot path is read.

A message is served when it is complete, one at a time. Its head is recognised by its bytes or read by the strict reader; its
body is collected and looked at only when it is whole. What comes behind a request that is under way waits, and reading stops
while too much does. A message that is not for the hot path changes the connection's protocol for good.
"""

from __future__ import annotations

import asyncio
import time
from io import BytesIO
from typing import TYPE_CHECKING, Final

from proxy.errors import Fault, RequestTimeout
from proxy.web.front.request_heads import HeadTemplate, RequestHead
from proxy.wire.connection import NEVER, UpstreamConnection

if TYPE_CHECKING:
    from proxy.web.front.connection_limiter import ConnectionLimiter
    from proxy.web.front.front_context import FrontContext

# What a client may send ahead while its request is under way.
MAX_AHEAD = 262_144
# How often a connection's heads are compared to find what they have in common: some have nothing.
SHAPES = 4
# A body of this size takes longer to copy than to decide about.
LARGE_BODY = 16_384
_END: Final = b"\r\n\r\n"
_monotonic: Final = time.monotonic


class RequestReading(asyncio.Protocol):
    """One client connection, up to the requests in it; what to do with them is its heir's."""

    __slots__ = (
        "_address", "_ahead", "_began", "_body", "_door", "_head", "_hot", "_known", "_known_bytes", "_paused_reading",
        "_raw", "_shape", "_shapes_left", "_source", "_stalled_since", "_unsent", "busy", "left", "since", "transport",
    )  # fmt: skip

    def __init__(self, door: ConnectionLimiter, hot: FrontContext) -> None:
        self._door = door
        self._hot = hot
        self.transport: asyncio.Transport | None = None
        self._address = ""
        # Bytes that wait: for the rest of a head, or for their turn.
        self._ahead = b""
        # A body that is still coming, and its head as it was sent and read; without such a body, the last head.
        self._body: BytesIO | None = None
        self._raw = b""
        self._known_bytes = NEVER
        self._known: RequestHead | None = None
        # What the client's heads have in common, where each is another.
        self._shape: HeadTemplate | None = None
        self._shapes_left = SHAPES
        self._paused_reading = False
        self._stalled_since = 0.0
        self._unsent = 0
        self.since = 0.0
        # The request under way: its head, when it began, and the connection that streams its reply.
        self.busy = False
        self._head: RequestHead | None = None
        self._began = 0.0
        self._source: UpstreamConnection | None = None
        # Replies that may still go out here: with one left, the next is the connection's last.
        self.left = hot.max_requests

    def __repr__(self) -> str:
        return f"<RequestReading {'busy' if self.busy else 'reading' if self._ahead or self._body else 'idle'}>"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        peer = transport.get_extra_info("peername")
        self._address = peer[0] if isinstance(peer, tuple) else ""
        self.since = _monotonic()
        self._door.enter(self, self._address)

    def _ask(self, head: RequestHead, body: bytes) -> None:
        """Answer a request, now or later; `busy` until then."""
        raise NotImplementedError

    def _ask_large(self, head: RequestHead, data: bytes, start: int) -> None:
        """The same for a body that should not be copied more than it must: what begins there, to the end."""
        raise NotImplementedError

    def pause_writing(self) -> None:
        """The client does not take its reply: stop making more of it."""
        self._stalled_since = _monotonic()
        self._known_bytes = NEVER
        self._door.timed.add(self)
        if self._source is not None:
            self._source.pause()

    def resume_writing(self) -> None:
        self._stalled_since = 0.0
        if self._source is not None:
            self._source.resume()
        elif not self.busy:
            self._go_on()

    # Messages

    def _unusual(self, data: bytes) -> None:
        """A new head, a part of a message, or more than one."""
        if self._body is not None:
            self._continue(self._body, data)
            return
        is_new = not self._ahead
        shape = self._shape
        if shape is not None and is_new and len(data) == shape.head.total and self._is_free() and shape.fits(data):
            self._serve(shape.head, data[shape.head.size :])
            return
        if not is_new:
            data = self._ahead + data
            self._ahead = b""
        if not self._is_free():
            self._keep_ahead(data)
            return
        size = data.find(_END) + 4
        if size == 3:
            self._wait_for_head(data, is_new=is_new)
            return
        raw = data[:size]
        head = self._hot.heads.read(raw)
        if head is None:
            self._hand_over(data)
        elif len(data) < head.total:
            self._wait_for_body(head, raw, data, is_new=is_new)
        else:
            if head is self._known and self._shapes_left:
                self._shapes_left -= 1
                self._shape = self._hot.heads.shape(self._known_bytes, raw, head)
            # What is large is not for the quick way of small messages, which would copy it.
            self._known_bytes, self._known = raw if head.length < LARGE_BODY else NEVER, head
            if len(data) == head.total:
                self._serve(head, data, size)
                return
            self._ahead = data[head.total :]
            self._serve(head, data[size : head.total])

    def _is_free(self) -> bool:
        return not self.busy and not self._stalled_since

    def _keep_ahead(self, data: bytes) -> None:
        self._ahead = data
        if len(data) > MAX_AHEAD and not self._paused_reading and self.transport is not None:
            self._paused_reading = True
            self.transport.pause_reading()

    def _wait_for_head(self, data: bytes, *, is_new: bool) -> None:
        if len(data) > self._hot.max_head:
            self._hand_over(data)
            return
        self._ahead = data
        self._run_clock(is_new=is_new)

    def _wait_for_body(self, head: RequestHead, raw: bytes, data: bytes, *, is_new: bool) -> None:
        self._body = BytesIO()
        self._body.write(memoryview(data)[head.size :])
        self._raw = raw
        self._known_bytes, self._known = NEVER, head
        self._run_clock(is_new=is_new)

    def _run_clock(self, *, is_new: bool) -> None:
        """The message is not complete: its clock runs, from its first byte on."""
        if is_new or self not in self._door.timed:
            self.since = _monotonic()
            self._door.timed.add(self)

    def _continue(self, body: BytesIO, data: bytes) -> None:
        """More of a message whose head was read: nothing is looked at before it is complete."""
        head = self._known
        assert head is not None
        body.write(data)
        size = body.tell()
        if size < head.length:
            return
        self._body = None
        whole = body.getvalue()
        if self._stalled_since:
            self._keep_ahead(self._raw + whole)
        elif not head.key.alive:
            self._hand_over(self._raw + whole)
        elif size == head.length:
            self._serve(head, whole)
        else:
            self._ahead = whole[head.length :]
            self._serve(head, whole[: head.length])

    def _hand_over(self, data: bytes) -> None:
        """Not for us: aiohttp's from here on, with every byte of the message."""
        transport = self.transport
        assert transport is not None
        self._hot.write_buffer.flush()
        # RFC 9112, 2.2: empty lines before a request are passed over.
        line = data.lstrip(b"\r\n").partition(b"\r\n")[0]
        if line and b" HTTP/" not in line:
            self._door.turn_away(self)
            return
        self._door.hand_over(self, transport, self._address, data)
        self.transport = None

    def _go_on(self) -> None:
        """Serve what the client sent ahead."""
        if self._paused_reading and self.transport is not None:
            self._paused_reading = False
            self.transport.resume_reading()
        if self._ahead:
            self._hot.loop.call_soon(self._again)

    def _again(self) -> None:
        if self._ahead and not self.busy and not self._stalled_since and self.transport is not None:
            data, self._ahead = self._ahead, b""
            self._unusual(data)

    def _serve(self, head: RequestHead, data: bytes, start: int = 0) -> None:
        """The body begins there."""
        self.busy = True
        self._head = head
        if head.length < LARGE_BODY:
            self._ask(head, data[start:])
        else:
            self._ask_large(head, data, start)

    # What the door asks

    def check(self, now: float) -> None:
        """Called by the sweep while a clock runs."""
        limits = self._door.limits
        if self._stalled_since:
            self._stalled_since, self._unsent = self._door.watch_reader(self, now, self._stalled_since, self._unsent)
        elif self.busy or not (self._ahead or self._body):
            self._door.timed.discard(self)
        elif now - self.since > (limits.body_timeout_s if self._body else limits.head_timeout_s):
            self._show_out()

    def _show_out(self) -> None:
        """Too slow. Whoever has shown a key is told its rates."""
        if self._body is None:
            self._door.show_out(self)
            return
        self._head, self.left = self._known, 0
        self._write_late(RequestTimeout("the request's body did not arrive in time"))
        self.force_close()

    def _write_late(self, fault: Fault) -> None:
        raise NotImplementedError

    def close_if_quiet(self, now: float, quiet_s: float) -> None:
        if not (self.busy or self._ahead or self._body) and now - max(self.since, self._began) >= quiet_s:
            self.force_close()

    def force_close(self) -> None:
        if self.transport is not None:
            self.transport.close()
