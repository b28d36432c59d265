"""A user of the dashboard in a real browser, with the service, its upstreams and a webhook receiver."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from playwright.async_api import ConsoleMessage, Locator, Page, Request

from tests.flows.upstream import Upstream
from tests.service import Service

# Timeout for everything that tests wait for in the page. On an idle machine nothing takes a tenth of it.
WAIT_MS = 30_000
# Chromium logs an error for every 4xx reply. A request without a session is one, so these are expected.
_CLIENT_ERROR = re.compile(r"Failed to load resource: the server responded with a status of (4\d\d)")


class Receiver:
    """A webhook receiver: a real server that records events and responds with `status` and `text`."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.status = 200
        self.text = "thank you"
        application = web.Application()
        application.router.add_post("/{rest:.*}", self._receive)
        application.router.add_get("/{rest:.*}", self._page)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        self.html = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def open(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _receive(self, request: web.Request) -> web.Response:
        self.events.append(await request.json())
        return web.Response(status=self.status, text=self.text)

    async def _page(self, _request: web.Request) -> web.Response:
        """Serves a page of another origin, for request forgery tests."""
        return web.Response(text=self.html, content_type="text/html")


@dataclass(slots=True)
class Site:
    service: Service
    upstreams: tuple[Upstream, Upstream]
    receiver: Receiver

    @property
    def url(self) -> str:
        return str(self.service.ready["dashboard_url"])

    @property
    def credentials(self) -> dict[str, str]:
        return dict(self.service.ready["sign_in"])


class Visitor:
    """A user with a browser page. Records errors, native dialogs and requests."""

    def __init__(self, site: Site, page: Page) -> None:
        self.site = site
        self.page = page
        self.faults: list[str] = []
        self.requests: list[Request] = []
        page.on("console", self._record)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("dialog", lambda dialog: self.faults.append(f"a script opened a dialog: {dialog.message}"))
        page.on("request", lambda request: self.requests.append(request))

    def _record(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not _CLIENT_ERROR.match(message.text):
            self.faults.append(message.text)

    def assert_no_faults(self) -> None:
        """No error in the page, and no request to another host."""
        assert not self.faults
        foreign = [request.url for request in self.requests if not request.url.startswith(self.site.service.base[:-3])]
        assert not [url for url in foreign if not url.startswith(("data:", self.site.receiver.url))]

    async def open(self, view: str) -> None:
        await self.page.goto(f"{self.site.url}#/{view}")
        await self.page.locator("main h1").wait_for()

    async def sign_in(self, plan: str = "growth") -> None:
        await self.page.goto(self.site.url)
        await self.page.get_by_label("Email").fill(f"{plan}@example.com")
        await self.page.get_by_label("Password").fill(self.site.credentials["password"])
        await self.button("Sign in").click()
        await self.heading("Overview").wait_for()

    async def sign_in_as_operator(self) -> None:
        await self.page.goto(f"{self.site.url}#/operator")
        await self.page.get_by_label("Admin token").fill(self.site.credentials["admin_token"])
        await self.button("Sign in").click()
        await self.heading("Overview").wait_for()

    def button(self, name: str, inside: Locator | None = None) -> Locator:
        return (inside or self.page).get_by_role("button", name=name, exact=True)

    def heading(self, name: str) -> Locator:
        return self.page.get_by_role("heading", name=name, exact=True, level=1)

    @property
    def dialog(self) -> Locator:
        return self.page.get_by_role("dialog")

    async def create_key(self, name: str, *, mode: str = "test", methods: str = "", networks: str = "") -> str:
        """Creates a key through the form and returns it."""
        await self.open("keys")
        await self.button("Create key").first.click()
        await self.dialog.get_by_label("Name").fill(name)
        await self.dialog.get_by_label("Mode").select_option(mode)
        if methods or networks:
            await self.dialog.get_by_text("Limits and restrictions").click()
            await self.dialog.get_by_label("Methods").fill(methods)
            await self.dialog.get_by_label("Networks").fill(networks)
        await self.button("Create key", self.dialog).click()
        shown = self.dialog.get_by_label("API key", exact=True)
        await shown.wait_for()
        key = await shown.inner_text()
        await self.button("Done").click()
        return key

    async def paste_key(self, plan: str) -> None:
        """Use a pasted key in the explorer, instead of one of the session's account."""
        await self.page.get_by_label("Send as").select_option("Another key…")
        await self.page.get_by_label("API key").fill(self.site.service.keys[plan])

    async def create_webhook(
        self, path: str, *, event: str = "NEW_BLOCK", wire: str = "Format B", filters: Mapping[str, str] | None = None
    ) -> None:
        """Creates a webhook on the development chain through the form, and opens its page. `wire`: the format of deliveries."""
        await self.open("webhooks")
        await self.button("Create webhook").first.click()
        await self.dialog.get_by_label("Endpoint URL").fill(self.site.receiver.url + path)
        await self.dialog.get_by_label("Event").select_option(event)
        await self.dialog.get_by_label("Network").select_option("dev-mainnet")
        for label, value in (filters or {}).items():
            await self.dialog.get_by_label(label).fill(value)
        await self.dialog.get_by_label(wire, exact=True).check()
        await self.button("Create webhook", self.dialog).click()
        await self.dialog.get_by_label("Signing secret").wait_for()
        await self.button("View webhook").click()
        await self.heading(self.site.receiver.url + path).wait_for()
