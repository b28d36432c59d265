"""RFC 6455 frames: encoding of ours, and a strict reader for those of clients.

A server's frames are not masked; a client's must be. The only extension is permessage-deflate without context takeover (RFC
7692): a compressed message to many clients has the same bytes for all of them, and no memory is kept between messages. Binary
messages are read like text, because web3.py sends its calls that way.

The reader is fed bytes and returns messages and control frames in order. If a client breaks a rule, it raises an exception with
the close code. It holds at most one message of the allowed size, in however many pieces it arrives. One call of `take` reads
one frame, so that its caller can count them: an empty fragment costs as much time as a message. Each call decompresses a part
of a compressed message, and a large message is returned by a later call than the one that reads its last frame, so that the
caller can postpone it.
"""

from __future__ import annotations

from typing import TypeAlias

from proxy.core.encodings import MessageInflater, TooMuchData, deflate_message
from proxy.web.aiohttp_internals import websocket_mask

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10

# Close codes, section 7.4.1 and the registry it opened.
NORMAL = 1000
PROTOCOL_ERROR = 1002
NOT_UTF8 = 1007
POLICY = 1008
TOO_BIG = 1009
RESTART = 1012
TRY_LATER = 1013
# Codes that are allowed in a frame. The ones left out are reserved for use inside a program, or unassigned.
_MAY_BE_SENT = frozenset((1000, 1001, 1002, 1003, *range(1007, 1015)))

# Section 5.5: a control frame is small and not fragmented, so that it can be answered at once.
MAX_CONTROL = 125
# Fragments of one message. Small ones are fine in a large message: one more is allowed for every BYTES_PER_FRAGMENT bytes.
MAX_FRAGMENTS = 1024
BYTES_PER_FRAGMENT = 16
# A message from this size on takes so long to read that its account may have to wait first (`large_messages.py`).
LARGE_MESSAGE = 16_384
# The reserved bit that marks a compressed message, on its first frame.
_DEFLATED = 0x40
_FIN, _RESERVED, _OPCODE, _MASKED, _LENGTH = 0x80, 0x70, 0x0F, 0x80, 0x7F
_TWO_BYTES, _EIGHT_BYTES = 126, 127

# The opcode and payload of a complete text message or of a control frame; or FRAGMENT, a part of a message.
Message: TypeAlias = tuple[int, bytes]
FRAGMENT: Message = (CONTINUATION, b"")


class ProtocolViolation(Exception):
    """The client broke a rule of the protocol. Carries the code and the reason to close with."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


# Writing


def frame(payload: bytes, opcode: int = TEXT) -> bytes:
    """A complete message in one frame."""
    return frame_header(len(payload), opcode) + payload


def deflated_frame(payload: bytes, window_bits: int) -> bytes:
    packed = deflate_message(payload, window_bits)
    return frame_header(len(packed), TEXT | _DEFLATED) + packed


def frame_header(size: int, opcode: int = TEXT) -> bytes:
    first = _FIN | opcode
    if size < _TWO_BYTES:
        return bytes((first, size))
    if size < 1 << 16:
        return bytes((first, _TWO_BYTES, size >> 8, size & 0xFF))
    return bytes((first, _EIGHT_BYTES)) + size.to_bytes(8, "big")


def close_frame(code: int, reason: str = "") -> bytes:
    """A reason that does not fit is cut between two characters."""
    text = reason.encode()[: MAX_CONTROL - 2].decode(errors="ignore").encode()
    return frame(code.to_bytes(2, "big") + text, CLOSE)


def close_code(payload: bytes) -> int:
    """The code of a client's close frame; NORMAL if it has none (section 5.5.1). Raises ProtocolViolation."""
    if not payload:
        return NORMAL
    code = int.from_bytes(payload[:2], "big")
    if len(payload) == 1 or not (code in _MAY_BE_SENT or 3000 <= code < 5000):
        raise ProtocolViolation(PROTOCOL_ERROR, "the close frame's code is not valid")
    _check_utf8(payload[2:])
    return code


def unmask(payload: bytes | bytearray, mask: bytes) -> bytes:
    """Section 5.3. Uses aiohttp's C function: in Python, a megabyte takes milliseconds."""
    text = bytearray(payload)
    websocket_mask(mask, text)
    return bytes(text)


# Reading


class FrameReader:
    """The bytes of one client. `take` returns the next complete message."""

    __slots__ = ("_arrived", "_at", "_bytes", "_fragments", "_inflates", "_is_deflated", "_kind", "_limit", "_parts")

    def __init__(self, limit: int, *, inflates: bool = False) -> None:
        """`inflates`: compressed messages are accepted. The limit applies to their decompressed size."""
        self._limit = limit
        self._inflates = inflates
        self._is_deflated = False
        # Bytes that were fed; those from `_at` on are not taken yet.
        self._bytes: bytes | bytearray = b""
        self._at = 0
        # TEXT or BINARY: the opcode of the message's first frame.
        self._kind = TEXT
        # The fragments of a message so far, joined: a flood of empty fragments uses no memory.
        self._parts: bytearray | None = None
        self._fragments = 0
        # A message that has arrived and is not read yet.
        self._arrived: MessageInflater | bytes | None = None

    def __repr__(self) -> str:
        return f"<FrameReader {len(self._bytes) - self._at} bytes{', in a message' if self._parts is not None else ''}>"

    @property
    def is_in_message(self) -> bool:
        """Whether a fragmented message is incomplete."""
        return self._parts is not None

    @property
    def has_arrived(self) -> bool:
        """Whether the next `take` reads more of a message whose last frame has come."""
        return self._arrived is not None

    @property
    def is_large(self) -> bool:
        """Whether that message is large, as far as it is known."""
        return self._arrived is not None and len(self._arrived) >= LARGE_MESSAGE

    @property
    def is_between(self) -> bool:
        """Whether no message is incomplete."""
        return self._at == len(self._bytes) and self._parts is None

    def feed(self, data: bytes) -> None:
        if self._at == len(self._bytes):
            self._bytes, self._at = data, 0
            return
        if isinstance(self._bytes, bytes):
            self._bytes = bytearray(self._bytes[self._at :])
        else:
            del self._bytes[: self._at]
        self._at = 0
        self._bytes += data

    def take(self) -> Message | None:
        """The next message, control frame or FRAGMENT; None when more bytes are needed."""
        if self._arrived is not None:
            return self._read_on(self._arrived)
        frame = self._frame()
        if frame is None:
            return None
        opcode, is_final, payload = frame
        if opcode >= CLOSE:
            return opcode, payload
        if opcode != CONTINUATION:
            self._kind = opcode
        if self._parts is None and is_final:
            return self._on_arrival(payload)
        if self._parts is None:
            self._parts = bytearray()
            self._fragments = 0
        self._parts += payload
        if is_final:
            whole, self._parts = bytes(self._parts), None
            return self._on_arrival(whole)
        self._fragments += 1
        if self._fragments > MAX_FRAGMENTS + len(self._parts) // BYTES_PER_FRAGMENT:
            raise ProtocolViolation(POLICY, "the message has too many small fragments: send larger ones")
        return FRAGMENT

    def _on_arrival(self, payload: bytes) -> Message:
        if not self._is_deflated and len(payload) < LARGE_MESSAGE:
            return self._text(payload)
        self._arrived = MessageInflater(payload, self._limit) if self._is_deflated else payload
        return FRAGMENT if self.is_large else self._read_on(self._arrived)

    def _read_on(self, arrived: MessageInflater | bytes) -> Message:
        if isinstance(arrived, MessageInflater):
            if not self._inflate(arrived):
                return FRAGMENT
            arrived = bytes(arrived.text)
        self._arrived = None
        return self._text(arrived)

    def _inflate(self, message: MessageInflater) -> bool:
        try:
            return message.step()
        except TooMuchData as exc:
            if str(exc) == "too large":
                raise ProtocolViolation(TOO_BIG, f"the message is larger than {self._limit} bytes") from None
            raise ProtocolViolation(NOT_UTF8, "the message is not valid deflate data") from None

    def _text(self, payload: bytes) -> Message:
        """The message as text. Some libraries send JSON in binary messages, which are not checked here: one that is not UTF-8
        gets the error of a call that is not JSON."""
        if self._kind == TEXT:
            _check_utf8(payload)
        return TEXT, payload

    def _frame(self) -> tuple[int, bool, bytes] | None:
        """One frame: its opcode, whether it is the last of its message, and its unmasked payload."""
        data, at = self._bytes, self._at
        if len(data) - at < 2:
            return None
        first, second = data[at], data[at + 1]
        self._check_header(first, second)
        at += 2
        size = second & _LENGTH
        if size >= _TWO_BYTES:
            width = 2 if size == _TWO_BYTES else 8
            if len(data) - at < width:
                return None
            size = int.from_bytes(data[at : at + width], "big")
            at += width
            # Section 5.2: the length uses the shortest form, and the highest bit of an 8-byte length is zero.
            if size < (_TWO_BYTES if width == 2 else 1 << 16) or size >> 63:
                raise ProtocolViolation(PROTOCOL_ERROR, "the frame's length is not valid")
        if not first & CLOSE and size + len(self._parts or b"") > self._limit:
            raise ProtocolViolation(TOO_BIG, f"the message is larger than {self._limit} bytes")
        end = at + 4 + size
        if len(data) < end:
            return None
        self._at = end
        if first & _OPCODE in (TEXT, BINARY):
            self._is_deflated = bool(first & _DEFLATED)
        payload = unmask(data[at + 4 : end], bytes(data[at : at + 4]))
        if end == len(data):
            self._bytes, self._at = b"", 0
        return first & _OPCODE, bool(first & _FIN), payload

    def _check_header(self, first: int, second: int) -> None:
        opcode = first & _OPCODE
        allowed = _DEFLATED if self._inflates and opcode in (TEXT, BINARY) else 0
        if first & _RESERVED & ~allowed:
            raise ProtocolViolation(PROTOCOL_ERROR, "a reserved bit is set, but no extension was negotiated")
        if not second & _MASKED:
            raise ProtocolViolation(PROTOCOL_ERROR, "client frames must be masked")
        if opcode in (CLOSE, PING, PONG):
            if not first & _FIN or second & _LENGTH > MAX_CONTROL:
                raise ProtocolViolation(PROTOCOL_ERROR, "a control frame must be unfragmented, with at most 125 bytes")
        elif opcode not in (TEXT, BINARY, CONTINUATION):
            raise ProtocolViolation(PROTOCOL_ERROR, "the frame's opcode is unknown")
        elif (opcode == CONTINUATION) is (self._parts is None):
            raise ProtocolViolation(PROTOCOL_ERROR, "the fragments of a message are out of order")


def _check_utf8(payload: bytes) -> None:
    if not _is_utf8(payload):
        raise ProtocolViolation(NOT_UTF8, "the text is not valid UTF-8")


def _is_utf8(payload: bytes) -> bool:
    if payload.isascii():
        return True
    try:
        payload.decode()
    except UnicodeDecodeError:
        return False
    return True
