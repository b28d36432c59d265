"""The static files of the dashboard, read and compressed once when a worker starts.

The page refers to its files under a digest of all of them (`/dashboard/<digest>/page.js`), and modules import each other by
relative paths. So browsers may cache every file forever and still never mix two versions. The page itself is revalidated each
time, with a 304 while it is unchanged. A request with another digest comes from a page of another version, during an upgrade:
it gets our file, which must not be cached.

The page contains its style sheets and a first script, and the imports of all modules, so that the script can load those of a
view at once.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import orjson
from aiohttp import web

from proxy.web.inlined_page import InlinedPage
from proxy.web.packed_files import IMMUTABLE, TYPES, PackedFile

ROOT = Path(__file__).parent / "static"
PAGE = "index.html"
# The page refers to its files by this prefix, which is replaced by the path with the digest.
PLACEHOLDER = b'"assets/'
# The element that gets the imports of all modules.
MODULES = b'id="modules">'
_IMPORT = re.compile(rb'^import [^;]*?"(\./[^"]+|\.\./[^"]+)"', re.MULTILINE)
# Files from this origin only; no markup from text, no frames, no plug-ins, no form submissions.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self' {scripts}",
        "style-src 'self' {styles}",
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
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}
# Headers of all other files, which load nothing themselves. The files are many and small, so each header counts.
FILE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    **{name: HEADERS[name] for name in ("X-Content-Type-Options", "Referrer-Policy", "Cross-Origin-Resource-Policy")},
}


class StaticFiles:
    def __init__(self, root: Path = ROOT) -> None:
        files = {
            path.relative_to(root).as_posix(): path.read_bytes()
            for path in sorted(root.rglob("*"))
            if path.suffix in TYPES and path.is_file()
        }
        whole = hashlib.sha256(b"".join(name.encode() + b"\0" + data + b"\0" for name, data in files.items()))
        self.digest = whole.hexdigest()[:16]
        prefix = f"/dashboard/{self.digest}/"
        page = InlinedPage.of(files.pop(PAGE), {f"assets/{name}": data for name, data in files.items()})
        modules = MODULES + orjson.dumps({"prefix": prefix, "imports": imports_of(files)})
        html = page.html.replace(PLACEHOLDER, f'"{prefix}'.encode()).replace(MODULES, modules)
        self._page = PackedFile.of(PAGE, html)
        self._headers = HEADERS | {"Content-Security-Policy": _POLICY.format(scripts=page.scripts, styles=page.styles)}
        self._files = {name: PackedFile.of(name, data) for name, data in files.items()}

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
        return self._page.reply(request, self._headers)

    async def file(self, request: web.Request) -> web.Response:
        file = self._files.get(request.match_info["name"])
        if file is None:
            raise web.HTTPNotFound
        is_ours = request.match_info["digest"] == self.digest
        return file.reply(request, FILE_HEADERS, cache_control=IMMUTABLE if is_ours else "no-store")


def imports_of(files: Mapping[str, bytes]) -> dict[str, list[str]]:
    """The modules that each module imports when it is loaded, by their names here."""
    return {
        name: [
            posixpath.normpath(posixpath.join(posixpath.dirname(name), imported.decode()))
            for imported in _IMPORT.findall(data)
        ]
        for name, data in files.items()
        if name.endswith(".js")
    }


@cache
def shipped_files() -> StaticFiles:
    return StaticFiles()
