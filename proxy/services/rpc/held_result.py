"""Large results that are not passed on before they are whole."""

from __future__ import annotations

import msgspec

from proxy.errors import Fault, InternalError
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.held_replies import NO_ROOM, ReplyShare
from proxy.wire.upstream import Piece, UpstreamConnection


class HeldResult:
    """The pieces of a large result, without the start of the upstream's reply but with the brace at its end."""

    __slots__ = ("pieces", "share", "size")

    def __init__(self, share: ReplyShare) -> None:
        self.share = share
        self.pieces: list[bytes] = []
        self.size = 0

    def __repr__(self) -> str:
        return f"<HeldResult {self.size} bytes>"

    def add(self, piece: Piece) -> bool:
        """False if there is no room for the piece."""
        if not self.share.take(len(piece)):
            return False
        self.pieces.append(bytes(piece))
        self.size += len(piece)
        return True

    def drop(self) -> None:
        self.share.give(self.size)
        self.pieces, self.size = [], 0


class HeldResultWaiter:
    """A waiter that takes a large result in pieces and holds them. Subclasses have the attributes, and send what is whole."""

    streams: bool = True
    flight: Flight | None
    held: HeldResult | None

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

    def on_stream(self, beginning: memoryview, left: int | None, connection: UpstreamConnection) -> None:
        self.held = HeldResult(self.new_share())
        self.on_stream_piece(beginning)

    def on_stream_piece(self, piece: Piece) -> None:
        if self.held is None or self.held.add(piece):
            return
        self.drop_held()
        if self.flight is not None:
            self.flight.leave(self)
        self.on_error(NO_ROOM)

    def on_stream_end(self) -> None:
        if self.held is not None:
            held, self.held = self.held, None
            self.on_held(held)

    def on_stream_broken(self) -> None:
        if self.held is not None:
            self.drop_held()
            self.on_fault(InternalError("the upstream's reply broke off"))

    def drop_held(self) -> None:
        if self.held is not None:
            self.held.drop()
            self.held = None
