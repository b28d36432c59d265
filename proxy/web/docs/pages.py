"""Public pages: health, the OpenAPI document, the reference that is drawn from it, and the dashboard's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import orjson
from aiohttp import web

from proxy.data_files import GUIDE
from proxy.errors import Unavailable
from proxy.services.readiness import Readiness
from proxy.settings import SCHEMAS
from proxy.web.dashboard.request_forms import request_forms
from proxy.web.dashboard.static_files import ROOT as DASHBOARD_FILES
from proxy.web.dashboard.static_files import shipped_files
from proxy.web.docs.guide_files import GuideFiles
from proxy.web.docs.published_spec import PublishedSpec
from proxy.web.inlined_page import InlinedPage
from proxy.web.packed_files import DerivedFile, PackedFile
from proxy.web.reply import json_reply

PAGES = Path(__file__).parent / "static"
PAGE = "docs.html"
# The languages of the sample receivers, by the suffix of their file.
RECEIVERS = {"Node": ".mjs", "Python": ".py", "Go": ".go"}
_POLICY = (
    "default-src 'none'; style-src 'self' {styles}; script-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@dataclass(frozen=True, slots=True)
class ReferenceFiles:
    files: Mapping[str, PackedFile]
    headers: Mapping[str, str]


@cache
def page_files() -> ReferenceFiles:
    read = {path.name: path.read_bytes() for path in PAGES.iterdir()}
    page = InlinedPage.of(read[PAGE], {f"/docs/{name}": data for name, data in read.items()})
    read |= {PAGE: page.html, "logo.svg": (DASHBOARD_FILES / "icon.svg").read_bytes()}
    # The reference loads these only where it shows them.
    read["receivers.json"] = orjson.dumps(_receivers())
    headers = {"Content-Security-Policy": _POLICY.format(styles=page.styles), **_HEADERS}
    return ReferenceFiles({name: PackedFile.of(name, data) for name, data in read.items()}, headers)


def _receivers() -> dict[str, str]:
    """Programs that receive and verify webhooks, by language."""
    return {
        language: (SCHEMAS / "receivers" / f"receiver{suffix}").read_text("utf-8")
        for language, suffix in RECEIVERS.items()
    }


class Pages:
    def __init__(self, published: PublishedSpec, readiness: Readiness, *, sends_mail: bool) -> None:
        self._readiness = readiness
        self._guide = GuideFiles(GUIDE)
        self._dashboard = shipped_files()
        self._spec = DerivedFile("openapi.json", lambda: published.raw)
        self._forms = DerivedFile("request-forms.json", lambda: orjson.dumps(request_forms(published.document)))
        self._options = PackedFile.of("options.json", orjson.dumps({"mail": sends_mail}))
        self._index = DerivedFile("llms.txt", lambda: published.index(self._guide.links()).encode())
        self._reference = page_files()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/healthz", self.health),
            web.get("/readyz", self.ready),
            web.get("/v1/openapi.json", self.openapi),
            web.get("/llms.txt", self.index),
            web.get("/docs", self.docs),
            web.get("/docs/", self.docs),
            *self._guide.routes(),
            web.get("/docs/{name}", self.docs),
            web.get("/dashboard/request-forms.json", self.forms),
            web.get("/dashboard/options.json", self.options),
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

    async def openapi(self, request: web.Request) -> web.Response:
        return await self._spec.reply(request, {})

    async def forms(self, request: web.Request) -> web.Response:
        return await self._forms.reply(request, {})

    async def options(self, request: web.Request) -> web.Response:
        """Return the options that the sign-in page may offer."""
        return self._options.reply(request, {})

    async def index(self, request: web.Request) -> web.Response:
        return await self._index.reply(request, self._reference.headers)

    async def docs(self, request: web.Request) -> web.Response:
        file = self._reference.files.get(request.match_info.get("name", PAGE))
        if file is None:
            raise web.HTTPNotFound
        return file.reply(request, self._reference.headers)
