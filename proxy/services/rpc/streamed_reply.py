"""The reply to a request for a REST route, whose large body is passed on as it arrives.

A client that reads slowly pauses the upstream connection. If others need it meanwhile, the rest of the body is held, within the
bounds of the memory budget, or the reply is cut off (`held_body.py` has the rules).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

import msgspec

from proxy.core.rest_routes import RECORD_BODY
from proxy.errors import BROKEN_REPLY, InternalError
from proxy.services.rpc.calls import PendingReply
from proxy.services.rpc.held_body import NO_ROOM, HeldBody, ReplyShare
from proxy.wire.upstream import Piece, UpstreamConnection

# A client that has not read this much of a large body pauses it. A request that holds less than a megabyte is not counted.
MOST_UNREAD: Final = 262_144


class StreamedReply(PendingReply):
    """The reply to one request. A large body is received in pieces, which `pieces` has until they are written."""

    __slots__ = ("_body", "_failure", "_share", "_unread", "_woken", "is_streamed", "is_whole", "length", "pieces")
    streams = True

    def __init__(self, share: ReplyShare) -> None:
        super().__init__()
        self._share = share
        # A large body until all of it has arrived, or no more of it will.
        self._body: HeldBody | None = None
        self.is_streamed = False
        self._woken = asyncio.Event()
        self._unread = 0
        self.pieces: deque[bytes] = deque()
        # The length of a body in pieces, if it is known.
        self.length: int | None = None
        self.is_whole = False
        # Why there is no more of the body.
        self._failure: Exception | None = None

    def on_result(self, result: bytes | msgspec.Raw) -> None:
        if self.is_answered or self._share.take(len(result)):
            super().on_result(result)
        else:
            self.on_error(NO_ROOM)

    def on_stream(self, beginning: memoryview, left: int | None, connection: UpstreamConnection) -> None:
        start = bytes(beginning)
        at = start.find(RECORD_BODY)
        self.is_streamed = True
        body = self._body = HeldBody(self._share, connection, self._cut_off)
        connection.when_stalled(body.on_evicted)
        if left is not None:
            self.length = left - at - len(RECORD_BODY)
        super().on_result(start[:at] + b"}")
        self.on_stream_piece(start[at + len(RECORD_BODY) :])

    def on_stream_piece(self, piece: Piece) -> None:
        body = self._body
        if body is None:
            return
        if body.state == "holding" and not body.has_room(len(piece)):
            self._cut_off()
            return
        self.pieces.append(bytes(piece))
        self._unread += len(piece)
        if self._unread > MOST_UNREAD:
            body.client_stalled()
        self._woken.set()

    def on_stream_end(self) -> None:
        self._end_body()
        self.is_whole = True
        self._woken.set()

    def on_stream_broken(self) -> None:
        self._fail(InternalError(BROKEN_REPLY, reason="upstream"))

    def _fail(self, failure: Exception) -> None:
        self._end_body()
        self._failure = failure
        self._woken.set()

    def _cut_off(self) -> None:
        """Other calls need the connection, the client does not read, and there is no room for the rest."""
        self.leave()
        self._fail(ConnectionAbortedError("the client did not read the reply"))

    def _end_body(self) -> None:
        if self._body is not None:
            body, self._body = self._body, None
            body.end()

    def leave(self) -> None:
        if self.flight is not None and not self.is_whole and self._failure is None:
            self.flight.leave(self)

    def drop(self) -> None:
        self.leave()
        self._end_body()
        self._share.give_all()

    async def next_piece(self) -> bytes:
        """The next piece of the body; empty at its end. Raises InternalError if the upstream has failed, and ConnectionError if
        the client reads too slowly: a reply that has begun can only be cut off."""
        while not self.pieces:
            if self._failure is not None:
                raise self._failure
            if self.is_whole:
                return b""
            self._woken.clear()
            await self._woken.wait()
        piece = self.pieces.popleft()
        self._unread -= len(piece)
        if self._unread <= MOST_UNREAD and self._body is not None and self._body.state != "passing":
            self._body.client_reads()
        return piece
