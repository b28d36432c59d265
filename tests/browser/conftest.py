"""A service of its own with two upstreams on one network, a receiver for webhooks, and Chromium in front of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from playwright.async_api import Browser, BrowserContext, Page, StorageState, async_playwright

from tests import service as service_room
from tests.browser import chromium
from tests.browser.visitor import WAIT_MS, Receiver, Site, Visitor
from tests.flows.upstream import Upstream

# What people wait for comes sooner, so that the tests wait less for it.
QUICK = {
    "PENSTOCK_USAGE__FLUSH_S": "0.2",
    "PENSTOCK_DASHBOARD__REPORT_S": "0.2",
    "PENSTOCK_DASHBOARD__TRIES": "1000",
    "PENSTOCK_KEYS__AUTH_FAILURES_PER_MINUTE": "1000000",
    "PENSTOCK_FOLLOWER__NETWORKS": '["dev/mainnet"]',
}


@pytest.fixture(scope="session")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    upstreams, receiver = (Upstream(), Upstream()), Receiver()
    async with AsyncExitStack() as stack:
        for server in (*upstreams, receiver):
            await server.open()
            stack.push_async_callback(server.close)
        words = [word for each in upstreams for word in ("--upstream", f"ethereum/sepolia={each.url}")]
        running = await service_room.start(tmp_path_factory.mktemp("dashboard"), "--workers", "2", *words, env=QUICK)
        stack.push_async_callback(service_room.stop, running)
        yield Site(running, upstreams, receiver)


@pytest.fixture(scope="session")
async def browser() -> AsyncIterator[Browser]:
    found = chromium.find()
    if found is None:
        pytest.fail(chromium.MISSING, pytrace=False)
    async with async_playwright() as playwright:
        launched = await playwright.chromium.launch(
            executable_path=found.path,
            env={**chromium.environment(), **found.env},
            # Tests run as root in containers, where Chromium's own sandbox cannot be.
            args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"],
        )
        yield launched
        await launched.close()


async def _page(browser: Browser, **options: Any) -> Page:
    context = await browser.new_context(viewport={"width": 1280, "height": 860}, locale="en-US", **options)
    context.set_default_timeout(WAIT_MS)
    return await context.new_page()


@pytest.fixture
async def page(browser: Browser) -> AsyncIterator[Page]:
    """A browser without a past, on a desk."""
    opened = await _page(browser)
    yield opened
    await opened.context.close()


@pytest.fixture(scope="session")
async def desk(browser: Browser, site: Site) -> AsyncIterator[BrowserContext]:
    """Where a holder and an operator have signed in, and the files are known: not every test is about that."""
    opened = await _page(browser)
    visitor = Visitor(site, opened)
    await visitor.sign_in()
    await visitor.sign_in_as_operator()
    await opened.close()
    yield opened.context
    await opened.context.close()


@pytest.fixture(scope="session")
async def signed_in(desk: BrowserContext) -> StorageState:
    """The cookies of both, for other browsers."""
    return await desk.storage_state()


@pytest.fixture
async def visitor(desk: BrowserContext, site: Site) -> AsyncIterator[Visitor]:
    """Somebody who is signed in; that nothing went wrong in their browser is seen to at the end."""
    opened = await desk.new_page()
    found = Visitor(site, opened)
    yield found
    await opened.close()
    found.has_seen_no_fault()


@pytest.fixture
async def holder(visitor: Visitor) -> Visitor:
    await visitor.open("overview")
    return visitor


@pytest.fixture
async def operator(visitor: Visitor) -> Visitor:
    await visitor.open("operator")
    return visitor
