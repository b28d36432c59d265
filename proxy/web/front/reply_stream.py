"""Sends a large reply at the pace at which its client reads: in pieces from its upstream, or in slices from memory.

While the client does not read, the upstream connection that sends the pieces is paused. If other calls wait for that
connection, the rest of the reply is held in memory, within the bounds of the memory budget, or the client is disconnected.
A reply from memory is sent a slice in each of the client's turns: the kernel may take megabytes at once, and other clients
would wait for that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import final

import msgspec

from proxy.core.encodings import StreamCompressor
from proxy.memory_budget import BudgetLine
from proxy.services.rpc.held_body import HeldBody, ReplyShare, slices
from proxy.turn_queue import TurnQueue
from proxy.wire.upstream import Piece, UpstreamConnection


@final
class ReplyStream:
    """The pieces of one client connection's replies. One reply is sent at a time, so one stream is reused for all of them."""

    __slots__ = (
        "_account",
        "_compressor",
        "_held",
        "_on_sent",
        "_share",
        "_slices",
        "_source",
        "_turns",
        "_whole",
        "chunked",
        "stalled_since",
        "transport",
    )

    def __init__(self, held: BudgetLine, turns: TurnQueue) -> None:
        self._held = held
        self._turns = turns
        self.transport: asyncio.Transport | None = None
        # When the client stopped reading; 0.0 while it reads.
        self.stalled_since = 0.0
        # The reply whose pieces an upstream connection sends, and the form in which they are passed on: as they are, chunked,
        # or compressed and chunked.
        self._source: HeldBody | None = None
        self.chunked = False
        self._compressor: StreamCompressor | None = None
        # The unsent rest of a large reply that is in memory, and what is called after its last slice.
        self._slices: deque[Piece] | None = None
        self._on_sent: Callable[[], None] | None = None
        # The account of the reply, and the bytes that are held for it: all of them count.
        self._account = ""
        self._share = ReplyShare(held, "", free=0)
        # A large result that is sent whole (bytes or msgspec.Raw). Other callers may be sent the same object.
        self._whole: object = None

    def __repr__(self) -> str:
        is_idle = self._source is None and self._slices is None
        state = "stalled" if self.stalled_since else "idle" if is_idle else "sending"
        return f"<ReplyStream {state}, {self._share!r}>"

    @property
    def encoding(self) -> int:
        return 0 if self._compressor is None else self._compressor.encoding

    def open(self, transport: asyncio.Transport) -> None:
        self.transport = transport

    # A reply in pieces

    def begin(self, account: str, encoding: int, *, chunked: bool) -> None:
        """A compressed reply is chunked in any case, because its size is not known."""
        self._begin_share(account)
        self._compressor = StreamCompressor(encoding) if encoding else None
        self.chunked = chunked or encoding > 0

    def take_from(self, source: UpstreamConnection | None) -> None:
        """The pieces come from this upstream connection from now on; None if they are in memory."""
        body = self._source
        if body is not None and body.source is not source:
            self._leave_source()
        if source is None:
            return
        if body is None or body.source is None:
            body = self._source = HeldBody(self._share, source, self._abort)
        source.when_stalled(body.on_evicted)
        if self.stalled_since:
            body.client_stalled()

    def send(self, piece: Piece) -> None:
        body = self._source
        if body is not None and body.state == "holding" and not body.has_room(len(piece)):
            self._abort()
            return
        if self._compressor is not None:
            piece = self._compressor.feed(piece)  # Empty if the piece waits in the compressor.
        if piece and self.transport is not None:
            self.transport.write(_chunk(piece) if self.chunked else piece)

    def end(self) -> None:
        # Before the write, which may call pause_writing: the upstream connection is no longer ours to pause.
        self._leave_source()
        self.sent_whole()
        if not self.chunked:
            return
        last = b"" if self._compressor is None else self._compressor.finish()
        self._stop()
        if self.transport is not None:
            self.transport.write((_chunk(last) if last else b"") + b"0\r\n\r\n")

    def break_off(self) -> None:
        """Abort the connection, so that the client cannot mistake half a reply for a whole one."""
        self._leave_source()
        self._stop()
        self._abort()

    def _leave_source(self) -> None:
        if self._source is not None:
            self._source.end()
            self._source = None

    def _stop(self) -> None:
        self.chunked = False
        self._compressor = None

    # A reply from memory

    def hold(self, account: str, size: int) -> bool:
        """Hold a reply of this size until the client has read most of it. False if there is no room."""
        self._begin_share(account)
        return self._share.take(size)

    def hold_whole(self, account: str, result: bytes | msgspec.Raw) -> bool:
        """The same for a result that other callers may get too: its memory counts once for all callers of the account."""
        if not self._held.take_shared(account, result, len(result)):
            return False
        self._account, self._whole = account, result
        return True

    def _begin_share(self, account: str) -> None:
        self._account = account
        self._share.give_all()
        self._share = ReplyShare(self._held, account, free=0)

    def send_slices(self, client: str, parts: tuple[Piece, ...], on_sent: Callable[[], None]) -> None:
        """Send the reply, a slice in each of the client's turns."""
        self._account, self._on_sent = client, on_sent
        self._slices = deque()
        for part in parts:
            self._slices.extend(slices(part))
        self._send_slice()

    def _send_slice(self) -> bool:
        rest, on_sent = self._slices, self._on_sent
        if not rest or on_sent is None or self.transport is None:
            return False
        self.transport.write(rest.popleft())
        if not rest:
            self._slices = self._on_sent = None
            on_sent()
        elif not self.stalled_since:
            self._turns.add(self._account, self._send_slice)
        return True

    def sent_whole(self) -> None:
        """The transport has taken a reply that is held."""
        if not self.stalled_since:
            self._release()

    # A client that does not read

    def pause(self, now: float) -> None:
        """The client does not read: stop reading its reply from the upstream."""
        self.stalled_since = now
        if self._source is not None:
            self._source.client_stalled()

    def stalled(self, since: float) -> None:
        """Count the time for which the client reads nothing from this moment on. 0.0: it reads."""
        self.stalled_since = since

    def resume_slices(self) -> bool:
        """The client reads again. False if no slices are left to send."""
        if self._slices is None:
            return False
        self.stalled_since = 0.0
        self._turns.add(self._account, self._send_slice)
        return True

    def read_again(self) -> None:
        """The client reads again, and has read most of what was held: give the memory back, and read on from the upstream."""
        self.stalled_since = 0.0
        self._release()
        if self._source is not None:
            self._source.client_reads()

    @property
    def has_source(self) -> bool:
        """Whether an upstream connection sends a reply."""
        return self._source is not None

    def close(self) -> None:
        self.transport = None
        self._leave_source()
        self._slices = self._on_sent = None
        self._release()

    def _release(self) -> None:
        self._share.give_all()
        if self._whole is not None:
            self._held.give_shared(self._account, self._whole, len(self._whole))  # type: ignore[arg-type]
            self._whole = None

    def _abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


def _chunk(piece: Piece) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), bytes(piece))
