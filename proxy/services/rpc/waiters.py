"""Whoever waits for a flight to land, and how it is told."""

from __future__ import annotations

from typing import Protocol

import msgspec

from proxy.errors import Fault
from proxy.wire.upstream import Piece, UpstreamConnection


class Waiter(Protocol):
    """Whoever asked. `streams`: whether it can take a large result in pieces."""

    @property
    def streams(self) -> bool: ...
    def on_result(self, result: bytes | msgspec.Raw) -> None: ...
    def on_error(self, error: bytes) -> None: ...
    def on_fault(self, fault: Fault) -> None: ...
    def on_stream(self, beginning: memoryview, left: int | None, connection: UpstreamConnection) -> None: ...
    def on_stream_piece(self, piece: Piece) -> None: ...
    def on_stream_end(self) -> None: ...
    def on_stream_broken(self) -> None: ...


class WholeResultWaiter:
    """A waiter that takes its result whole: the half of a `Waiter` that is never called."""

    __slots__ = ()
    streams: bool = False

    def on_stream(self, beginning: memoryview, left: int | None, connection: UpstreamConnection) -> None:
        raise AssertionError("this waiter takes its result whole")

    def on_stream_piece(self, piece: Piece) -> None:
        raise AssertionError("this waiter takes its result whole")

    def on_stream_end(self) -> None:
        raise AssertionError("this waiter takes its result whole")

    def on_stream_broken(self) -> None:
        raise AssertionError("this waiter takes its result whole")


class _AbsentWaiter(WholeResultWaiter):
    """Takes the place of a waiter that left."""

    def on_result(self, result: bytes | msgspec.Raw) -> None: ...
    def on_error(self, error: bytes) -> None: ...
    def on_fault(self, fault: Fault) -> None: ...


ABSENT_WAITER = _AbsentWaiter()
