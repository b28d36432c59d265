"""Sends a reply in pieces, at the pace at which its client reads.

While the client does not read, the upstream connection that sends the pieces is paused. If other calls wait for that
connection, the rest of the reply is held in memory, within the bounds of the memory budget, or the client is disconnected.
"""

from __future__ import annotations

import asyncio
from typing import final

import msgspec

from proxy.memory_budget import BudgetLine
from proxy.web.front.stream_form import StreamForm
from proxy.wire.upstream import Piece, UpstreamConnection


@final
class ReplyStream:
    """The pieces of one client connection's replies. One reply is sent at a time, so one stream is reused for all of them."""

    __slots__ = (
        "_account",
        "_form",
        "_held",
        "_held_bytes",
        "_holds",
        "_source",
        "_whole",
        "stalled_since",
        "transport",
    )

    def __init__(self, held: BudgetLine) -> None:
        self._held = held
        self.transport: asyncio.Transport | None = None
        # When the client stopped reading; 0.0 while it reads.
        self.stalled_since = 0.0
        # The upstream connection that sends the pieces, and the form in which they are passed on.
        self._source: UpstreamConnection | None = None
        self._form = StreamForm()
        # Whether the reply is read from the upstream into memory, because the client does not read it; the bytes that are held,
        # and the account that they count for.
        self._holds = False
        self._held_bytes = 0
        self._account = ""
        # A large result that is sent whole (bytes or msgspec.Raw). Other callers may be sent the same object.
        self._whole: object = None

    def __repr__(self) -> str:
        state = "stalled" if self.stalled_since else "idle" if self._source is None else "sending"
        return f"<ReplyStream {state}, {self._held_bytes} bytes held>"

    @property
    def chunked(self) -> bool:
        return self._form.chunked

    @property
    def encoding(self) -> int:
        return self._form.encoding

    def open(self, transport: asyncio.Transport) -> None:
        self.transport = transport

    def begin(self, account: str, encoding: int, *, chunked: bool) -> None:
        self._account = account
        self._form.begin(encoding, chunked=chunked)

    def hold(self, account: str, size: int) -> bool:
        """Hold a reply of this size until the client has read most of it. False if there is no room."""
        self._account = account
        return self._hold(size)

    def hold_whole(self, account: str, result: bytes | msgspec.Raw) -> bool:
        """The same for a result that other callers may get too: its memory counts once for all callers of the account."""
        if not self._held.take_shared(account, result, len(result)):
            return False
        self._account, self._whole = account, result
        return True

    def sent_whole(self) -> None:
        """The transport has taken a reply that is held."""
        if not self.stalled_since:
            self._release()

    def take_from(self, source: UpstreamConnection | None) -> None:
        """The pieces come from this upstream connection from now on; None if they are in memory."""
        self._source = source
        if source is not None:
            source.when_stalled(self._on_stalled)
            if self.stalled_since and not self._holds:
                source.pause()

    def send(self, piece: Piece) -> None:
        if self._holds and not self._hold(len(piece)):
            self._abort()
            return
        data = self._form.frame(piece)
        if data and self.transport is not None:
            self.transport.write(data)

    def end(self) -> None:
        # Cleared before the write: a write may call pause_writing, and the upstream connection is no longer ours to pause.
        self._source = None
        if self._form.chunked and self.transport is not None:
            self.transport.write(self._form.end())

    def break_off(self) -> None:
        """Abort the connection, so that the client cannot mistake half a reply for a whole one."""
        self._source = None
        self._form.stop()
        self._abort()

    def pause(self, now: float) -> None:
        """The client does not read: stop reading its reply from the upstream."""
        self.stalled_since = now
        if self._source is not None and not self._holds:
            self._source.pause()

    def stalled(self, since: float) -> None:
        """Count the time for which the client reads nothing from this moment on. 0.0: it reads."""
        self.stalled_since = since

    def read_again(self) -> None:
        """The client reads again, and has read most of what was held: give the memory back."""
        self.stalled_since = 0.0
        self._release()

    def resume_source(self) -> bool:
        """Read on from the upstream. False if no upstream connection sends a reply."""
        if self._source is None:
            return False
        self._source.resume()
        return True

    def close(self) -> None:
        self.transport = None
        self._source = None
        self._release()

    def _on_stalled(self) -> None:
        """Others need the upstream connection: hold the rest of the reply in memory, or drop the client."""
        source = self._source
        if source is None:
            return
        if self._held.has_room(self._account, source.bytes_left):
            self._holds = True
            source.resume()
        else:
            self._abort()

    def _hold(self, size: int) -> bool:
        if not self._held.take(self._account, size):
            return False
        self._held_bytes += size
        return True

    def _release(self) -> None:
        self._holds = False
        if self._held_bytes:
            self._held.give_back(self._account, self._held_bytes)
            self._held_bytes = 0
        if self._whole is not None:
            self._held.give_shared(self._account, self._whole, len(self._whole))  # type: ignore[arg-type]
            self._whole = None

    def _abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()
