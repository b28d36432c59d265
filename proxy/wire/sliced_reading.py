"""Reading a large message in slices of a fixed size."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

# One buffer for all connections: a slice is copied before the next is read.
_SLICE: Final = memoryview(bytearray(65_536))


class SliceReader(Protocol):
    """The protocol that receives the slices: a connection, or the TLS layer on it."""

    def data_received(self, data: bytes) -> None: ...
    def eof_received(self) -> object: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class SlicedReading(asyncio.BufferedProtocol):
    """Receives a large message in slices. Larger reads would delay other connections, and need a new allocation from the kernel
    each time."""

    def __init__(self, connection: SliceReader) -> None:
        self._connection = connection

    def get_buffer(self, sizehint: int) -> memoryview:
        return _SLICE

    def buffer_updated(self, nbytes: int) -> None:
        self._connection.data_received(bytes(_SLICE[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Called by a `TlsTransport`, which decrypts one slice at a time."""
        self._connection.data_received(data)

    def eof_received(self) -> None:
        self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()
