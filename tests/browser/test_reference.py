"""The API reference at /docs in a real browser: sections, search, samples that work, and accessibility."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from playwright.async_api import Browser, Page, expect

from proxy.dev.npm_packages import node_binary
from proxy.web.docs.guide_files import GuideFiles
from tests.browser.test_page import CONTRAST, UNNAMED
from tests.browser.visitor import WAIT_MS, Site, Visitor
from tests.client_scripts import ENVIRONMENT, SCRIPTS
from tests.service import ROOT

expect.set_options(timeout=WAIT_MS)
# Sections of every kind.
SECTIONS = (
    *("overview", "limits", "compute-units", "errors", "receiving-webhooks", "types", "tag-webhooks"),
    *(
        "rpc_call",
        "rest_get",
        "rest_post",
        "event-token_transfer",
        "event-NEW_BLOCK",
        "account_create_webhook",
        "admin_list_networks",
    ),
)


@pytest.fixture
async def reference(page: Page, site: Site) -> AsyncIterator[Page]:
    """Fails the test if the page had errors."""
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    await page.goto(root(site) + "/docs")
    await page.get_by_role("heading", name="Penstock API", exact=True).wait_for()
    yield page
    assert not faults


def root(site: Site) -> str:
    return site.service.base.removesuffix("/v1")


async def show(page: Page, section: str) -> None:
    await page.evaluate("(id) => { location.hash = id; }", section)
    await page.locator(f'#links a[href="#{section}"][aria-current]').wait_for()


async def test_home_page_has_a_first_call(reference: Page) -> None:
    first = reference.get_by_role("region", name="First call")
    await expect(first).to_contain_text("/v1/rpc/dev/mainnet")
    await expect(first).to_contain_text("$API_KEY")


# The sections whose page has more than one title, too many elements or controls without names.
FAULTY = """async (unnamed) => {
    const faulty = [];
    for (const link of [...document.querySelectorAll('#links a')]) {
        const drawn = new Promise((resolve) => addEventListener('hashchange', resolve, { once: true }));
        if (location.hash !== link.hash) { location.hash = link.hash; await drawn; }
        const isWell = document.querySelectorAll('h1').length === 1 && document.querySelectorAll('main *').length < 4000
            && (0, eval)(unnamed)().length === 0 && document.querySelector('main h1').textContent;
        if (!isWell) faulty.push(link.hash);
    }
    return faulty;
}"""


async def test_every_section_is_shown_alone_and_is_accessible(browser: Browser, site: Site) -> None:
    context = await browser.new_context(bypass_csp=True)
    page = await context.new_page()
    await page.goto(root(site) + "/docs")
    await page.get_by_role("heading", name="Penstock API", exact=True).wait_for()
    ids = await page.locator("#links a").evaluate_all("links => links.map((link) => link.hash.slice(1))")
    assert set(SECTIONS) <= set(ids)
    assert await page.evaluate(FAULTY, UNNAMED) == []
    await context.close()


async def test_text_has_enough_contrast_in_both_themes(reference: Page) -> None:
    for section in SECTIONS:
        await show(reference, section)
        for theme in ("light", "dark"):
            await reference.emulate_media(color_scheme=theme)
            assert await reference.evaluate(CONTRAST) == [], (section, theme)


async def test_sections_fit_on_a_phone(browser: Browser, site: Site) -> None:
    context = await browser.new_context(viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
    page = await context.new_page()
    await page.goto(root(site) + "/docs/")
    for section in SECTIONS:
        await page.evaluate("(id) => { location.hash = id; }", section)
        await page.locator(f'#links a[href="#{section}"][aria-current]').wait_for(state="attached")
        wide = await page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide[0] <= wide[1], section
    await page.get_by_role("button", name="Menu").tap()
    await page.get_by_role("link", name="Limits").tap()
    await page.get_by_role("heading", name="Limits", level=1).wait_for()
    await context.close()


async def test_responses_of_an_operation_are_drawn(reference: Page) -> None:
    for section in ("rpc_call", "list_chains", "event-NEW_BLOCK"):
        await show(reference, section)
        await expect(reference.get_by_role("heading", name="Responses")).to_be_visible()
        await expect(reference.locator("#content")).not_to_contain_text("[object")


async def test_search_finds_sections_by_their_words(reference: Page) -> None:
    await reference.keyboard.press("/")
    await reference.keyboard.type("compare constant time")
    await expect(reference.locator("#found")).to_have_text("1 section found")
    await reference.keyboard.press("Enter")
    await reference.get_by_role("heading", name="Receiving webhooks", level=1).wait_for()


async def test_deep_links_open_their_section(page: Page, site: Site) -> None:
    for target, title in (("event-NEW_BLOCK", "NEW_BLOCK"), ("type-EvmAddress", "Types"), ("nonsense", "Penstock API")):
        await page.goto(f"{root(site)}/docs#{target}")
        await page.reload()
        await page.get_by_role("heading", name=title, level=1, exact=True).wait_for()


async def test_limits_and_errors_are_shown_as_tables(reference: Page) -> None:
    await show(reference, "limits")
    row = reference.get_by_role("row").filter(has_text="Requests per second")
    await expect(row).to_contain_text("10")
    await show(reference, "errors")
    await expect(reference.get_by_role("row").filter(has_text="rate_limited")).to_be_visible()
    await show(reference, "event-TOKEN_TRANSFER")
    await expect(reference.get_by_role("region", name="Body")).to_contain_text('"valueFormatted"')


async def sample(page: Page, language: str) -> str:
    await page.get_by_role("button", name=language, exact=True).first.click()
    return await page.get_by_role("region", name="Request", exact=True).inner_text()


async def test_samples_use_a_served_network_and_the_right_credentials(reference: Page) -> None:
    for section, shown, hidden in (
        ("rpc_call", ("/v1/rpc/dev/mainnet", "X-API-Key"), "ethereum"),
        ("list_token_balances", ("/v1/tokens/dev/balances/", "X-API-Key"), "ethereum"),
        ("list_webhooks", ("X-API-Key",), "cookies"),
        ("account_list_webhooks", ("-b cookies.txt",), "X-API-Key"),
        ("admin_list_networks", ("Authorization: Bearer $ADMIN_TOKEN",), "X-API-Key"),
        ("account_sign_in", ("-c cookies.txt",), "X-API-Key"),
    ):
        await show(reference, section)
        text = await sample(reference, "curl")
        assert all(part in text for part in shown), text
        assert hidden not in text


def environment(site: Site) -> dict[str, str]:
    service = site.service
    secrets = {"API_KEY": service.keys["growth"], "ADMIN_TOKEN": service.ready["admin_token"]}
    return {**os.environ, **ENVIRONMENT, **secrets}


async def run(words: list[str], site: Site) -> str:
    done = await asyncio.to_thread(
        subprocess.run, words, env=environment(site), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("section", ["rpc_call", "list_chains", "create_wallet", "admin_list_networks"])
async def test_samples_run(reference: Page, site: Site, tmp_path: Path, section: str) -> None:
    """In curl, JavaScript (viem or fetch) and Python."""
    await show(reference, section)
    shell = await sample(reference, "curl")
    out = await run(["bash", "-c", re.sub(r"^curl ", "curl -s -w ' %{http_code}' ", shell)], site)
    assert out[-3:] in ("200", "201"), out
    # Node looks for packages beside the script.
    script = SCRIPTS / f".sample-{os.getpid()}.mjs"
    script.write_text(await sample(reference, "JavaScript"))
    try:
        out = await run([str(node_binary()), str(script)], site)
    finally:
        script.unlink()
    assert re.match(r"(200|201) |0x", out), out
    file = tmp_path / "sample.py"
    file.write_text(await sample(reference, "Python"))
    out = await run([sys.executable, str(file)], site)
    assert re.match(r"(200|201) ", out), out
    assert shlex.split(shell)[0] == "curl"


# The curl sample of every read with an API key.
READS = """async () => {
    const found = [];
    for (const link of [...document.querySelectorAll('#links a:has(.get)')]) {
        const drawn = new Promise((resolve) => addEventListener('hashchange', resolve, { once: true }));
        if (location.hash !== link.hash) { location.hash = link.hash; await drawn; }
        const text = document.querySelector('.panel pre').textContent;
        if (text.includes('X-API-Key')) found.push(text);
    }
    return found;
}"""


async def test_samples_of_all_reads_are_accepted(reference: Page, site: Site) -> None:
    """A sample may name a webhook or a contract that does not exist here, but it is valid and authenticated."""
    texts = await reference.evaluate(READS)
    assert len(texts) > 10
    script = "\n".join(re.sub(r"^curl ", "curl -s -o /dev/null -w '%{http_code} %{url}\\\\n' ", text) for text in texts)
    replies = (await run(["bash", "-c", script], site)).splitlines()
    assert len(replies) == len(texts)
    assert {reply[:3] for reply in replies} <= {"200", "404"}, replies
    assert sum(reply.startswith("200") for reply in replies) >= 5, replies


async def test_reference_transfers_less_than_90_kb(browser: Browser, site: Site) -> None:
    """Three quarters are the API spec, which Brotli packs to 60 KB: repetitions cost nothing, but each operation adds to it."""
    context = await browser.new_context()
    page = await context.new_page()
    session = await context.new_cdp_session(page)
    sizes: list[float] = []
    session.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
    await session.send("Network.enable")
    await page.goto(root(site) + "/docs")
    await page.get_by_role("heading", name="Penstock API", exact=True).wait_for()
    assert 10_000 < sum(sizes) < 90_000
    await context.close()


@pytest.fixture(scope="module")
async def guide(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TestServer]:
    """The guide, built and served as in production."""
    built = tmp_path_factory.mktemp("guide") / "site"
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(built)]
    await asyncio.to_thread(subprocess.run, words, cwd=ROOT, capture_output=True, timeout=150, check=True)
    application = web.Application()
    application.add_routes(GuideFiles(built).routes())
    server = TestServer(application)
    async with server:
        yield server


async def test_guide_names_its_own_host(page: Page, guide: TestServer) -> None:
    origin = str(guide.make_url("")).rstrip("/")
    await page.goto(str(guide.make_url("/docs/guide/quickstart/")))
    article = page.locator("article")
    await expect(article).to_contain_text(f"curl -s {origin}/v1/rpc/")
    await expect(article).to_contain_text(f"ws{origin.removeprefix('http')}/v1/ws/")
    await expect(article.locator("code").filter(has_text="//127.0.0.1:8545")).to_have_count(0)
    # A page about another host keeps its example.
    await page.goto(str(guide.make_url("/docs/guide/production/")))
    await expect(article).to_contain_text("http://127.0.0.1:8545/v1/rpc/ethereum/mainnet")


async def test_reader_of_the_guide_chooses_what_it_shows(page: Page, guide: TestServer) -> None:
    await page.goto(str(guide.make_url("/docs/guide/architecture/")))
    shown = page.locator(".md-nav--primary > .md-nav__list > .md-nav__item--section > .md-nav__link")
    names = shown.filter(visible=True)
    await expect(names).to_have_text(["Start", "Use", "Operate", "Understand", "Internals"])
    await page.get_by_label("Show pages for").select_option("I call the API")
    await expect(names).to_have_text(["Start", "Use", "Understand"])
    await page.get_by_label("Show pages for").select_option("I run the service")
    await expect(names).to_have_text(["Operate", "Understand", "Internals"])
    # The choice stays, and the section of the page that is open is shown.
    await page.goto(str(guide.make_url("/docs/guide/webhooks/")))
    await expect(names).to_have_text(["Start", "Operate", "Understand", "Internals"])


@pytest.mark.parametrize(
    ("word", "title"),
    [
        ("troubleshooting", "Troubleshooting"),
        ("sizing", "Sizing"),
        ("metamask", "MetaMask"),
        ("wrong_chain", "upstream"),
    ],
)
async def test_search_of_the_guide_finds(page: Page, guide: TestServer, word: str, title: str) -> None:
    await page.goto(str(guide.make_url("/docs/guide/")))
    await page.get_by_role("textbox", name="Search").fill(word)
    await page.locator(".md-search-result__item").filter(has_text=title).first.wait_for()


async def test_guide_and_its_search_run_under_the_policy(page: Page, guide: TestServer) -> None:
    faults: list[str] = []
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: faults.append(request.url) if "127.0.0.1" not in request.url else None)
    await page.goto(str(guide.make_url("/docs/guide/webhooks/")))
    await page.get_by_role("heading", name="Your first webhook", level=1).wait_for()
    await page.get_by_role("textbox", name="Search").fill("fromBlock")
    await page.locator(".md-search-result__item").filter(has_text="Subscriptions").first.wait_for()
    assert not faults


async def test_request_is_tried_with_a_key_of_the_session(visitor: Visitor) -> None:
    page = visitor.page
    await visitor.create_key("for the reference")
    await page.goto(root(visitor.site) + "/docs#rpc_call")
    await page.get_by_role("heading", name="Penstock API").or_(page.locator("#content h1")).first.wait_for()
    await visitor.button("Try it").click()
    form = page.get_by_role("form", name="Try it")
    await form.get_by_label("Key").select_option(label="for the reference (test)")
    await form.get_by_label("POST path").fill("/v1/rpc/ethereum/sepolia")
    await form.get_by_label("Body").fill('{"jsonrpc": "2.0", "id": 1, "method": "eth_gasPrice", "params": []}')
    await visitor.button("Send", form).click()
    await expect(form.get_by_role("region", name="Reply")).to_contain_text("eth_gasPrice")
    await expect(form).to_contain_text("Status 200")
    sent = [request for request in visitor.requests if request.url.endswith("/rpc/ethereum/sepolia")]
    assert (await sent[-1].header_value("x-api-key") or "").startswith("sbx_")


async def test_reference_says_what_a_limited_key_may_not_do(visitor: Visitor) -> None:
    page = visitor.page
    await visitor.create_key("only prices", methods="eth_gasPrice", networks="ethereum/sepolia")
    await page.goto(root(visitor.site) + "/docs#rpc_call")
    await visitor.button("Try it").click()
    form = page.get_by_role("form", name="Try it")
    await form.get_by_label("Key").select_option(label="only prices (test)")
    await form.get_by_label("POST path").fill("/v1/rpc/dev/mainnet")
    await expect(form.get_by_role("status")).to_contain_text("only prices may not be used on dev/mainnet")
    await form.get_by_label("POST path").fill("/v1/rpc/ethereum/sepolia")
    await form.get_by_label("Body").fill('{"jsonrpc": "2.0", "id": 1, "method": "eth_call", "params": []}')
    await expect(form.get_by_role("status")).to_contain_text("only prices may not call eth_call")
    await form.get_by_label("Body").fill('{"jsonrpc": "2.0", "id": 1, "method": "eth_gasPrice", "params": []}')
    await expect(form.get_by_role("status")).to_be_empty()


async def test_reference_asks_strangers_to_sign_in(page: Page, site: Site) -> None:
    await page.goto(root(site) + "/docs#list_chains")
    await page.get_by_role("button", name="Try it").click()
    await expect(page.get_by_role("link", name="Sign in to the dashboard")).to_be_visible()
