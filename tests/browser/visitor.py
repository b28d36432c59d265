"""People at the dashboard, and what they have around them: the service, its upstreams, and a receiver of events."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from playwright.async_api import ConsoleMessage, Locator, Page, Request

from tests.flows.upstream import Upstream
from tests.service import Service

# For whatever is waited for in the page. Nothing takes a tenth of it, unless the machine is busy with something else.
WAIT_MS = 30_000
# What the browser itself writes when a reply is no 2xx: that nobody is signed in is such a one.
_STATUS = re.compile(r"Failed to load resource: the server responded with a status of (4\d\d)")


class Receiver:
    """Where webhooks lead: a real server that keeps what it was sent, and answers as it is told."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.status = 200
        self.said = "thank you"
        application = web.Application()
        application.router.add_post("/{rest:.*}", self._take)
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

    async def _take(self, request: web.Request) -> web.Response:
        self.events.append(await request.json())
        return web.Response(status=self.status, text=self.said)

    async def _page(self, _request: web.Request) -> web.Response:
        """A page of another origin, for those who would forge requests."""
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
    def people(self) -> dict[str, str]:
        return dict(self.service.ready["sign_in"])


class Visitor:
    """A person with a browser. Notes whatever a page should never do."""

    def __init__(self, site: Site, page: Page) -> None:
        self.site = site
        self.page = page
        self.faults: list[str] = []
        self.requests: list[Request] = []
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("dialog", lambda dialog: self.faults.append(f"a script asks: {dialog.message}"))
        page.on("request", lambda request: self.requests.append(request))

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not _STATUS.match(message.text):
            self.faults.append(message.text)

    def has_seen_no_fault(self) -> None:
        assert not self.faults
        foreign = [request.url for request in self.requests if not request.url.startswith(self.site.service.base[:-3])]
        assert not [url for url in foreign if not url.startswith(("data:", self.site.receiver.url))]

    async def open(self, view: str) -> None:
        await self.page.goto(f"{self.site.url}#/{view}")
        await self.page.locator("main h1").wait_for()

    async def sign_in(self, plan: str = "growth") -> None:
        await self.page.goto(self.site.url)
        await self.page.get_by_label("E-mail").fill(f"{plan}@example.com")
        await self.page.get_by_label("Password").fill(self.site.people["password"])
        await self.button("Sign in").click()
        await self.heading("Overview").wait_for()

    async def sign_in_as_operator(self) -> None:
        await self.page.goto(f"{self.site.url}#/operator")
        await self.page.get_by_label("Operator's token").fill(self.site.people["admin_token"])
        await self.button("Sign in").click()
        await self.heading("Upstreams").wait_for()

    def button(self, name: str, inside: Locator | None = None) -> Locator:
        return (inside or self.page).get_by_role("button", name=name, exact=True)

    def heading(self, name: str) -> Locator:
        return self.page.get_by_role("heading", name=name, exact=True, level=1)

    @property
    def dialog(self) -> Locator:
        return self.page.get_by_role("dialog")

    async def make_key(self, name: str, *, mode: str = "test") -> str:
        """A key, by the form; as it is shown that once."""
        await self.open("keys")
        await self.button("Create key").first.click()
        await self.dialog.get_by_label("Name").fill(name)
        await self.dialog.get_by_label("Networks").select_option(mode)
        await self.button("Create key", self.dialog).click()
        shown = self.dialog.get_by_label("The key")
        await shown.wait_for()
        key = await shown.inner_text()
        await self.button("I have it").click()
        return key

    async def make_webhook(self, path: str, *, event: str = "NEW_BLOCK") -> None:
        """One of the development chain, opened."""
        await self.open("webhooks")
        await self.button("Create webhook").first.click()
        await self.dialog.get_by_label("Address", exact=True).fill(self.site.receiver.url + path)
        await self.dialog.get_by_label("Event").select_option(event)
        await self.dialog.get_by_label("Chain").select_option("dev-mainnet")
        await self.button("Create webhook", self.dialog).click()
        await self.dialog.get_by_label("The signing secret").wait_for()
        await self.button("Open it").click()
        await self.heading(self.site.receiver.url + path).wait_for()
