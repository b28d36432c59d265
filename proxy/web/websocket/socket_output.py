"""Frames to WebSocket clients: collected per socket, and written once per turn of the event loop.

A message for many sockets is written to a slice of them in each turn, so that calls are answered in between. So is a large
message to one socket: a slice of it in each turn of its account. Frames that come meanwhile wait behind it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Sequence

from proxy.services.rpc.held_body import SLICE_BYTES, ReplyShare, slices
from proxy.turn_queue import Step
from proxy.web.websocket.frames import deflated_frame, frame

# Sockets that are written to in one turn. While the loop has other work between two slices, a slice stays small and delays that
# work by a tenth of a millisecond. Otherwise the slice doubles, because every turn costs as much as half a message.
SMALL_SLICE, LARGE_SLICE = 16, 128
# Less than this between two turns means that the loop had nothing else to do.
IDLE_GAP_S = 15e-6
_monotonic = time.monotonic


class FlushQueue:
    """The sockets of a worker that have frames to write."""

    __slots__ = ("_loop", "_paused_at", "_slice", "_written", "dirty", "now")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.now = loop.time
        self.dirty: list[SocketOutput] = []
        # How many of `dirty` have been written to, how many are next, and when the last slice was done.
        self._written = 0
        self._slice = SMALL_SLICE
        self._paused_at = 0.0

    def __repr__(self) -> str:
        return f"<FlushQueue {len(self.dirty) - self._written} sockets>"

    def arm(self) -> None:
        """Schedule a flush for the end of the turn. Called before the first socket is added to `dirty`."""
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Write to the next slice. An index moves over the list: copying its rest each time cost 1 µs per message."""
        is_alone = _monotonic() - self._paused_at < IDLE_GAP_S
        self._slice = min(self._slice * 2, LARGE_SLICE) if is_alone else SMALL_SLICE
        dirty, start = self.dirty, self._written
        self._written = end = start + self._slice
        if end < len(dirty):
            self._loop.call_soon(self._flush)
        else:
            self.dirty, self._written = [], 0
        for output in dirty[start:end]:
            data = output.pending
            if type(data) is bytes and output.is_direct:
                # The most common case, inlined: one frame, to a client that reads.
                output.pending = None
                try:
                    written = os.write(output.fd, data)
                except OSError:
                    written = 0
                if written < len(data):
                    output.write_later(data[written:])
            else:
                output.write()
        self._paused_at = _monotonic()


# Larger than any message.
NEVER = 1 << 62
# A larger message is sent as it is: compressing it would take more than half a millisecond.
MAX_DEFLATED = 262_144


class SocketOutput:
    """The sending side of one socket."""

    __slots__ = (
        "_in_turn",
        "_is_plain",
        "_max_unread",
        "_on_overflow",
        "_rest",
        "_rest_bytes",
        "_shares",
        "compress_from",
        "deflated_at",
        "fd",
        "is_closing",
        "is_direct",
        "pending",
        "queue",
        "stalled_since",
        "transport",
        "window_bits",
    )

    def __init__(
        self,
        queue: FlushQueue,
        transport: asyncio.Transport,
        *,
        max_unread: int,
        on_overflow: Callable[[], None],
        in_turn: Callable[[Step], None],
        compress_from: int = 0,
        window_bits: int = 0,
    ) -> None:
        """`in_turn` takes a step in a later turn of the account. `on_overflow` is called when the client leaves more than
        `max_unread` bytes of replies unread. `compress_from`: the size from which messages are compressed, if the client
        accepts that and has a window."""
        self.compress_from = compress_from if compress_from and window_bits else NEVER
        self.window_bits = window_bits
        # When a reply was last compressed, in the loop's time.
        self.deflated_at = 0.0
        self.queue = queue
        self.transport: asyncio.Transport | None = transport
        self._max_unread = max_unread
        self._on_overflow = on_overflow
        # Whether the transport's buffer is empty, so that frames can bypass it. The descriptor is valid until the
        # connection is lost.
        self.is_direct = False
        # Frames on a TLS connection must not bypass their transport, which encrypts them.
        self._is_plain = transport.get_extra_info("sslcontext") is None
        self.fd = transport.get_extra_info("socket").fileno()
        # Frames that are written at the end of the turn.
        self.pending: bytes | list[bytes] | None = None
        # Whether the close frame is sent.
        self.is_closing = False
        # When the client stopped reading; 0.0 while it reads.
        self.stalled_since = 0.0
        self._in_turn = in_turn
        # The unsent rest of large messages and the frames after them, with the memory of each message at its end; and their
        # bytes.
        self._rest: deque[bytes | memoryview | ReplyShare] = deque()
        self._rest_bytes = 0
        # The memory of large messages that were written and that the client has not read yet.
        self._shares: list[ReplyShare] = []

    def __repr__(self) -> str:
        state = "closed" if self.transport is None else "closing" if self.is_closing else "open"
        return f"<SocketOutput {state}, {self.unread_bytes} bytes unread>"

    @property
    def is_open(self) -> bool:
        return self.transport is not None and not self.is_closing

    @property
    def is_stalled(self) -> bool:
        return self.stalled_since > 0

    @property
    def unread_bytes(self) -> int:
        """Bytes that wait here and in the transport's buffer, without those in the kernel."""
        return self._rest_bytes + (self.transport.get_write_buffer_size() if self.transport is not None else 0)

    def message(self, payload: bytes) -> bytes:
        """The frame of a message."""
        return self._deflated(payload) if len(payload) >= self.compress_from else frame(payload)

    def _deflated(self, payload: bytes) -> bytes:
        self.deflated_at = self.queue.now()
        return deflated_frame(payload, self.window_bits)

    def send(self, data: bytes) -> None:
        """Send at the end of the turn, together with other frames of the turn."""
        pending = self.pending
        if pending is None:
            self.pending = data
            if not self.queue.dirty:
                self.queue.arm()
            self.queue.dirty.append(self)
        elif isinstance(pending, list):
            pending.append(data)
        else:
            self.pending = [pending, data]

    def send_large(self, pieces: Sequence[bytes | memoryview], share: ReplyShare) -> None:
        """Send a message in pieces; the first is the header of its frame. Its memory is held until the client has read
        most of it. A message that is not very large is compressed if the client accepts that."""
        if self.compress_from <= sum(map(len, pieces[1:])) <= MAX_DEFLATED:
            pieces = [self._deflated(b"".join(pieces[1:]))]
        self.write()
        self.is_direct = False
        if self.transport is None:
            share.give_all()
            return
        unread, size = self.unread_bytes, sum(map(len, pieces))
        if unread and unread + size > self._max_unread and not self.is_closing:
            share.give_all()
            self._on_overflow()
            return
        is_first = not self._rest
        for piece in pieces:
            self._rest.extend(slices(piece))
        self._rest.append(share)
        self._rest_bytes += size
        if is_first and not self.stalled_since:
            self._send_slice()

    def _send_slice(self) -> bool:
        """Write a slice of the rest. The next one follows in the account's next turn, if the client reads."""
        if self.transport is None or not self._rest:
            return False
        self.transport.writelines(self._next_parts(SLICE_BYTES))
        if not self.stalled_since:
            self._go_on()
        return True

    def _next_parts(self, size: int) -> list[bytes | memoryview]:
        """The next parts of the rest, until there are this many bytes."""
        parts: list[bytes | memoryview] = []
        while self._rest and size > 0:
            part = self._rest.popleft()
            if isinstance(part, ReplyShare):
                self._shares.append(part)
            else:
                parts.append(part)
                size -= len(part)
                self._rest_bytes -= len(part)
        return parts

    def _go_on(self) -> None:
        self._give_shares()
        if self._rest:
            self._in_turn(self._send_slice)

    def resume(self) -> None:
        """The client reads again."""
        self.stalled_since = 0.0
        self._go_on()

    def _give_shares(self) -> None:
        for share in self._shares:
            share.give_all()
        self._shares.clear()

    def write(self) -> None:
        """Write pending frames. Bypassing an empty transport saves 1 µs per message, a seventh of its whole cost."""
        data, self.pending = self.pending, None
        if data is None or self.transport is None:
            return
        if isinstance(data, list):
            data = b"".join(data)
        if self.is_direct or (self._is_plain and not self.unread_bytes and not self._rest):
            self.is_direct = True
            try:
                data = data[os.write(self.fd, data) :]
            except OSError:  # The kernel's buffer is full, or the connection is broken and the transport will notice.
                pass
        if data:
            self.write_later(data)

    def write_later(self, data: bytes) -> None:
        """Give the transport the bytes that the kernel did not take, behind the rest of a large message."""
        self.is_direct = False
        if self.transport is None:
            return
        unread = self.unread_bytes
        if unread and unread + len(data) > self._max_unread and not self.is_closing:
            self._on_overflow()
        elif self._rest:
            self._rest.append(data)
            self._rest_bytes += len(data)
        else:
            self.transport.write(data)

    def shut(self) -> None:
        """Write the remaining frames and close the transport."""
        self.write()
        self.is_direct = False
        if self.transport is not None:
            if self._rest:
                self.transport.writelines(self._next_parts(NEVER))
            self.transport.close()

    def drop(self) -> None:
        """Write pending frames and end the connection without a close frame."""
        self.write()
        self.is_direct = False
        if self.transport is not None:
            self.transport.abort()

    def lose(self) -> None:
        """The connection is lost."""
        self.transport = None
        self._next_parts(NEVER)
        self._give_shares()
        self.is_direct = False
