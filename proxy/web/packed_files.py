"""Files that are compressed once when a worker starts, and revalidated by their digest."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

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


@dataclass(frozen=True, slots=True)
class PackedFile:
    kind: str
    plain: bytes
    packed: bytes
    tag: str

    @classmethod
    def of(cls, name: str, plain: bytes) -> PackedFile:
        # With a fixed time, so that all workers produce the same bytes and the same tag.
        packed = gzip.compress(plain, 9, mtime=0)
        return cls(TYPES[Path(name).suffix], plain, packed, f'"{hashlib.sha256(plain).hexdigest()[:20]}"')

    def reply(
        self, request: web.Request, headers: Mapping[str, str], *, cache_control: str = REVALIDATED
    ) -> web.Response:
        """The file, compressed if the client accepts that; or a 304 if the client has it."""
        sent = {**headers, "Cache-Control": cache_control, "ETag": self.tag, "Vary": "Accept-Encoding"}
        if self.tag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=sent)
        charset = None if self.kind == "application/json" else "utf-8"
        if takes_gzip(request.headers.get("Accept-Encoding", "")):
            sent["Content-Encoding"] = "gzip"
            return web.Response(body=self.packed, content_type=self.kind, charset=charset, headers=sent)
        return web.Response(body=self.plain, content_type=self.kind, charset=charset, headers=sent)


def takes_gzip(accepted: str) -> bool:
    """RFC 9110, 12.5.3: gzip is acceptable if named, or by *, with a weight above zero."""
    weights: dict[str, bool] = {}
    for part in accepted.lower().split(","):
        coding, _, weight = part.partition(";")
        weights[coding.strip()] = weight.strip().removeprefix("q=").strip("0.") != "" or not weight.strip()
    return weights.get("gzip", weights.get("*", False))
