"""The files of the dashboard, read and compressed once, when a worker starts.

The page names its files below a digest of them all (`/dashboard/<digest>/page.js`), and modules name each other by relative
paths, so a browser may keep every file for good and still never mixes two versions. The page itself is asked for each time, and
is a 304 while it is the same. A digest that is not ours is of another worker in the middle of an upgrade: what we have is
served, and is not kept.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

ROOT = Path(__file__).parent / "static"
PAGE = "index.html"
# How the page names its files; the digest takes the place of it.
PLACE = b'"assets/'
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FOR_GOOD = "public, max-age=31536000, immutable"
# Files only from here, no markup from text, no frames, no plug-ins, no form that leaves the page.
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
    # Without the time in it: the same bytes in every worker, and so the same tag.
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
        page = found.pop(PAGE).replace(PLACE, f'"/dashboard/{self.digest}/'.encode())
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
        """Relative, so that it leads to the right place behind any balancer."""
        return web.Response(status=302, headers={"Location": "dashboard", "Cache-Control": "no-cache"})

    async def page(self, request: web.Request) -> web.Response:
        return _reply(request, self._page, keep="no-cache")

    async def file(self, request: web.Request) -> web.Response:
        found = self._files.get(request.match_info["name"])
        if found is None:
            raise web.HTTPNotFound
        return _reply(request, found, keep=FOR_GOOD if request.match_info["digest"] == self.digest else "no-store")


def _reply(request: web.Request, file: StaticFile, *, keep: str) -> web.Response:
    headers = {**HEADERS, "Cache-Control": keep, "ETag": file.tag, "Vary": "Accept-Encoding"}
    if file.tag in request.headers.get("If-None-Match", ""):
        return web.Response(status=304, headers=headers)
    if takes_gzip(request.headers.get("Accept-Encoding", "")):
        headers["Content-Encoding"] = "gzip"
        return web.Response(body=file.packed, content_type=file.kind, charset="utf-8", headers=headers)
    return web.Response(body=file.plain, content_type=file.kind, charset="utf-8", headers=headers)


def takes_gzip(accepted: str) -> bool:
    """RFC 9110, 12.5.3: by its name or by *, unless with a weight of nothing."""
    weights: dict[str, bool] = {}
    for part in accepted.lower().split(","):
        coding, _, weight = part.partition(";")
        weights[coding.strip()] = weight.strip().removeprefix("q=").strip("0.") != "" or not weight.strip()
    return weights.get("gzip", weights.get("*", False))
