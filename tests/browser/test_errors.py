"""The way from the number of errors to the requests behind it, and the settings of charts, in a real browser."""

from __future__ import annotations

import re

from playwright.async_api import expect

from tests.browser.visitor import WAIT_MS, Visitor
from tests.service import Service, until

expect.set_options(timeout=WAIT_MS)
NETWORK = "ethereum/sepolia"


async def fail(holder: Visitor, times: int, method: str = "eth_notThere") -> None:
    """Fail, and wait until that is recorded: usage is written sooner, and the list of errors does not refresh itself."""
    service = holder.site.service
    before = await recorded(service)
    for _ in range(times):
        await service.rpc(method, key="growth", network=NETWORK)

    async def is_recorded() -> bool:
        return await recorded(service) >= before + times

    await until(is_recorded, every_s=0.1)


async def recorded(service: Service) -> int:
    """The failed calls of methods that do not exist."""
    status, reply = await service.send("GET", "/errors", key="growth")
    assert status == 200, reply
    return sum(group["count"] for group in reply["errors"] if str(group["code"]) == "-32601")


async def test_number_of_errors_leads_to_their_requests(holder: Visitor) -> None:
    page = holder.page
    await fail(holder, 3)
    await holder.open("overview?range=live&by=method")
    await page.get_by_role("link", name=re.compile("^Errors .*: explain$")).click()
    await holder.heading("Errors").wait_for()
    assert "range=live" in page.url
    rows = page.get_by_role("table", name="Errors").get_by_role("row")
    row = rows.filter(has_text="-32601").filter(has_text="dev live")
    await expect(row).to_contain_text("does not exist or is not available")
    await row.get_by_role("link").click()
    await holder.heading("Requests").wait_for()
    rows = page.get_by_role("table", name="Requests").locator("tbody tr")
    await expect(rows.first).to_contain_text("JSON-RPC error")
    await expect(holder.button("Remove filter code")).to_contain_text("-32601")
    await expect(page.get_by_label("Method")).to_have_value("other")
    async with page.expect_response(lambda reply: "/account/requests?" in reply.url and "code=" not in reply.url):
        await holder.button("Remove filter code").click()
    assert "code=" not in page.url
    await rows.first.get_by_role("link").first.click()
    card = page.locator("section.card").filter(has=page.get_by_role("heading", name="Error", exact=True))
    await expect(card.locator("b")).to_have_text("the method eth_notThere does not exist or is not available")
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")


async def test_errors_are_filtered_by_method(holder: Visitor) -> None:
    page = holder.page
    await fail(holder, 1)
    await holder.open("errors?range=live&method=eth_nothingLikeIt")
    await expect(page.locator("main")).to_contain_text("No errors in this period")
    await holder.open("operator/errors?range=live")
    row = page.get_by_role("row").filter(has_text="-32601").filter(has_text="Development (growth)")
    await expect(row.first).to_be_visible()


async def test_other_leads_to_all_groups(holder: Visitor) -> None:
    page, service = holder.page, holder.site.service
    for method in (
        "eth_gasPrice",
        "eth_blockNumber",
        "eth_chainId",
        "net_version",
        "eth_accounts",
        "web3_clientVersion",
    ):
        await service.rpc(method, key="growth", network=NETWORK)
    for method in ("eth_getBalance", "eth_getCode", "eth_getTransactionCount", "eth_getStorageAt"):
        params = ["0x" + "ab" * 20, *(["0x0"] if method == "eth_getStorageAt" else []), "latest"]
        await service.rpc(method, params, key="growth", network=NETWORK)
    await holder.open("overview?range=live&by=method&split=1")
    rows = page.get_by_role("table", name="Usage by method").locator("tbody tr")
    await expect(rows).to_have_count(9)
    legend = page.locator("figure.chart").first.locator(".legend")
    await holder.button("other", legend).click()
    await expect(rows.nth(9)).to_be_visible()
    await expect(holder.button("other", page.get_by_role("table", name="Usage by method"))).to_have_count(0)
    assert "all=1" in page.url


async def test_drag_zooms_and_back_returns(holder: Visitor) -> None:
    page = holder.page
    await fail(holder, 1)
    await holder.open("overview?range=24h")
    chart = page.locator("figure.chart").first
    box = await chart.locator(".u-over").bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    await page.mouse.move(box["x"] + box["width"] * 0.5, middle)
    await expect(chart.locator(".tip")).to_contain_text("requests")
    await page.mouse.down()
    await page.mouse.move(box["x"] + box["width"] * 0.75, middle, steps=4)
    await page.mouse.up()
    await expect(page).to_have_url(re.compile("[?&]from=.*&to="))
    custom = page.get_by_role("button", name=re.compile("^Custom range: "))
    await expect(custom).to_have_attribute("aria-pressed", "true")
    await expect(chart.locator("figcaption")).to_contain_text("per hour")
    await page.reload()
    await expect(custom).to_be_visible()
    await page.go_back()
    await expect(holder.button("24 h")).to_have_attribute("aria-pressed", "true")


async def test_custom_range_is_kept_in_the_url(holder: Visitor) -> None:
    page = holder.page
    await holder.button("Custom range").click()
    await holder.dialog.get_by_label("From").fill("2026-01-02T10:00")
    await holder.dialog.get_by_label("To").fill("2026-01-02T09:00")
    await holder.button("Show", holder.dialog).click()
    await expect(holder.dialog.get_by_role("alert")).to_contain_text("must be after")
    await holder.dialog.get_by_label("To").fill("2026-01-02T12:00")
    await holder.button("Show", holder.dialog).click()
    await expect(page).to_have_url(re.compile("from=2026-01-02T"))
    await expect(page.get_by_role("button", name="Custom range: 2 Jan, 10:00–12:00")).to_be_visible()
    await expect(page.get_by_role("link", name="Export CSV")).to_have_attribute("href", re.compile("from=2026-01-02"))


SINGLE_POINT = """async () => {
    const { Chart } = await import(new URL('chart.js', document.querySelector('script[type=module]').src).href);
    const chart = new Chart('Single', { format: String, syncKey: 'single' });
    document.querySelector('main').replaceChildren(chart.node);
    const values = { label: 'spent', colour: 'series-0', values: [1], bars: true, total: '1' };
    chart.draw([Date.UTC(2026, 10, 16, 12) / 1000], [values], { step: 86400 });
    return chart.span;
}"""


async def test_axis_of_a_single_day_is_one_day_long(holder: Visitor) -> None:
    low, high = await holder.page.evaluate(SINGLE_POINT)
    assert high - low == 86_400
    await holder.page.locator("canvas").wait_for()
