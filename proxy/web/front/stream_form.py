"""The form in which a reply in pieces is sent: as it is, chunked, or compressed and chunked."""

from __future__ import annotations

from typing import final

from proxy.core.encodings import StreamCompressor


@final
class StreamForm:
    __slots__ = ("_compressor", "chunked")

    def __init__(self) -> None:
        self.chunked = False
        self._compressor: StreamCompressor | None = None

    def __repr__(self) -> str:
        return f"<StreamForm {'chunked' if self.chunked else 'plain'}, encoding {self.encoding}>"

    @property
    def encoding(self) -> int:
        return 0 if self._compressor is None else self._compressor.encoding

    def begin(self, encoding: int, *, chunked: bool) -> None:
        """A compressed reply is chunked in any case, because its size is not known."""
        self._compressor = StreamCompressor(encoding) if encoding else None
        self.chunked = chunked or encoding > 0

    def frame(self, piece: bytes | memoryview) -> bytes | memoryview:
        """The bytes to send for a piece; none if it waits in the compressor."""
        if self._compressor is not None:
            piece = self._compressor.feed(piece)
        return b"%x\r\n%b\r\n" % (len(piece), bytes(piece)) if piece and self.chunked else piece

    def end(self) -> bytes:
        """The end of a chunked reply."""
        last = b"" if self._compressor is None else self._compressor.finish()
        self.stop()
        return b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last) if last else b"0\r\n\r\n"

    def stop(self) -> None:
        self.chunked = False
        self._compressor = None
