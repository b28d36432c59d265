"""Fixtures: a service with two upstreams on one network and a beacon node on another, a webhook receiver, and Chromium. They
end with the last test here: even at rest they take a tenth of a processor."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from playwright.async_api import Browser, BrowserContext, Page, StorageState, async_playwright

from tests import service as services
from tests.beacon_stub import beacon_stub
from tests.browser import chromium
from tests.browser.visitor import WAIT_MS, Receiver, Site, Visitor
from tests.flows.upstream import HOODI, Upstream

# Short intervals keep the tests fast; high limits keep sign-ins from being throttled.
QUICK = {
    "PENSTOCK_USAGE__FLUSH_S": "0.2",
    "PENSTOCK_USAGE__ROLLUP_S": "0.2",
    "PENSTOCK_DASHBOARD__REPORT_S": "0.2",
    "PENSTOCK_DASHBOARD__TRIES": "1000",
    "PENSTOCK_KEYS__AUTH_FAILURES_PER_MINUTE": "1000000",
    "PENSTOCK_FOLLOWER__NETWORKS": '["dev/mainnet", "dev/testnet"]',
}

ON_TRIAL = 'name = "new"\nshadow = 1.0\ncanary = true\nrequests_per_second = 1000\n'
ON_TRIAL += 'cost = "alchemy"\nbudget = { credits = 1000000 }\n'


@pytest.fixture(scope="package")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    upstreams, receiver = (Upstream(), Upstream()), Receiver()
    tried = Upstream(HOODI), Upstream(HOODI)
    async with AsyncExitStack() as stack:
        for server in (*upstreams, *tried, receiver):
            await server.open()
            stack.push_async_callback(server.close)
        beacon = await stack.enter_async_context(beacon_stub())
        options = [word for each in upstreams for word in ("--upstream", f"ethereum/sepolia={each.url}")]
        options += ["--upstream", f"ethereum-beacon/mainnet={beacon.url}"]
        config = tmp_path_factory.mktemp("config") / "penstock.toml"
        config.write_text(
            f'[[upstreams]]\nnetwork = "ethereum/hoodi"\nurl = "{tried[0].url}"\n'
            f'[[upstreams]]\nnetwork = "ethereum/hoodi"\nurl = "{tried[1].url}"\n{ON_TRIAL}'
        )
        words = ("--workers", "2", "--config", str(config), *options)
        running = await services.start(tmp_path_factory.mktemp("dashboard"), *words, env=QUICK)
        stack.push_async_callback(services.stop, running)
        yield Site(running, upstreams, receiver)


@pytest.fixture(scope="package")
async def browser() -> AsyncIterator[Browser]:
    found = chromium.find()
    if found is None:
        pytest.fail(chromium.MISSING, pytrace=False)
    async with async_playwright() as playwright:
        launched = await playwright.chromium.launch(
            executable_path=found.path,
            env={**chromium.environment(), **found.env},
            # Chromium's sandbox does not work as root in a container.
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
    """A page in a new browser context, at desktop size."""
    opened = await _page(browser)
    yield opened
    await opened.context.close()


@pytest.fixture(scope="package")
async def signed_in_context(browser: Browser, site: Site) -> AsyncIterator[BrowserContext]:
    """A context shared by tests, with an account holder and an operator signed in and the assets cached."""
    opened = await _page(browser)
    visitor = Visitor(site, opened)
    await visitor.sign_in()
    await visitor.sign_in_as_operator()
    await opened.close()
    yield opened.context
    await opened.context.close()


@pytest.fixture(scope="package")
async def signed_in(signed_in_context: BrowserContext) -> StorageState:
    """The cookies of both sessions, for other contexts."""
    return await signed_in_context.storage_state()


@pytest.fixture
async def visitor(signed_in_context: BrowserContext, site: Site) -> AsyncIterator[Visitor]:
    """A signed-in user. Fails the test if the page had errors."""
    opened = await signed_in_context.new_page()
    found = Visitor(site, opened)
    yield found
    await opened.close()
    found.assert_no_faults()


@pytest.fixture
async def holder(visitor: Visitor) -> Visitor:
    await visitor.open("overview")
    return visitor


@pytest.fixture
async def fresh_holder(site: Site, page: Page) -> AsyncIterator[Visitor]:
    """The holder of a new account."""
    account = await site.service.new_account()
    await page.goto((await site.service.cli_json("accounts", "link", account["id"]))["url"])
    found = Visitor(site, page)
    await found.button("Sign in").click()
    await found.heading("Overview").wait_for()
    yield found
    found.assert_no_faults()


@pytest.fixture
async def operator(visitor: Visitor) -> Visitor:
    await visitor.open("operator")
    return visitor
