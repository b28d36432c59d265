"""The static files of the dashboard, read and compressed once when a worker starts.

The page refers to its files under a digest of all of them (`/dashboard/<digest>/page.js`), and modules import each other by
relative paths. So browsers may cache every file forever and still never mix two versions. The page itself is revalidated each
time, with a 304 while it is unchanged. Another digest comes from another worker during an upgrade: our file is served, and is
not cached.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

ROOT = Path(__file__).parent / "static"
PAGE = "index.html"
# The page refers to its files by this prefix, which is replaced by the path with the digest.
PLACEHOLDER = b'"assets/'
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
IMMUTABLE = "public, max-age=31536000, immutable"
# Files from this origin only; no markup from text, no frames, no plug-ins, no form submissions.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    kind: str
    plain: bytes
    packed: bytes
    tag: str


def _file(name: str, plain: bytes) -> StaticFile:
    # With a fixed time, so that all workers produce the same bytes and the same tag.
    packed = gzip.compress(plain, 9, mtime=0)
    return StaticFile(TYPES[Path(name).suffix], plain, packed, f'"{hashlib.sha256(plain).hexdigest()[:20]}"')


class StaticFiles:
    def __init__(self, root: Path = ROOT) -> None:
        found = {
            path.relative_to(root).as_posix(): path.read_bytes()
            for path in sorted(root.rglob("*"))
            if path.suffix in TYPES and path.is_file()
        }
        whole = hashlib.sha256(b"".join(name.encode() + b"\0" + data + b"\0" for name, data in found.items()))
        self.digest = whole.hexdigest()[:16]
        page = found.pop(PAGE).replace(PLACEHOLDER, f'"/dashboard/{self.digest}/'.encode())
        self._page = _file(PAGE, page)
        self._files = {name: _file(name, data) for name, data in found.items()}

    def __repr__(self) -> str:
        return f"<StaticFiles {len(self._files)} of {self.digest}>"

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self.home),
            web.get("/dashboard", self.page),
            web.get("/dashboard/", self.page),
            web.get("/dashboard/{digest}/{name:.+}", self.file),
        ]

    async def home(self, _request: web.Request) -> web.Response:
        """Redirect to the dashboard; relative, so that it works behind any load balancer."""
        return web.Response(status=302, headers={"Location": "dashboard", "Cache-Control": "no-cache"})

    async def page(self, request: web.Request) -> web.Response:
        return _reply(request, self._page, cache_control="no-cache")

    async def file(self, request: web.Request) -> web.Response:
        found = self._files.get(request.match_info["name"])
        if found is None:
            raise web.HTTPNotFound
        return _reply(
            request, found, cache_control=IMMUTABLE if request.match_info["digest"] == self.digest else "no-store"
        )


def _reply(request: web.Request, file: StaticFile, *, cache_control: str) -> web.Response:
    headers = {**HEADERS, "Cache-Control": cache_control, "ETag": file.tag, "Vary": "Accept-Encoding"}
    if file.tag in request.headers.get("If-None-Match", ""):
        return web.Response(status=304, headers=headers)
    if takes_gzip(request.headers.get("Accept-Encoding", "")):
        headers["Content-Encoding"] = "gzip"
        return web.Response(body=file.packed, content_type=file.kind, charset="utf-8", headers=headers)
    return web.Response(body=file.plain, content_type=file.kind, charset="utf-8", headers=headers)


def takes_gzip(accepted: str) -> bool:
    """RFC 9110, 12.5.3: gzip is acceptable if named, or by *, with a weight above zero."""
    weights: dict[str, bool] = {}
    for part in accepted.lower().split(","):
        coding, _, weight = part.partition(";")
        weights[coding.strip()] = weight.strip().removeprefix("q=").strip("0.") != "" or not weight.strip()
    return weights.get("gzip", weights.get("*", False))
