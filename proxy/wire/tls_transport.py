"""TLS on a plain transport, for both sides of a connection.

A `TlsTransport` is the protocol of the plain transport below it and the transport of the protocol above it. Received data is
decrypted in one step and passed up in one piece; each write is encrypted and sent at once. Nothing is buffered here: the plain
transport has the only buffer, and its flow control is passed on unchanged.

The event loop's own TLS has a queue on each side, does not report a connection before its handshake has ended, so it cannot be
counted until then, and cannot resume the session of an earlier connection.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, Final, final

from proxy.wire.sliced_reading import SlicedReading

# RFC 8446, 5.1: the most plaintext in one record. A read of this size takes a whole record.
RECORD_BYTES: Final = 16_384
_WANT_READ: Final = ssl.SSLWantReadError
_FAILED: Final = (ssl.SSLError, ssl.CertificateError)

OnHandshake = Callable[[Exception | None], None]


@final
class TlsTransport(asyncio.Transport):
    """`on_handshake` is called once, with the error if the handshake failed. If it succeeded, the callback connects
    `protocol`."""

    __slots__ = (
        "_closing",
        "_incoming",
        "_lower",
        "_object",
        "_on_handshake",
        "_on_session",
        "_outgoing",
        "_protocol",
        "_take_turn",
        "is_open",
    )

    def __init__(
        self,
        context: ssl.SSLContext,
        protocol: asyncio.Protocol,
        on_handshake: OnHandshake,
        *,
        hostname: str | None = None,
        session: ssl.SSLSession | None = None,
        on_session: Callable[[ssl.SSLSession], None] | None = None,
        take_turn: Callable[[Callable[[], bool]], None] | None = None,
    ) -> None:
        """Without a `hostname`, this is the server's side. `session`: of an earlier connection to the same server.
        `on_session`: called once, with a session that a later connection may resume. `take_turn`: queues each step of the
        handshake, if it has to wait for its turn."""
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._object = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=hostname is None,
            server_hostname=hostname,
            session=session,
        )
        self._protocol: asyncio.Protocol = protocol
        self._on_handshake: OnHandshake | None = on_handshake
        self._lower: asyncio.Transport | None = None
        self._closing = False
        # Whether the handshake has succeeded.
        self.is_open = False
        self._on_session = on_session
        self._take_turn = take_turn

    def __repr__(self) -> str:
        state = "closing" if self._closing else "open" if self.is_open else "handshake"
        return f"<TlsTransport {state}>"

    # The protocol of the plain transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._lower = transport  # type: ignore[assignment]
        self._shake_hands()

    def data_received(self, data: bytes) -> None:
        self._incoming.write(data)
        if self.is_open:
            self._read()
        elif not self._closing:
            if self._take_turn is None:
                self._shake_hands()
            elif self._lower is not None:
                self._lower.pause_reading()
                self._take_turn(self._shake_hands_in_turn)

    def eof_received(self) -> bool:
        """The peer has closed without the alert that ends a TLS stream, so its data may be cut off (RFC 8446, 6.1)."""
        self.abort()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._lower = None
        self._closing = True
        if self.is_open:
            self._protocol.connection_lost(exc)
        else:
            self._end_handshake(exc or ConnectionResetError("the connection was closed during the TLS handshake"))

    def pause_writing(self) -> None:
        if self.is_open:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self.is_open:
            self._protocol.resume_writing()

    # The handshake

    def _shake_hands_in_turn(self) -> bool:
        if not self._closing:
            self.resume_reading()
            self._shake_hands()
        return False

    def _shake_hands(self) -> None:
        try:
            self._object.do_handshake()
        except _WANT_READ:
            self._send()
            return
        except _FAILED as exc:
            self._send()  # The alert that says why.
            self._closing = True
            if self._lower is not None:
                self._lower.close()
            self._end_handshake(exc)
            return
        self._send()
        self.is_open = True
        self._end_handshake(None)
        if self._incoming.pending:
            self._read()

    def _end_handshake(self, exc: Exception | None) -> None:
        on_handshake, self._on_handshake = self._on_handshake, None
        if on_handshake is not None:
            on_handshake(exc)

    # Reading

    def _read(self) -> None:
        incoming, read = self._incoming, self._object.read
        pieces: list[bytes] = []
        is_ended = False
        try:
            # A read of an empty buffer would raise, which costs more than decrypting a small message.
            while incoming.pending:
                piece = read(RECORD_BYTES)
                if not piece:
                    is_ended = True
                    break
                pieces.append(piece)
        except _WANT_READ:
            pass
        except _FAILED:
            self._send()
            self.abort()
            return
        if self._outgoing.pending:
            self._send()
        if pieces:
            if self._on_session is not None:
                self._keep_session()
            self._protocol.data_received(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        if is_ended and not self._closing:
            self._protocol.eof_received()
            self.close()

    def _keep_session(self) -> None:
        """With TLS 1.3 the server sends the session after the handshake, so it has arrived with the first data."""
        session = self._object.session
        if session is not None and session.has_ticket and self._on_session is not None:
            self._on_session(session)
        self._on_session = None

    def _send(self) -> None:
        if self._lower is not None and self._outgoing.pending:
            self._lower.write(self._outgoing.read())

    # The transport of the protocol above

    def write(self, data: Any) -> None:
        self._encrypt(data)
        self._send()

    def writelines(self, list_of_data: Any) -> None:
        for data in list_of_data:
            self._encrypt(data)
        self._send()

    def _encrypt(self, data: Any) -> None:
        if self._closing or not data:
            return
        try:
            written, size = self._object.write(data), len(data)
            if written < size:
                rest = memoryview(data)
                while written < size:
                    written += self._object.write(rest[written:])
        except _FAILED:
            self.abort()

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        if self._lower is None:
            return
        if self.is_open:
            # Creates the closing alert. `unwrap` raises because the peer's alert has not arrived, which is not waited for.
            try:
                self._object.unwrap()
            except _FAILED:
                pass
            self._send()
        self._lower.close()

    def abort(self) -> None:
        self._closing = True
        if self._lower is not None:
            self._lower.abort()

    def is_closing(self) -> bool:
        return self._closing

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """A protocol that reads in slices gets the plaintext of one slice of encrypted data at a time."""
        self._protocol = protocol  # type: ignore[assignment]
        if self._lower is not None:
            wants_slices = isinstance(protocol, SlicedReading)
            self._lower.set_protocol(SlicedReading(self) if wants_slices else self)  # type: ignore[arg-type]

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def pause_reading(self) -> None:
        if self._lower is not None and not self._closing:
            self._lower.pause_reading()

    def resume_reading(self) -> None:
        if self._lower is not None and not self._closing:
            self._lower.resume_reading()

    def is_reading(self) -> bool:
        return self._lower is not None and self._lower.is_reading()

    def get_write_buffer_size(self) -> int:
        return 0 if self._lower is None else self._lower.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        assert self._lower is not None
        return self._lower.get_write_buffer_limits()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if self._lower is not None:
            self._lower.set_write_buffer_limits(high, low)

    def can_write_eof(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "ssl_object":
            return self._object
        if name == "sslcontext":
            return self._object.context
        return default if self._lower is None else self._lower.get_extra_info(name, default)
