"""The guide at /docs/guide/: a static site that `make docs` builds, and that is part of the package.

Pages contain inline scripts of their theme. The content security policy of each page lists their digests, so that no other
inline script runs.
"""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

from aiohttp import web

from proxy.web.packed_files import IMMUTABLE, REVALIDATED, TYPES, PackedFile

ROOT = "/docs/guide"
INDEX = "index.html"
MISSING = PackedFile.of(
    INDEX,
    b"<!doctype html><html lang=en><meta charset=utf-8><title>Penstock guide</title>"
    b'<meta name=viewport content="width=device-width, initial-scale=1">'
    b'<meta name=description content="The guide of Penstock, a self-hosted blockchain access API.">'
    b"<h1>The guide is not built</h1><p>This service runs from a checkout. Run <code>make docs</code> there and restart it.</p>"
    b'<p><a href="/docs">API reference</a></p></html>',
)
# The theme's files have their digest in the name: browsers may keep them, and ask only for the page.
_HAS_DIGEST = re.compile(r"\.[0-9a-f]{8}\.min\.(?:css|js)$")
_INLINE_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)
_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
# The theme sets style attributes, so inline styles are allowed. They are harmless as long as no foreign script runs.
_POLICY = (
    "default-src 'none'; style-src 'self' 'unsafe-inline'; script-src 'self'{scripts}; worker-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


class GuideFiles:
    def __init__(self, site: Path) -> None:
        self._site = site
        self._names = {
            path.relative_to(site).as_posix() for path in site.rglob("*") if path.suffix in TYPES and path.is_file()
        }
        # Filled on first use: a worker that serves no page of the guide holds none in memory.
        self._files: dict[str, PackedFile] = {}

    def __repr__(self) -> str:
        return f"<GuideFiles {len(self._names)}>"

    def routes(self) -> list[web.RouteDef]:
        return [web.get(ROOT, self.home), web.get(f"{ROOT}/{{name:.*}}", self.file)]

    def links(self) -> list[str]:
        """Markdown links to the guide and each of its pages."""
        pages = sorted(name.removesuffix(f"/{INDEX}") for name in self._names if name.endswith(f"/{INDEX}"))
        return [f"[Guide]({ROOT}/)", *(f"[{page.replace('-', ' ').capitalize()}]({ROOT}/{page}/)" for page in pages)]

    async def home(self, _request: web.Request) -> web.Response:
        """Redirect to the index, whose links are relative to it."""
        return web.Response(status=302, headers={"Location": "guide/", "Cache-Control": "no-cache"})

    async def file(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        name += INDEX if name.endswith("/") or not name else ""
        if not self._names:
            return MISSING.reply(request, {**_HEADERS, "Content-Security-Policy": _POLICY.format(scripts="")})
        if name not in self._names:
            raise web.HTTPNotFound
        if name not in self._files:
            self._files[name] = await asyncio.to_thread(self._read, name)
        file = self._files[name]
        kept = IMMUTABLE if _HAS_DIGEST.search(name) else REVALIDATED
        return file.reply(request, {**_HEADERS, "Content-Security-Policy": _policy(file)}, cache_control=kept)

    def _read(self, name: str) -> PackedFile:
        return PackedFile.of(name, (self._site / name).read_bytes())


def _policy(file: PackedFile) -> str:
    digests = (sha256(script).digest() for script in _INLINE_SCRIPT.findall(file.plain))
    return _POLICY.format(scripts="".join(f" 'sha256-{b64encode(digest).decode()}'" for digest in digests))
