"""The lines that a worker gets from its supervisor while it runs: a list of unattended sockets, new certificates, or the
notice that the service is about to stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping

# The first byte of a line, which is JSON, identifies its kind.
UNATTENDED, CERTIFICATES, LEAVING = b"[", b"{", b"t"
LEAVING_LINE = b"true\n"


class ControlMessages:
    def __init__(self, handlers: Mapping[bytes, Callable[[bytes], None]]) -> None:
        """`handlers`: by the first byte of their lines."""
        self._handlers = handlers
        # The bytes after the last complete line.
        self._rest = b""

    def __repr__(self) -> str:
        return f"<ControlMessages {len(self._rest)} bytes of a line>"

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._handlers[line[:1]](line)
