"""Waiters: the objects that receive the result of a flight.

This module is separate from `flights.py` because classes in modules that are not compiled inherit from it, and a compiled class
cannot be their base.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from proxy.errors import Fault
from proxy.wire.upstream import Piece, UpstreamConnection


class Waiter(Protocol):
    """Receives the result of a flight. `streams`: whether it accepts a large result in pieces."""

    @property
    def streams(self) -> bool: ...
    def on_result(self, result: bytes | msgspec.Raw) -> None: ...
    def on_error(self, error: bytes) -> None: ...
    def on_fault(self, fault: Fault) -> None: ...

    def on_charged(self, units: int) -> bool:
        """Further upstream calls were made for the result, at this price. Returns whether the waiter counts them."""
        ...

    def on_waited(self, waited_s: float) -> None:
        """The call has waited this long for its account's own rate limit, which is not a part of the time that it took."""

    def on_stream(self, beginning: memoryview, left: int | None, connection: UpstreamConnection) -> None: ...
    def on_stream_piece(self, piece: Piece) -> None: ...
    def on_stream_end(self) -> None: ...
    def on_stream_broken(self) -> None: ...


class WholeResultWaiter:
    """A waiter that accepts only whole results: its streaming methods are never called."""

    __slots__ = ()
    streams: bool = False

    def on_charged(self, units: int) -> bool:
        return False

    def on_waited(self, waited_s: float) -> None: ...

    def on_stream(self, beginning: memoryview, left: int | None, connection: UpstreamConnection) -> None:
        raise AssertionError("this waiter accepts only whole results")

    def on_stream_piece(self, piece: Piece) -> None:
        raise AssertionError("this waiter accepts only whole results")

    def on_stream_end(self) -> None:
        raise AssertionError("this waiter accepts only whole results")

    def on_stream_broken(self) -> None:
        raise AssertionError("this waiter accepts only whole results")


class _AbsentWaiter(WholeResultWaiter):
    """Takes the place of a waiter that left."""

    def on_result(self, result: bytes | msgspec.Raw) -> None: ...
    def on_error(self, error: bytes) -> None: ...
    def on_fault(self, fault: Fault) -> None: ...


ABSENT_WAITER = _AbsentWaiter()
