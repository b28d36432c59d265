"""Takes the README's screenshots from a service with a day of generated usage.

python -m tests.browser.screenshots    # writes tests/browser/screenshots/*.webp
"""

from __future__ import annotations

import asyncio
import base64
import math
import random
import re
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import orjson
from playwright.async_api import Browser, Page, async_playwright

from proxy.core.usage import BUCKETS, UsageSums
from proxy.services.accounts.keyring import utc_day
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.quotas import QuotaStore
from proxy.store.postgres.usage import UsageSeries, UsageStore
from tests import service as services
from tests.browser import chromium
from tests.browser.conftest import QUICK
from tests.browser.visitor import Receiver, Site, Visitor
from tests.flows.upstream import Upstream

OUTPUT = Path(__file__).resolve().parent / "screenshots"
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
SCALE, QUALITY = 1.5, 82
METHODS = {"eth_call": 9, "eth_getBalance": 5, "eth_blockNumber": 4, "eth_getLogs": 2, "eth_chainId": 2}
NETWORKS = {"dev/mainnet": 6, "ethereum/sepolia": 3}
MINUTES = 24 * 60


def generated_usage(account: str, key: str, rng: random.Random) -> dict[tuple[UsageSeries, int], UsageSums]:
    """A day of one key's usage in steps of five minutes, with an hour of errors and high latency."""
    now = int(time.time()) // 60
    rows: dict[tuple[UsageSeries, int], UsageSums] = {}
    for ago in range(0, MINUTES, 5):
        busy = 40 + 30 * math.sin((now - ago) / MINUTES * 2 * math.pi) + rng.uniform(-6, 6)
        is_bad = 300 <= ago < 360
        for network, weight in NETWORKS.items():
            for method, share in METHODS.items():
                requests = max(1, round(busy * weight * share / 20))
                used = UsageSums(
                    requests, round(requests * (0.09 if is_bad else 0.004)), requests * 3, requests * 2 // 5
                )
                used.took = latency_buckets(requests, slow=is_bad)
                rows[(account, key, network, method), now - ago] = used
    return rows


def latency_buckets(requests: int, *, slow: bool) -> list[int]:
    shares = (0.35, 0.15, 0.1, 0.05, 0.2, 0.1, 0.04, 0.01) if not slow else (0.2, 0.1, 0.1, 0.1, 0.2, 0.15, 0.1, 0.05)
    counts = [round(requests * share) for share in shares]
    return [*counts, *[0] * (BUCKETS - len(counts))]


async def write_usage(site: Site) -> None:
    url = orjson.loads((site.service.data / "running.json").read_bytes())["database"]["url"]
    keys = [key for key in await site.service.cli_json("keys", "list") if key["status"] == "active"]
    pool = Pool(url, size=1, acquire_timeout_s=5.0)
    await pool.open()
    rng = random.Random(1)
    accounts = {each["id"]: each["plan"] for each in await site.service.cli_json("accounts", "list")}
    growth = [key for key in keys if accounts[key["account_id"]] == "growth"]
    midnight = int(time.time()) // 86_400 * 1440
    for number, key in enumerate(growth):
        usage = generated_usage(key["account_id"], key["id"], rng)
        await UsageStore(pool).write(f"generated {number}", 1, usage)
        today = sum(used.requests for (_, minute), used in usage.items() if minute >= midnight)
        await QuotaStore(pool).lease(utc_day(), [(key["account_id"], today, 5_000_000)])
    await UsageStore(pool).sum_up(0.0)
    await pool.close()


async def take(page: Page, name: str) -> None:
    """Save a screenshot as WebP, at half the size of PNG."""
    session = await page.context.new_cdp_session(page)
    shot = await session.send("Page.captureScreenshot", {"format": "webp", "quality": QUALITY})
    (OUTPUT / f"{name}.webp").write_bytes(base64.b64decode(shot["data"]))
    print(f"{name}.webp: {len(base64.b64decode(shot['data'])) // 1024} KB")


async def signed_in_visitor(browser: Browser, site: Site, **options: Any) -> Visitor:
    context = await browser.new_context(locale="en-GB", device_scale_factor=SCALE, **options)
    visitor = Visitor(site, await context.new_page())
    await visitor.sign_in()
    return visitor


async def open_view(visitor: Visitor, view: str) -> None:
    await visitor.open(view)
    await visitor.page.wait_for_load_state("networkidle")
    await visitor.page.wait_for_timeout(500)


async def take_all(browser: Browser, site: Site) -> None:
    light = await signed_in_visitor(browser, site, viewport=DESKTOP, color_scheme="light")
    await open_view(light, "overview")
    await take(light.page, "overview-light")
    await light.create_webhook("/hooks/blocks")
    for status in (200, 503, 200):
        site.receiver.status, site.receiver.text = status, "overloaded, come back later"
        await light.button("Send test event").click()
        await light.page.get_by_text(re.compile("^Test event (delivered|failed)")).last.wait_for()
        await light.page.wait_for_timeout(700)
    await light.page.locator(".log summary").nth(1).click()
    await light.page.wait_for_timeout(5000)  # until toasts are gone
    await take(light.page, "webhook-light")
    dark = await signed_in_visitor(browser, site, viewport=DESKTOP, color_scheme="dark")
    await dark.page.get_by_label("Split charts").check()
    await open_view(dark, "overview")
    await take(dark.page, "overview-dark")
    await open_view(dark, "explorer")
    await dark.paste_key("test")
    await dark.page.get_by_label("Network").select_option("dev/testnet")
    await dark.page.get_by_label("Method").fill("eth_getBlockByNumber")
    await dark.page.get_by_label("Method").blur()
    await dark.button("Send").click()
    await dark.page.get_by_role("region", name="Body").wait_for()
    await take(dark.page, "explorer-dark")
    await dark.sign_in_as_operator()
    await open_view(dark, "operator/upstreams")
    await take(dark.page, "upstreams-dark")
    phone = {"viewport": PHONE, "is_mobile": True, "has_touch": True}
    small = await signed_in_visitor(browser, site, color_scheme="light", **phone)
    await open_view(small, "overview")
    await take(small.page, "overview-phone")
    night = await signed_in_visitor(browser, site, color_scheme="dark", **phone)
    await open_view(night, "keys")
    await take(night.page, "keys-phone")


async def main() -> None:
    found = chromium.find()
    assert found is not None, chromium.MISSING
    OUTPUT.mkdir(exist_ok=True)
    upstreams, receiver = (Upstream(), Upstream()), Receiver()
    async with AsyncExitStack() as stack:
        for server in (*upstreams, receiver):
            await server.open()
            stack.push_async_callback(server.close)
        data = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-shots-"))
        options = [word for each in upstreams for word in ("--upstream", f"ethereum/sepolia={each.url}")]
        service = await services.start(Path(data), "--workers", "2", *options, env=QUICK)
        stack.push_async_callback(services.stop, service)
        site = Site(service, upstreams, receiver)
        await write_usage(site)
        for network in ("dev/testnet", "ethereum/sepolia"):
            for at in range(60):
                await service.rpc("eth_getBalance", [f"0x{at:040x}", "latest"], key="test", network=network)
        playwright = await stack.enter_async_context(async_playwright())
        env: dict[str, str | float | bool] = {**chromium.environment(), **found.env}
        browser = await playwright.chromium.launch(executable_path=found.path, env=env, args=["--no-sandbox"])
        await take_all(browser, site)
        await browser.close()


if __name__ == "__main__":
    asyncio.run(main())
