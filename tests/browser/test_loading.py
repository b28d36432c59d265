"""The cost of the first picture of each page: bytes, requests, and moves of the layout. Scores of Lighthouse follow from these,
and unlike its times they do not depend on the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp.test_utils import TestServer
from playwright.async_api import Browser, StorageState

from tests.browser.test_reference import guide, root
from tests.browser.visitor import WAIT_MS, Site

__all__ = ("guide",)

DESKTOP, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
RECORD = """() => {
    window.shift = 0;
    new PerformanceObserver((list) => list.getEntries().forEach((each) => { window.shift += each.value; }))
        .observe({ type: "layout-shift", buffered: true });
}"""
BLOCKING = """() => performance.getEntriesByType("resource").filter((each) => each.renderBlockingStatus === "blocking")
    .map((each) => [each.name.split("/").at(-1), each.encodedBodySize])"""
# The parts of the overview that each task of the page added, in their order, and whether the charts' library had run by then.
PARTS = """() => {
    window.parts = [];
    const kinds = { totals: ".tile", charts: ".legend .item", table: "tbody tr", plot: ".uplot" };
    new MutationObserver((changes) => {
        const added = changes.flatMap((change) => [...change.addedNodes]).filter((node) => node.nodeType === 1);
        const has = (node, kind) => node.matches(kinds[kind]) || node.querySelector(kinds[kind]);
        const found = Object.keys(kinds).filter((kind) => added.some((node) => has(node, kind)));
        if (found.length) window.parts.push(found);
    }).observe(document, { childList: true, subtree: true });
}"""
# Unlike an image without a size, a hidden one moves nothing.
UNSIZED = """() => [...document.images].filter((each) => each.offsetParent && !each.hasAttribute("height"))
    .map((each) => each.src)"""


@dataclass(frozen=True)
class Loaded:
    """A page that was opened with an empty cache. `blocking`: the files that it had to wait for, with their size."""

    requests: int
    shift: float
    blocking: list[tuple[str, int]]
    unsized: list[str]


async def load(browser: Browser, url: str, size: Any, *, shown: str, **options: Any) -> Loaded:
    """`shown`: the selector of the text that the reader wants."""
    context = await browser.new_context(viewport=size, locale="en-US", **options)
    context.set_default_timeout(WAIT_MS)
    page = await context.new_page()
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url))
    await page.add_init_script(f"({RECORD})()")
    await page.goto(url)
    await page.locator(shown).first.wait_for()
    requests = len(sent)
    await page.wait_for_load_state("networkidle")
    blocking = [(name, size) for name, size in await page.evaluate(BLOCKING)]
    found = Loaded(requests, await page.evaluate("window.shift"), blocking, await page.evaluate(UNSIZED))
    await context.close()
    return found


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("view", ["overview", "operator/overview", "operator/upstreams", "requests", "keys"])
async def test_view_of_the_dashboard_waits_for_no_file_and_stays_in_place(
    browser: Browser, site: Site, signed_in: StorageState, view: str, size: Any
) -> None:
    found = await load(browser, f"{site.url}#/{view}", size, shown="main h1", storage_state=signed_in)
    assert found.blocking == []
    assert found.unsized == []
    # Lighthouse's limit for the highest score is 0.1.
    assert found.shift < 0.05
    assert found.requests <= 30


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
async def test_reference_waits_for_no_file_and_stays_in_place(browser: Browser, site: Site, size: Any) -> None:
    found = await load(browser, root(site) + "/docs", size, shown="main h1")
    assert found.blocking == []
    assert found.unsized == []
    assert found.shift < 0.05
    assert found.requests <= 10


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("name", ["", "production/"])
async def test_page_of_the_guide_waits_for_one_style_sheet_and_stays_in_place(
    browser: Browser, guide: TestServer, name: str, size: Any
) -> None:
    found = await load(browser, str(guide.make_url(f"/docs/guide/{name}")), size, shown="article h1")
    ((sheet, packed),) = found.blocking
    assert sheet.endswith(".css")
    assert packed < 30_000
    assert found.unsized == []
    assert found.shift < 0.05


async def test_totals_of_the_overview_do_not_wait_for_its_charts(
    browser: Browser, site: Site, signed_in: StorageState
) -> None:
    await site.service.rpc("eth_chainId", key="growth")
    size: Any = DESKTOP
    context = await browser.new_context(viewport=size, locale="en-US", storage_state=signed_in)
    context.set_default_timeout(WAIT_MS)
    page = await context.new_page()
    await page.add_init_script(f"({PARTS})()")
    await page.goto(f"{site.url}#/overview")
    await page.locator(".uplot").first.wait_for()
    await page.locator("tbody tr").first.wait_for()
    parts = await page.evaluate("window.parts")
    await context.close()
    assert parts[0] == ["totals"]
    first = [next(each for each in parts if kind in each) for kind in ("charts", "table", "plot")]
    assert first == [["charts"], ["table"], ["plot"]]
