"""Files that are compressed once, and revalidated by their digest."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import brotli
import zstandard
from aiohttp import web

from proxy.core import encodings

TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".json": "application/json",
    ".txt": "text/plain",
}
IMMUTABLE = "public, max-age=31536000, immutable"
REVALIDATED = "no-cache"


# Files are compressed once, so the levels favour small sizes. brotli's highest level saves another 8 %, but would delay the
# start of a worker by half a second, and the first reader of the API spec by more than a second.
GZIP_LEVEL, ZSTD_LEVEL, BROTLI_LEVEL = 9, 12, 9


@dataclass(frozen=True, slots=True)
class PackedFile:
    """`packed`: the file in each encoding."""

    kind: str
    plain: bytes
    packed: Mapping[int, bytes]
    tag: str

    @classmethod
    def of(cls, name: str, plain: bytes) -> PackedFile:
        # With a fixed time, so that all workers produce the same bytes and the same tag.
        packed = {
            encodings.GZIP: gzip.compress(plain, GZIP_LEVEL, mtime=0),
            encodings.ZSTD: zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(plain),
            encodings.BROTLI: brotli.compress(plain, quality=BROTLI_LEVEL),
        }
        return cls(TYPES[Path(name).suffix], plain, packed, f'"{hashlib.sha256(plain).hexdigest()[:20]}"')

    def reply(
        self, request: web.Request, headers: Mapping[str, str], *, cache_control: str = REVALIDATED
    ) -> web.Response:
        """The file, compressed if the client accepts that; or a 304 if the client has it."""
        sent = {**headers, "Cache-Control": cache_control, "ETag": self.tag, "Vary": "Accept-Encoding"}
        if self.tag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=sent)
        charset = None if self.kind == "application/json" else "utf-8"
        encoding = encodings.accepted(request.headers.get("Accept-Encoding", ""), encodings.SMALLEST)
        if encoding != encodings.IDENTITY:
            sent["Content-Encoding"] = encodings.NAMES[encoding]
            return web.Response(body=self.packed[encoding], content_type=self.kind, charset=charset, headers=sent)
        return web.Response(body=self.plain, content_type=self.kind, charset=charset, headers=sent)


class DerivedFile:
    """A file that is built and compressed when it is first requested, in a thread. Most workers never need it, and start in
    half the time without it."""

    def __init__(self, name: str, make: Callable[[], bytes]) -> None:
        self._name = name
        self._make = make
        self._making = asyncio.Lock()
        self._file: PackedFile | None = None

    def __repr__(self) -> str:
        return f"<DerivedFile {self._name}>"

    async def reply(self, request: web.Request, headers: Mapping[str, str]) -> web.Response:
        async with self._making:
            if self._file is None:
                self._file = await asyncio.to_thread(lambda: PackedFile.of(self._name, self._make()))
        return self._file.reply(request, headers)
