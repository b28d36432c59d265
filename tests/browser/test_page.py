"""Qualities of the whole dashboard: safe with untrusted text, usable on a phone and by keyboard, accessible, small."""

from __future__ import annotations

import asyncio
import datetime
import re
from typing import Any

import orjson
import pytest
from aiohttp import web
from playwright.async_api import Browser, Page, Route, StorageState, expect

from proxy.store.postgres.refusals import RefusalStore, RefusedOperation
from tests.browser.visitor import WAIT_MS, Site, Visitor
from tests.database import pooled
from tests.flows.upstream import echo, reply
from tests.service import until

expect.set_options(timeout=WAIT_MS)
HOSTILE = '"><img src=x onerror=alert(1)><svg onload=alert(2)><script>alert(3)</script>'
VIEWS = (
    "overview", "errors", "requests", "webhooks", "policies", "addresses", "explorer", "keys", "alerts", "account",
    "account/security", "networks",
    "operator/overview", "operator/audit",
    "operator/upstreams", "operator/accounts", "operator/usage", "operator/costs", "operator/errors", "operator/requests",
    "operator/fleet", "operator/queues", "operator/methods", "operator/announcements",
)  # fmt: skip
# Counts elements that exist only if text was parsed as markup.
MARKUP = "document.querySelectorAll('main img, main script, main svg[onload], dialog img, dialog script').length"


async def test_untrusted_text_is_never_parsed_as_markup(holder: Visitor) -> None:
    page, site = holder.page, holder.site
    await holder.create_key(HOSTILE[:100])
    await expect(page.get_by_role("row").filter(has_text="<img src=x")).to_be_visible()
    await holder.create_webhook("/%3Cimg%20src=x%3E?'onerror=alert(1)")
    await holder.open("webhooks")
    await expect(page.get_by_role("link").filter(has_text="'onerror=alert(1)")).to_be_visible()
    await holder.open("policies")
    await holder.button("Create policy").first.click()
    await holder.dialog.get_by_label("Name").fill(HOSTILE)
    await holder.dialog.get_by_label("Spend per operation (USD)").fill("1")
    await holder.button("Create policy", holder.dialog).click()
    await expect(page.locator("h1").filter(has_text="<script>alert(3)")).to_be_visible()

    async def hostile(call: dict[str, object]) -> web.StreamResponse:
        return reply(call, result={"name": HOSTILE, "symbol": HOSTILE})

    site.upstreams[0].act = site.upstreams[1].act = hostile
    try:
        await holder.open("explorer")
        await holder.paste_key("test")
        await page.get_by_label("Network").select_option("ethereum/sepolia")
        await page.get_by_label("Method").fill("eth_feeHistory")
        await page.get_by_label("Method").blur()
        await holder.button("Send").click()
        await expect(page.get_by_role("region", name="Body")).to_contain_text("onerror=alert(1)")
    finally:
        site.upstreams[0].act = site.upstreams[1].act = echo
    assert await page.evaluate(MARKUP) == 0


async def test_untrusted_text_is_never_parsed_as_markup_for_operators(operator: Visitor) -> None:
    page, cli_json = operator.page, operator.site.service.cli_json
    email = '"><img/src=x/onerror=alert(1)>@example.com'
    made = await cli_json("accounts", "create", "--name", HOSTILE, "--email", email)
    await operator.open("operator/accounts")
    await page.get_by_label("Search").fill(made["id"])
    row = page.locator(f'[data-id="{made["id"]}"]')
    for part in ("<script>alert(3)", "<img/src=x"):
        await expect(row).to_contain_text(part)
    for opens in ("Edit", "Keys of", "Sign-in link for"):
        await row.get_by_role("button", name=opens).click()
        await operator.dialog.wait_for()
        assert await page.evaluate(MARKUP) == 0
        # A link that is shown once stays until it is dismissed.
        done = operator.button("Done", operator.dialog)
        await (done.click() if await done.is_visible() else page.keyboard.press("Escape"))
        await operator.dialog.wait_for(state="detached")
    await operator.open("operator/upstreams")
    upstream = page.locator('[data-network="ethereum/sepolia"] tbody tr').first
    await upstream.get_by_role("button", name="Cordon").click()
    await operator.dialog.get_by_label("Reason").fill(HOSTILE)
    await operator.button("Cordon", operator.dialog).click()
    await expect(upstream).to_contain_text("<script>alert(3)")
    assert await page.evaluate(MARKUP) == 0
    await upstream.get_by_role("button", name="Uncordon").click()
    await expect(upstream.get_by_role("button", name="Cordon", exact=False)).to_be_visible()


async def test_refusal_message_is_never_parsed_as_markup(holder: Visitor) -> None:
    policy = await create_policy(holder, "Refuses")
    sender = bytes.fromhex("11" * 20)
    url = orjson.loads((holder.site.service.data / "running.json").read_bytes())["database"]["url"]
    async with pooled(url) as pool:
        now = datetime.datetime.now(datetime.UTC)
        await RefusalStore(pool).add([RefusedOperation(policy, now, sender, "allowed_contracts", HOSTILE)])
    table = holder.page.get_by_role("table", name="Recent refusals")
    await expect(table).to_contain_text("<script>alert(3)")
    assert await holder.page.evaluate(MARKUP) == 0


async def test_long_word_in_a_table_is_not_cut_off_on_a_phone(phone: Visitor) -> None:
    policy = await create_policy(phone, "Refuses on a phone")
    url = orjson.loads((phone.site.service.data / "running.json").read_bytes())["database"]["url"]
    async with pooled(url) as pool:
        message = (
            f"refused by the policy's rule allowed_contracts: call 1 goes to 0x{'3c' * 20}, which it does not allow"
        )
        now = datetime.datetime.now(datetime.UTC)
        await RefusalStore(pool).add([RefusedOperation(policy, now, bytes(20), "allowed_contracts", message)])
    cell = phone.page.get_by_role("table", name="Recent refusals").locator("td").last
    await expect(cell).to_contain_text("which it does not allow")
    assert await cell.evaluate("(each) => each.scrollWidth <= each.clientWidth")


async def create_policy(holder: Visitor, name: str) -> str:
    """Create a gas policy through the form, open its page and return its id."""
    await holder.open("policies")
    await holder.button("Create policy").first.click()
    await holder.dialog.get_by_label("Name").fill(name)
    await holder.dialog.get_by_label("Spend per operation (USD)").fill("1")
    await holder.button("Create policy", holder.dialog).click()
    await holder.heading(name).wait_for()
    return holder.page.url.rpartition("/")[2]


async def test_refresh_keeps_the_focus_and_expanded_sections(visitor: Visitor) -> None:
    page = visitor.page
    await create_policy(visitor, "Refreshed")
    rules = page.locator("details.more")
    await rules.locator("summary").click()
    await visitor.button("Edit").focus()
    await rules.evaluate("(node) => { node.dataset.old = 1; }")
    await page.locator("details.more:not([data-old])").wait_for()
    await expect(rules).to_have_attribute("open", "")
    await expect(visitor.button("Edit")).to_be_focused()
    await visitor.open("operator/upstreams")
    row = page.locator('[data-network="ethereum/sepolia"] tbody tr').first
    await row.get_by_role("button", name="Cordon").focus()
    await row.evaluate("(node) => { node.dataset.old = 1; }")
    await page.locator('[data-network="ethereum/sepolia"] tbody tr:not([data-old])').first.wait_for()
    await expect(row.get_by_role("button", name="Cordon")).to_be_focused()


async def test_late_reply_to_an_older_search_is_ignored(operator: Visitor) -> None:
    page, released = operator.page, asyncio.Event()
    await operator.open("operator/accounts")

    async def delay(route: Route) -> None:
        await released.wait()
        await route.continue_()

    await page.route("**/v1/admin/accounts?*search=free*", delay)
    search, rows = page.get_by_label("Search"), page.get_by_role("table", name="Accounts").locator("tbody tr")
    async with page.expect_response(lambda reply: "search=free" in reply.url) as answered:
        async with page.expect_request(lambda request: "search=free" in request.url):
            await search.fill("free@example.com")
        await search.fill("growth@example.com")
        await expect(rows).to_have_count(1)
        await expect(rows).to_contain_text("growth@example.com")
        released.set()
    await (await answered.value).finished()
    await page.evaluate("new Promise((resolve) => { setTimeout(resolve, 50); })")  # time to process the late reply
    await expect(rows).to_contain_text("growth@example.com")
    await page.unroute("**/v1/admin/accounts?*search=free*")


async def test_unknown_view_falls_back_to_the_default(visitor: Visitor) -> None:
    await visitor.open("keys")
    for odd, title in (("%", "Overview"), ("constructor", "Overview"), ("operator/constructor", "Overview")):
        await visitor.page.evaluate("(odd) => { location.hash = `#/${odd}`; }", odd)
        await visitor.heading(title).wait_for()
        await visitor.page.evaluate("location.hash = '#/keys'")
        await visitor.heading("API keys").wait_for()


async def test_content_security_policy_blocks_injected_scripts(holder: Visitor) -> None:
    """Try HTML strings, inline scripts and requests to another host."""
    attack = """async () => {
        const blocked = [];
        addEventListener("securitypolicyviolation", (event) => blocked.push(event.effectiveDirective));
        try { document.body.insertAdjacentHTML("beforeend", "<b onclick='alert(1)'>x</b>"); } catch { blocked.push("markup"); }
        const script = document.createElement("script");
        try { script.text = "window.ran = 1"; document.body.append(script); } catch { blocked.push("script"); }
        await fetch("http://127.0.0.1:9/").catch(() => blocked.push("elsewhere"));
        return [blocked, window.ran ?? null];
    }"""
    blocked, ran = await holder.page.evaluate(attack)
    assert ran is None
    assert {"markup", "script", "elsewhere"} <= set(blocked)
    holder.faults.clear()  # the browser logs what it blocked


@pytest.fixture
async def phone(browser: Browser, site: Site, signed_in: StorageState) -> Any:
    context = await browser.new_context(
        viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True, storage_state=signed_in
    )
    context.set_default_timeout(WAIT_MS)
    visitor = Visitor(site, await context.new_page())
    yield visitor
    await context.close()
    visitor.assert_no_faults()


async def test_every_view_fits_on_a_phone(phone: Visitor) -> None:
    for view in VIEWS:
        await phone.open(view)
        wide = await phone.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide[0] <= wide[1], view


# Visible controls that are lower than a finger needs.
LOW = """() => [...document.querySelectorAll('button, a[href], select, input:not([type=checkbox]), summary')].filter((node) =>
    node.checkVisibility() && node.getBoundingClientRect().height < 43.5 && !node.closest('p, .note, .hint, .skip'))
    .map((node) => node.outerHTML.slice(0, 120))"""


async def test_targets_on_a_phone_are_44_pixels_high(phone: Visitor) -> None:
    for view in ("overview", "errors", "requests", "webhooks", "policies", "addresses", "keys"):
        await phone.open(view)
        assert await phone.page.evaluate(LOW) == [], view


async def test_ids_have_a_button_that_copies_them(holder: Visitor) -> None:
    policy = await create_policy(holder, "Copied")
    await holder.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await holder.button(f"Copy {policy}").click()
    await expect(holder.button(f"Copy {policy}")).to_have_text("Copied")
    assert await holder.page.evaluate("navigator.clipboard.readText()") == policy


async def test_mail_link_is_offered_only_with_a_mail_server(site: Site, page: Page) -> None:
    options = site.url + "/options.json"
    assert (await (await page.request.get(options)).json()) == {"mail": False}
    async with page.expect_response(options):
        await page.goto(site.url)
    await page.get_by_role("heading", name="Sign in", exact=True).wait_for()
    link = page.get_by_role("button", name="Email me a sign-in link")
    await expect(link).to_be_hidden()
    await page.route(options, lambda route: route.fulfill(json={"mail": True}))
    await page.reload()
    await expect(link).to_be_visible()


async def test_menu_on_a_phone_opens_the_views(phone: Visitor) -> None:
    await phone.open("overview")
    menu = phone.button("Menu")
    await expect(phone.page.get_by_role("link", name="API keys")).to_be_hidden()
    await menu.tap()
    await expect(menu).to_have_attribute("aria-expanded", "true")
    await phone.page.get_by_role("link", name="API keys").tap()
    await phone.heading("API keys").wait_for()
    await expect(phone.page.get_by_role("link", name="API keys")).to_be_hidden()


UNNAMED = """() => [...document.querySelectorAll('input, select, textarea, button, a[href], [role=img]')].filter((node) =>
    node.checkVisibility() && !(node.labels?.length || node.getAttribute('aria-label') || node.textContent.trim()))
    .map((node) => node.outerHTML.slice(0, 120))"""


# Visible texts whose contrast is below the minimum of WCAG 2: 4.5, or 3 for large text.
CONTRAST = """() => {
    const light = (colour) => colour.map((part) => part / 255)
        .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
        .reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
    const read = (text) => text.match(/[\\d.]+/g).map(Number);
    const behind = (node) => {
        for (let at = node; at; at = at.parentElement) {
            const found = read(getComputedStyle(at).backgroundColor);
            if ((found[3] ?? 1) === 1) return found.slice(0, 3);
        }
        return [255, 255, 255];
    };
    const faint = [];
    for (const node of document.querySelectorAll('body *')) {
        const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
        if (!own || !node.checkVisibility() || node.closest('.visually-hidden, .skip, :disabled')) continue;
        const [one, other] = [light(read(getComputedStyle(node).color).slice(0, 3)), light(behind(node))].sort((a, b) => b - a);
        const ratio = (one + 0.05) / (other + 0.05);
        const [size, weight] = [parseFloat(getComputedStyle(node).fontSize), Number(getComputedStyle(node).fontWeight)];
        const isLarge = size >= 24 || (size >= 18.66 && weight >= 700);
        if (ratio < (isLarge ? 3 : 4.5)) faint.push(`${node.textContent.trim().slice(0, 30)}: ${ratio.toFixed(2)}`);
    }
    return faint;
}"""


async def test_controls_have_names_and_text_has_enough_contrast_in_both_themes(visitor: Visitor) -> None:
    page = visitor.page
    for view in VIEWS:
        await visitor.open(view)
        assert await page.evaluate(UNNAMED) == [], view
        await expect(page.locator("h1")).to_have_count(1)
        assert re.fullmatch(r".+ · Penstock", await page.title())
        for theme in ("light", "dark"):
            await page.emulate_media(color_scheme=theme)
            assert await page.evaluate(CONTRAST) == [], (view, theme)


async def test_theme_follows_the_system_until_another_is_chosen(site: Site, page: Page) -> None:
    holder = Visitor(site, page)
    await holder.sign_in()
    background = "getComputedStyle(document.body).backgroundColor"
    await page.emulate_media(color_scheme="light")
    light = await page.evaluate(background)
    await page.emulate_media(color_scheme="dark")
    dark = await page.evaluate(background)
    assert light != dark
    await page.get_by_role("button", name="theme").click()
    assert await page.evaluate(background) == light
    await page.reload()
    await holder.heading("Overview").wait_for()
    assert await page.evaluate(background) == light


async def test_key_is_created_with_the_keyboard_alone(holder: Visitor) -> None:
    page = holder.page
    await holder.open("keys")
    await holder.button("Create key").first.focus()
    await page.keyboard.press("Enter")
    await holder.dialog.wait_for()
    await expect(holder.dialog.get_by_label("Name")).to_be_focused()
    await page.keyboard.type("by keyboard")
    await page.keyboard.press("Enter")
    await holder.dialog.get_by_label("API key", exact=True).wait_for()
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("row", name="by keyboard")).to_be_visible()


@pytest.mark.parametrize("view", ["overview", "explorer", "webhooks"])
async def test_first_view_transfers_less_than_80_kb(
    browser: Browser, site: Site, signed_in: StorageState, view: str
) -> None:
    """All bytes on the wire that the view needs with an empty cache."""
    context = await browser.new_context(storage_state=signed_in)
    page = await context.new_page()
    session = await context.new_cdp_session(page)
    sizes: list[float] = []
    session.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
    await session.send("Network.enable")
    await page.goto(f"{site.url}#/{view}")
    await page.locator("main h1").wait_for()
    await page.wait_for_load_state("networkidle")
    assert 10_000 < sum(sizes) < 80_000
    await context.close()


SESSION = "/reads?paths=%2Fannouncements%2C%2Fsession"
# Records every call of the API, and whether the view was still being loaded.
CALLS = """() => {
    window.calls = [];
    const original = window.fetch;
    window.fetch = (url, ...rest) => {
        const isFirst = !document.querySelector('main h1');
        if (String(url).startsWith('/v1/')) window.calls.push([String(url), isFirst]);
        return original(url, ...rest);
    };
}"""


async def first_calls(visitor: Visitor) -> list[str]:
    """The calls that the current view has made to show itself, without those of its refreshes and of the session."""
    calls = await visitor.page.evaluate("window.calls.splice(0)")
    return [url for url, is_first in calls if is_first and not url.endswith(SESSION)]


async def test_each_page_makes_one_call(visitor: Visitor) -> None:
    page, service = visitor.page, visitor.site.service
    await service.rpc("eth_chainId", [], key="growth", network="dev/mainnet")

    async def is_used() -> bool:
        """The overview of an account that is not new."""
        keys = (await (await page.request.get(f"{service.base}/account/keys")).json())["keys"]
        return any(key["last_used_at"] for key in keys)

    await until(is_used)
    await page.add_init_script(f"({CALLS})()")
    for view in VIEWS:
        await visitor.open(view)
        assert len(await first_calls(visitor)) == 1, view
        await page.goto("about:blank")


async def test_session_and_announcements_are_one_call(visitor: Visitor) -> None:
    await visitor.page.add_init_script(f"({CALLS})()")
    await visitor.open("keys")
    calls = [url for url, _ in await visitor.page.evaluate("window.calls") if url.startswith("/v1/account/")]
    assert calls == [f"/v1/account{SESSION}", "/v1/account/keys"]


async def test_section_that_fails_says_so_beside_the_others(operator: Visitor) -> None:
    """As if the deliveries alone could not be read."""

    async def spoil(route: Route) -> None:
        reply = await route.fetch()
        data = await reply.json()
        data["parts"][2] = {"status": 503, "body": {"error": {"message": "the queue is away"}}}
        await route.fulfill(response=reply, json=data)

    await operator.page.route("**/v1/admin/reads?*deliveries*", spoil)
    await operator.open("operator/queues")
    await expect(operator.page.get_by_role("alert")).to_contain_text("the queue is away")
    await expect(operator.page.get_by_role("table", name="Followers")).to_contain_text("dev/mainnet")
    await operator.page.unroute_all(behavior="wait")


async def test_ticks_of_a_latency_axis_are_evenly_apart(visitor: Visitor) -> None:
    """Ticks at 1.25 and 1.75 s were rounded to 1.3 and 1.8."""
    await visitor.open("overview")
    script = await visitor.page.locator("script[type=module]").get_attribute("src")
    formatted = await visitor.page.evaluate(
        "async ([script, ticks]) => ticks.map((await import(new URL('format.js', new URL(script, location)).href)).millis)",
        [script, [750, 1000, 1250, 1500, 1750, 2000, 12500]],
    )
    assert formatted == ["750 ms", "1 s", "1.25 s", "1.5 s", "1.75 s", "2 s", "12.5 s"]


# Texts that JavaScript writes if a page shows something else than a text or a node.
NO_TEXT = re.compile(r"\[object |\bundefined\b|\bNaN\b|\bnull\b")


async def test_pages_without_entries_show_texts_only(holder: Visitor, operator: Visitor) -> None:
    """Every list of entries is empty, as in a new installation."""

    def emptied(body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        is_entries = {
            name: isinstance(value, list) and value and isinstance(value[0], dict) for name, value in body.items()
        }
        return {name: [] if is_entries[name] and name != "parts" else value for name, value in body.items()}

    async def empty(route: Route) -> None:
        reply = await route.fetch()
        data = emptied(await reply.json())
        for part in data.get("parts", ()):
            part["body"] = emptied(part["body"])
        await route.fulfill(response=reply, json=data)

    for visitor in (holder, operator):
        page = visitor.page
        await page.route(re.compile(r"/v1/(account|admin)/(?!session)\w+"), empty)
        for view in VIEWS:
            if view.startswith("operator/") == (visitor is operator):
                await visitor.open(view)
                await expect(page.locator("main .skeleton")).to_have_count(0)
                assert not NO_TEXT.search(await page.locator("main").inner_text()), view
        await page.unroute_all(behavior="wait")


async def test_chart_off_the_screen_is_drawn_when_it_is_scrolled_to(phone: Visitor) -> None:
    await phone.site.service.rpc("eth_chainId", [], key="growth", network="dev/mainnet")
    await phone.open("overview?range=live")
    last = phone.page.locator("figure.chart").last
    await expect(phone.page.locator("figure.chart").first).to_be_visible()
    await expect(last.locator("canvas")).to_have_count(0)
    await last.scroll_into_view_if_needed()
    await expect(last.locator("canvas")).to_be_visible()


async def test_buttons_of_the_sidebar_are_in_one_row_and_in_sight(visitor: Visitor) -> None:
    await visitor.open("keys")
    buttons = visitor.page.locator(".side .foot .actions > *")
    for _ in ("light", "dark"):
        boxes = await buttons.evaluate_all("(found) => found.map((each) => [each.offsetTop, each.clientHeight])")
        assert len({tuple(box) for box in boxes}) == 1, boxes
        await expect(buttons.last).to_be_in_viewport(ratio=1)
        await visitor.page.get_by_role("button", name="theme").click()


async def test_dialog_closes_with_its_page_unless_it_shows_a_secret(holder: Visitor) -> None:
    page = holder.page
    await holder.open("keys")
    await holder.button("Create key").first.click()
    await page.go_back()
    await holder.heading("Overview").wait_for()
    await expect(holder.dialog).to_have_count(0)
    await page.go_forward()
    await holder.button("Create key").first.click()
    await holder.dialog.get_by_label("Name").fill("kept in sight")
    await holder.button("Create key", holder.dialog).click()
    await holder.dialog.get_by_label("API key", exact=True).wait_for()
    await page.go_back()
    await holder.heading("Overview").wait_for()
    await expect(holder.dialog.get_by_label("API key", exact=True)).to_be_visible()


async def test_link_of_the_page_is_in_sight_in_a_long_sidebar(visitor: Visitor) -> None:
    await visitor.page.set_viewport_size({"width": 1280, "height": 600})
    for view in ("operator/announcements", "overview"):
        await visitor.open(view)
        await expect(visitor.page.locator(".side nav [aria-current]")).to_be_in_viewport(ratio=0.9)


CUT_TABLES = "(all) => all.filter((each) => each.scrollWidth > each.clientWidth).map((each) => each.innerText)"


async def test_tables_of_the_operators_overview_are_not_cut_off(operator: Visitor) -> None:
    await operator.open("operator/overview")
    await expect(operator.page.get_by_role("table", name="Followers")).to_contain_text("dev/mainnet")
    assert await operator.page.locator("main .scroll").evaluate_all(CUT_TABLES) == []


async def test_table_of_the_operators_errors_is_not_cut_off(operator: Visitor) -> None:
    service = operator.site.service
    status, _ = await service.send("GET", "/tokens/dev/balances/0x12", key="growth")
    assert status == 400
    table = operator.page.get_by_role("table", name="Errors")

    async def is_listed() -> bool:
        await operator.open("operator/overview")
        await operator.open("operator/errors?range=live")
        return await table.get_by_text("list_token_balances").count() > 0

    await until(is_listed, every_s=0.5)
    await expect(table).to_contain_text("Development (growth)")
    assert await operator.page.locator("main .scroll").evaluate_all(CUT_TABLES) == []


# The text of a select, measured in its own font, and the width that is left for it.
CUT_SELECTS = """(all) => all.map((each) => {
    const style = getComputedStyle(each), context = document.createElement("canvas").getContext("2d");
    context.font = style.font;
    const padding = parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
    return [each.selectedOptions[0].text, context.measureText(each.selectedOptions[0].text).width + padding - each.clientWidth];
}).filter(([, over]) => over > 0)"""


async def test_network_in_the_explorer_is_not_cut_off(holder: Visitor) -> None:
    await holder.page.set_viewport_size({"width": 1440, "height": 900})
    await holder.open("explorer")
    await expect(holder.page.get_by_label("Network")).to_have_value("dev/mainnet")
    assert await holder.page.locator("main select").evaluate_all(CUT_SELECTS) == []


async def test_network_without_upstreams_is_down_although_its_bundler_is_up(operator: Visitor) -> None:
    async def spoil(route: Route) -> None:
        reply = await route.fetch()
        data = await reply.json()
        for part in data["parts"]:
            for network in part["body"].get("networks", ()):
                for each in network["upstreams"]:
                    each["state"] = "open" if each["kind"] == "upstream" else "up"
        await route.fulfill(response=reply, json=data)

    await operator.page.route("**/v1/admin/reads?*networks*", spoil)
    await operator.open("operator/overview")
    await expect(operator.page.get_by_text("dev/mainnet has no upstream that takes calls")).to_be_visible()
    row = operator.page.get_by_role("table", name="Networks").get_by_role("row").filter(has_text="dev/mainnet")
    await expect(row).to_contain_text("0 of 1")
    await operator.page.unroute_all(behavior="wait")


async def test_list_of_policies_takes_one_call(holder: Visitor) -> None:
    await create_policy(holder, "One call")
    holder.requests.clear()
    await holder.page.get_by_role("link", name="← Gas policies").click()
    await expect(holder.page.get_by_role("row", name="One call").first).to_contain_text("$0.00, no limit")
    called = [each.url for each in holder.requests if "/v1/account/gas/" in each.url]
    assert [url.partition("?")[0].rpartition("/")[2] for url in called] == ["policies"]


async def test_explorer_needs_no_api_spec(holder: Visitor) -> None:
    holder.requests.clear()
    await holder.open("explorer")
    await holder.button("REST").click()
    await holder.page.get_by_label("Operation").select_option("read_gas_prices")
    await expect(holder.page.get_by_label("chain", exact=True)).to_have_value("dev")
    snippet = holder.page.get_by_role("region", name="Snippet")
    await expect(snippet).to_contain_text("/v1/gas/dev/prices")
    assert not [each.url for each in holder.requests if each.url.endswith("openapi.json")]


async def test_page_reports_an_unreachable_service_and_recovers(holder: Visitor) -> None:
    await holder.page.route("**/v1/**", lambda route: route.abort())
    await holder.page.get_by_role("link", name="Webhooks").click()
    await expect(holder.page.get_by_role("alert")).to_contain_text("Cannot reach the service")
    await holder.page.unroute("**/v1/**")
    await holder.button("Try again").click()
    await holder.button("Create webhook").first.wait_for()
    await expect(holder.page.get_by_role("alert")).to_have_count(0)
    holder.faults.clear()  # the browser logs the failed requests
