"""Large results that are not passed on before they are whole."""

from __future__ import annotations

import msgspec

from proxy.errors import BROKEN_REPLY, Fault, InternalError
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.reply_share import NO_ROOM, ReplyShare
from proxy.wire.upstream import Piece, UpstreamConnection


class HeldResult:
    """The pieces of a large result, without the start of the upstream's reply but with the brace at its end. `reserved` are the
    bytes that are still to come and have their room."""

    __slots__ = ("pieces", "reserved", "share", "size")

    def __init__(self, share: ReplyShare) -> None:
        self.share = share
        self.pieces: list[bytes] = []
        self.size = 0
        self.reserved = 0

    def __repr__(self) -> str:
        return f"<HeldResult {self.size} bytes>"

    def reserve(self, size: int, *, has_waited: bool = False) -> bool:
        """Take room for the part of a result of this size that has not arrived yet."""
        room = size - self.size
        if not (self.share.take(room) if has_waited else self.share.reserve(room)):
            return False
        self.reserved = room
        return True

    def add(self, piece: Piece) -> bool:
        """False if there is no room for the piece."""
        if self.reserved:
            self.reserved = max(0, self.reserved - len(piece))
        elif not self.share.take(len(piece)):
            return False
        self.pieces.append(bytes(piece))
        self.size += len(piece)
        return True

    def drop(self) -> None:
        self.share.give(self.size + self.reserved)
        self.pieces, self.size, self.reserved = [], 0, 0


class HeldResultWaiter:
    """A waiter that holds a large result in pieces. Subclasses declare the attributes and send the complete result."""

    streams: bool = True
    flight: Flight | None
    held: HeldResult | None
    # A result that waits for room: its upstream connection, and the bytes that are left to read.
    waiting: UpstreamConnection | None = None
    left: int = 0

    def new_share(self) -> ReplyShare:
        raise NotImplementedError

    def on_held(self, held: HeldResult) -> None:
        raise NotImplementedError

    def on_result(self, result: bytes | msgspec.Raw) -> None:
        raise NotImplementedError

    def on_error(self, error: bytes) -> None:
        raise NotImplementedError

    def on_fault(self, fault: Fault) -> None:
        raise NotImplementedError

    def on_charged(self, units: int) -> bool:
        raise NotImplementedError

    def on_stream(self, beginning: memoryview, left: int | None, connection: UpstreamConnection) -> None:
        self.held = HeldResult(self.new_share())
        if left is not None and not self.held.reserve(left):
            if not self.held.share.may_wait(left):
                self._give_up()
                return
            self._wait(left, connection)
        self.on_stream_piece(beginning)

    def _wait(self, left: int, connection: UpstreamConnection) -> None:
        """Leave the rest at the upstream until there is room, or until others need the connection."""
        assert self.held is not None
        self.left, self.waiting = left, connection
        connection.when_stalled(self._give_up)
        connection.pause()
        self.held.share.wait(self._take_room)

    def _take_room(self) -> bool:
        connection = self.waiting
        assert self.held is not None
        assert connection is not None
        if not self.held.reserve(self.left, has_waited=True):
            return False
        self.waiting = None
        connection.when_stalled(None)
        connection.resume()
        return True

    def _give_up(self) -> None:
        self.drop_held()
        if self.flight is not None:
            self.flight.leave(self)
        self.on_error(NO_ROOM)

    def on_stream_piece(self, piece: Piece) -> None:
        if self.held is None or self.held.add(piece):
            return
        self._give_up()

    def on_stream_end(self) -> None:
        if self.held is not None:
            held, self.held = self.held, None
            self.on_held(held)

    def on_stream_broken(self) -> None:
        if self.held is not None:
            self.drop_held()
            self.on_fault(InternalError(BROKEN_REPLY))

    def drop_held(self) -> None:
        if self.held is not None:
            if self.waiting is not None:
                self.held.share.forget(self._take_room)
                self.waiting = None
            self.held.drop()
            self.held = None
