"""Content encodings: which one a client accepts, compressing replies to it, and reading compressed replies of upstreams.

gzip is written by ISA-L, zstd and brotli at their fastest regular levels. Sizes and speeds of 90 KB of logs, on one core:

    gzip  0  25.0 KB  738 MB/s      zstd -1  23.5 KB  1,192 MB/s      brotli 0  17.0 KB  668 MB/s
    gzip  1  16.1 KB  783 MB/s      zstd  1  12.8 KB    908 MB/s      brotli 1  13.6 KB  541 MB/s
    gzip  3  16.3 KB  301 MB/s      zstd  3  13.4 KB    629 MB/s      brotli 5  13.9 KB   45 MB/s

Higher levels are slower and no smaller. Lower ones need 25 to 84 % more bytes and are at most a third faster. So level 1 is
used under every load. A reply that is compressed for one client uses brotli only if the client prefers it, because the others
are faster. Files, which are compressed once, prefer brotli, because they are smallest with it.

The result of a cached reply is compressed once (`EncodedResult`), and joined with the id of each caller. gzip and zstd are a
sequence of blocks, so blocks that are stored as they are can go before and after the compressed ones. In brotli, references to
its dictionary depend on how many bytes went before, so each such reply is compressed as a whole.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, Protocol, final

import brotli
import zstandard
from isal import isal_zlib

IDENTITY: Final = 0
GZIP: Final = 1
ZSTD: Final = 2
BROTLI: Final = 3
NAMES: Final = {GZIP: "gzip", ZSTD: "zstd", BROTLI: "br"}
_BY_NAME: Final = {"gzip": GZIP, "x-gzip": GZIP, "zstd": ZSTD, "br": BROTLI}
# The order of preference among encodings that a client accepts equally: by speed for replies, by size for files.
FASTEST: Final = (ZSTD, GZIP, BROTLI)
SMALLEST: Final = (BROTLI, ZSTD, GZIP)
# Header lines of a compressed reply.
LINES: Final = {
    IDENTITY: b"",
    GZIP: b"Content-Encoding: gzip\r\nVary: Accept-Encoding\r\n",
    ZSTD: b"Content-Encoding: zstd\r\nVary: Accept-Encoding\r\n",
    BROTLI: b"Content-Encoding: br\r\nVary: Accept-Encoding\r\n",
}

_LEVEL: Final = 1
_GZIP_BITS: Final = 31
_RAW_BITS: Final = -15
# The window of brotli, 256 KiB: its default of 4 MiB would be held for each stream.
_BROTLI_BITS: Final = 18
_GZIP_HEAD: Final = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
# A zstd block may be as large as the window, which is at least this large (RFC 8878, 3.1.1.1.2).
MAX_PREFIX: Final = 1024
# The type stub of isal declares an instance where the module has a class.
_BROKEN: Final[type[Exception]] = isal_zlib.error  # type: ignore[assignment]
_frames: Final = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=False, write_checksum=False)


_packer: Final = zstandard.ZstdCompressor(level=_LEVEL)
_unpacker: Final = zstandard.ZstdDecompressor()


class TooMuchData(Exception):
    """More data than allowed, or data that is not in its encoding."""


def accepted(header: str, order: tuple[int, int, int] = FASTEST) -> int:
    """The encoding for a client with this Accept-Encoding header (RFC 9110, 12.5.3)."""
    weights: dict[int, float] = {}
    others = 0.0
    for item in header.lower().split(","):
        name, _, parameter = item.partition(";")
        weight = _weight(parameter.strip())
        if name.strip() == "*":
            others = weight
        elif encoding := _BY_NAME.get(name.strip(), IDENTITY):
            weights[encoding] = weight
    weights.setdefault(GZIP, others)
    best, best_weight = IDENTITY, 0.0
    for encoding in order:
        weight = weights.get(encoding, 0.0)
        if weight > best_weight:
            best, best_weight = encoding, weight
    return best


def _weight(parameter: str) -> float:
    if not parameter.startswith("q="):
        return 1.0
    try:
        return float(parameter[2:])
    except ValueError:
        return 0.0


def compress(encoding: int, data: bytes) -> bytes:
    if encoding == ZSTD:
        return _frames.compress(data)
    if encoding == BROTLI:
        return _brotli(data)
    return isal_zlib.compress(data, _LEVEL, _GZIP_BITS)


def compress_apart(encoding: int, pieces: Sequence[bytes | memoryview]) -> bytes:
    """Like `compress`, for another thread: a compressor must not be shared between threads."""
    compressor = StreamCompressor(encoding)
    packed = [compressor.feed(piece) for piece in pieces]
    packed.append(compressor.finish())
    return b"".join(packed)


def pack(data: bytes) -> bytes:
    """JSON for storage in memory: compressed if that makes it smaller."""
    packed = _packer.compress(data)
    # A copy, because the compressor's result keeps an allocation as large as the uncompressed data.
    return memoryview(packed).tobytes() if len(packed) < len(data) else data


def unpack(data: bytes) -> bytes:
    """The JSON from `pack`. JSON never starts with zstd's magic number, so compressed data is recognised by it."""
    return _unpacker.decompress(data) if data.startswith(_ZSTD_MAGIC) else data


def _brotli(data: bytes) -> bytes:
    packed: bytes = brotli.compress(data, quality=_LEVEL, lgwin=_BROTLI_BITS)
    return packed


class _Compressor(Protocol):
    def compress(self, piece: bytes | memoryview, /) -> bytes: ...
    def flush(self) -> bytes: ...


class _BrotliStream:
    """brotli's compressor with the methods of the others."""

    __slots__ = ("_compressor",)

    def __init__(self) -> None:
        self._compressor = brotli.Compressor(quality=_LEVEL, lgwin=_BROTLI_BITS)

    def compress(self, piece: bytes | memoryview) -> bytes:
        packed: bytes = self._compressor.process(piece)
        return packed

    def flush(self) -> bytes:
        packed: bytes = self._compressor.finish()
        return packed


@final
class StreamCompressor:
    """Compresses a reply that comes in pieces."""

    __slots__ = ("_compressor", "encoding")

    def __init__(self, encoding: int) -> None:
        self.encoding = encoding
        self._compressor = _compressor(encoding)

    def __repr__(self) -> str:
        return f"<StreamCompressor {NAMES[self.encoding]}>"

    def feed(self, piece: bytes | memoryview) -> bytes:
        """Returns the compressed bytes so far, which may be none: they come with a later piece."""
        return self._compressor.compress(piece)

    def finish(self) -> bytes:
        return self._compressor.flush()


def _compressor(encoding: int) -> _Compressor:
    if encoding == ZSTD:
        return zstandard.ZstdCompressor(level=_LEVEL).compressobj()
    if encoding == BROTLI:
        return _BrotliStream()
    return isal_zlib.compressobj(_LEVEL, isal_zlib.DEFLATED, _GZIP_BITS)


@final
class GzipReader:
    """Reads a gzip body in pieces. Each may expand to at most `limit` bytes: without it, 256 KiB could become 256 MiB."""

    __slots__ = ("_limit", "_reader")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._reader = isal_zlib.decompressobj(_GZIP_BITS)

    def __repr__(self) -> str:
        return f"<GzipReader{' at the end' if self.is_whole else ''}>"

    def feed(self, piece: bytes | memoryview) -> bytes:
        """Raises TooMuchData."""
        try:
            data = self._reader.decompress(piece, self._limit + 1)
        except _BROKEN as exc:
            raise TooMuchData("not in gzip format") from exc
        if len(data) > self._limit:
            raise TooMuchData("too large")
        if self._reader.unused_data:
            raise TooMuchData("bytes after the end of gzip data")
        return data

    @property
    def is_whole(self) -> bool:
        return self._reader.eof


def decompress(data: bytes, limit: int) -> bytes:
    """A whole gzip body. Raises TooMuchData."""
    reader = GzipReader(limit)
    decompressed = reader.feed(data)
    if not reader.is_whole:
        raise TooMuchData("gzip data is cut off")
    return decompressed


# RFC 7692, 7.2.1: a message's compressed data ends with these bytes, which are not sent.
_MESSAGE_END: Final = b"\0\0\xff\xff"


def deflate_message(data: bytes, window_bits: int) -> bytes:
    """A WebSocket message for permessage-deflate without context takeover: the same bytes fit all clients."""
    compressor = isal_zlib.compressobj(_LEVEL, isal_zlib.DEFLATED, -window_bits)
    return (compressor.compress(data) + compressor.flush(isal_zlib.Z_SYNC_FLUSH)).removesuffix(_MESSAGE_END)


# Bytes of a compressed message that are read in one step, and bytes that they may become. Both are bounded: a kilobyte can
# become a megabyte, and a kilobyte of empty blocks takes as long.
_STEP_PACKED: Final = 1024
_STEP_BYTES: Final = 65_536


@final
class MessageInflater:
    """Decompresses one WebSocket message, a short step at a time."""

    __slots__ = ("_at", "_limit", "_packed", "_reader", "text")

    def __init__(self, packed: bytes, limit: int) -> None:
        self._packed = packed + _MESSAGE_END
        self._limit = limit
        self._reader = isal_zlib.decompressobj(_RAW_BITS)
        self._at = 0
        # The message so far.
        self.text = bytearray()

    def __repr__(self) -> str:
        return f"<MessageInflater {self._at} of {len(self._packed)} bytes became {len(self.text)}>"

    def __len__(self) -> int:
        """The size of the message as far as it is known."""
        return max(len(self._packed), len(self.text))

    def step(self) -> bool:
        """Decompress the next part. Returns whether the message is whole. Raises TooMuchData."""
        part = self._next_part()
        self.text += part
        if len(self.text) > self._limit:
            raise TooMuchData("too large")
        reader = self._reader
        is_at_end = self._at >= len(self._packed) and not reader.unconsumed_tail
        return reader.eof or (is_at_end and len(part) < _STEP_BYTES)

    def _next_part(self) -> bytes:
        piece = self._reader.unconsumed_tail
        if not piece:
            piece = self._packed[self._at : self._at + _STEP_PACKED]
            self._at += len(piece)
        try:
            return self._reader.decompress(piece, _STEP_BYTES)
        except _BROKEN as exc:
            raise TooMuchData("not in deflate format") from exc


@final
class EncodedResult:
    """Compressed blocks without the beginning and the end of a reply, in gzip or zstd."""

    __slots__ = ("_blocks", "_check", "_size", "encoding")

    def __init__(self, encoding: int, result: bytes) -> None:
        self.encoding = encoding
        self._size = len(result)
        if encoding == ZSTD:
            frame = _frames.compress(result)
            # The window descriptor follows the magic number and a frame header descriptor of 0.
            self._check = frame[5]
            self._blocks = _open_blocks(frame)
        else:
            compressor = isal_zlib.compressobj(_LEVEL, isal_zlib.DEFLATED, _RAW_BITS)
            self._check = isal_zlib.crc32(result)
            self._blocks = compressor.compress(result) + compressor.flush(isal_zlib.Z_SYNC_FLUSH)

    def __repr__(self) -> str:
        return f"<EncodedResult {NAMES[self.encoding]}, {len(self)} of {self._size} bytes>"

    def __len__(self) -> int:
        return len(self._blocks)

    def between(self, prefix: bytes, suffix: bytes) -> bytes:
        """The whole reply, compressed: `prefix`, of MAX_PREFIX bytes at most, the result, and `suffix`."""
        if self.encoding == ZSTD:
            head = _ZSTD_MAGIC + bytes((0, self._check))
            return b"".join(
                (head, _raw_block(prefix, last=0), prefix, self._blocks, _raw_block(suffix, last=1), suffix)
            )
        check = isal_zlib.crc32_combine(isal_zlib.crc32(prefix), self._check, self._size)
        tail = struct.pack("<II", isal_zlib.crc32(suffix, check), len(prefix) + self._size + len(suffix) & 0xFFFFFFFF)
        return b"".join((_GZIP_HEAD, _stored(prefix, last=0), self._blocks, _stored(suffix, last=1), tail))


def _stored(data: bytes, *, last: int) -> bytes:
    """RFC 1951, 3.2.4: a block that is not compressed."""
    return struct.pack("<BHH", last, len(data), len(data) ^ 0xFFFF) + data


def _raw_block(data: bytes, *, last: int) -> bytes:
    """RFC 8878, 3.1.1.2: the head of a block that is not compressed."""
    return (len(data) << 3 | last).to_bytes(3, "little")


def _open_blocks(frame: bytes) -> bytes:
    """The blocks of a frame, with the last-block bit cleared."""
    at = 6
    while not frame[at] & 1:
        header = int.from_bytes(frame[at : at + 3], "little")
        # The content of a block of type 1 is one byte, which is repeated.
        at += 3 + (1 if header >> 1 & 3 == 1 else header >> 3)
    return frame[6:at] + bytes((frame[at] & 0xFE,)) + frame[at + 1 :]


@final
class EncodedResults:
    """Cached results in compressed form, by the result itself and the encoding. The least recently used are dropped."""

    __slots__ = ("_kept", "_limit", "_size")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._kept: dict[tuple[bytes, int], EncodedResult] = {}

    def __repr__(self) -> str:
        return f"<EncodedResults {len(self._kept)} in {self._size:,} of {self._limit:,} bytes>"

    @property
    def bytes_used(self) -> int:
        return self._size

    def get(self, result: bytes, encoding: int) -> EncodedResult:
        # The hash of a bytes object is computed once, and a cached reply is the same object every time.
        cache_key = (result, encoding)
        encoded = self._kept.pop(cache_key, None)
        if encoded is None:
            encoded = EncodedResult(encoding, result)
            self._size += _cost(cache_key, encoded)
        self._kept[cache_key] = encoded
        while self._size > self._limit and len(self._kept) > 1:
            oldest = next(iter(self._kept))
            self._size -= _cost(oldest, self._kept.pop(oldest))
        return encoded


def _cost(cache_key: tuple[bytes, int], encoded: EncodedResult) -> int:
    """The result itself stays in memory as long as its compressed form, even if its cache has dropped it."""
    return len(cache_key[0]) + len(encoded) + 300
