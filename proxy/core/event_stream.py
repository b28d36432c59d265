"""Server-sent events (HTML, 9.2.6 "Interpreting an event stream"): a body in pieces to its events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

EVENT_STREAM: Final = "text/event-stream"
# The events of beacon nodes have up to a few hundred kilobytes.
LONGEST_EVENT: Final = 1 << 20


class BadEvents(ValueError):
    """The body is not an event stream, or one of its events is too long."""


@dataclass(frozen=True, slots=True)
class SentEvent:
    """`data`: its lines, joined by line feeds."""

    name: bytes
    data: bytes

    def encoded(self) -> bytes:
        """The event in the form that clients receive."""
        first = b"event: %b\n" % self.name if self.name else b""
        return first + b"".join([b"data: %b\n" % line for line in self.data.split(b"\n")]) + b"\n"


def comment(text: str) -> bytes:
    """A line that clients ignore, and people see."""
    return b": %b\n\n" % text.encode().replace(b"\n", b" ").replace(b"\r", b" ")


class EventReader:
    """Comments, ids and retry times are left out: ids of one upstream mean nothing to another."""

    def __init__(self, longest: int = LONGEST_EVENT) -> None:
        self._longest = longest
        # The bytes after the last whole event, with line feeds as their only line ends.
        self._rest = bytearray()
        # A carriage return at the end of a piece may belong to a line feed that follows it.
        self._is_after_return = False

    def __repr__(self) -> str:
        return f"<EventReader {len(self._rest)} bytes>"

    def feed(self, piece: bytes) -> list[SentEvent]:
        """The events that this piece completes. Raises BadEvents."""
        if self._is_after_return and piece[:1] == b"\n":
            piece = piece[1:]
        if piece:
            self._is_after_return = piece[-1:] == b"\r"
        searched = max(0, len(self._rest) - 1)
        self._rest += piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        events = []
        while (end := self._rest.find(b"\n\n", searched)) >= 0:
            if (event := _event(bytes(self._rest[:end]))) is not None:
                events.append(event)
            del self._rest[: end + 2]
            searched = 0
        if len(self._rest) > self._longest:
            raise BadEvents(f"an event is longer than {self._longest} bytes")
        return events


def _event(block: bytes) -> SentEvent | None:
    name, data = b"", []
    for line in block.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"event":
            name = value
        elif field == b"data":
            data.append(value)
    return SentEvent(name, b"\n".join(data)) if data else None
