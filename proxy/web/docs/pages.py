"""Public pages: health, the OpenAPI document and its documentation, and the dashboard's files."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

from proxy.errors import Unavailable
from proxy.services.readiness import Readiness
from proxy.web.api_spec import ApiSpec
from proxy.web.dashboard.static_files import StaticFiles
from proxy.web.reply import json_reply

PAGES = Path(__file__).parent / "static"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Pages:
    def __init__(self, spec: ApiSpec, readiness: Readiness) -> None:
        self._spec = spec
        self._readiness = readiness
        self._dashboard = StaticFiles()
        self._files = {path.name: path.read_bytes() for path in PAGES.iterdir() if path.suffix in _TYPES}

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/healthz", self.health),
            web.get("/readyz", self.ready),
            web.get("/v1/openapi.json", self.openapi),
            web.get("/docs", self.docs),
            web.get("/docs/{name}", self.docs),
            *self._dashboard.routes(),
        ]

    async def health(self, _request: web.Request) -> web.Response:
        """Whether the process is up; nothing else is checked."""
        return json_reply({"status": "ok"})

    async def ready(self, _request: web.Request) -> web.Response:
        """Whether a load balancer should send traffic here."""
        state = self._readiness.state()
        if not state.ready:
            raise Unavailable(f"not ready: {', '.join(state.missing)}")
        return json_reply({"status": "ready", "degraded": list(state.degraded)})

    async def openapi(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._spec.raw, content_type="application/json", headers={"Cache-Control": "no-cache"})

    async def docs(self, request: web.Request) -> web.Response:
        name = request.match_info.get("name", "docs.html")
        body = self._files.get(name)
        if body is None:
            raise web.HTTPNotFound
        kind = _TYPES[Path(name).suffix]
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=_HEADERS)
