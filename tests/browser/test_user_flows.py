"""The main user flows of the dashboard, end to end in a real browser."""

from __future__ import annotations

import asyncio
import csv
import datetime
import itertools
import re
import subprocess
import time
from typing import Any

import orjson
from aiohttp import web
from playwright.async_api import Page, expect

from proxy.commands.index import BackfillReport
from proxy.core.credits import Spent
from proxy.dev.funded_accounts import ALICE, FUNDED
from proxy.services.follower.backfill import BackfillProgress
from proxy.services.process_reports import ProcessReports
from proxy.store.postgres.fleet import FleetStore
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.spending import SpendingStore
from proxy.tasks import Tasks
from tests.browser.visitor import WAIT_MS, Site, Visitor
from tests.database import pooled
from tests.flows.upstream import echo, reply
from tests.service import until

expect.set_options(timeout=WAIT_MS)
# A well-formed operation of an account that does not exist.
OPERATION = {
    "sender": "0x9f1A0469CBce2fEb53C705746446981548845b3B",
    "nonce": "0x3",
    "callData": "0x",
    "callGasLimit": "0x13880",
    "verificationGasLimit": "0x186a0",
    "preVerificationGas": "0xc350",
    "maxFeePerGas": "0x3b9aca00",
    "maxPriorityFeePerGas": "0x3b9aca00",
}


async def refuse(call: dict[str, object]) -> web.StreamResponse:
    return reply(call, error={"code": -32000, "message": "refused by the upstream"})


def curl(url: str, key: str, method: str) -> dict[str, object]:
    """Call with the curl program, like the snippet in the dashboard."""
    call = f'{{"jsonrpc":"2.0","id":1,"method":"{method}","params":[]}}'
    command = ["curl", "-sS", url, "-H", f"X-API-Key: {key}", "-H", "Content-Type: application/json", "-d", call]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return dict(orjson.loads(done.stdout))


async def test_request_with_a_new_key_appears_in_the_chart(holder: Visitor) -> None:
    page = holder.page
    key = await holder.create_key("created in the browser")
    url = f"{holder.site.service.base}/rpc/ethereum/sepolia"
    assert (await asyncio.to_thread(curl, url, key, "eth_sendTransaction"))["error"]
    assert (await asyncio.to_thread(curl, url, key, "eth_gasPrice"))["result"] == "eth_gasPrice"

    await expect(page.get_by_role("row", name="created in the browser")).to_contain_text("Active")
    await holder.open("overview")
    await holder.button("30 min").click()
    await holder.button("Method").click()
    await expect(page.get_by_role("row", name="eth_gasPrice")).to_be_visible()
    await holder.button("eth_gasPrice").click()  # filter by this method
    chart = page.get_by_role("img", name="Requests: requests")
    await expect(chart).to_have_attribute("aria-label", "Requests: requests 1, errors 0")
    # The export uses the same filter.
    export = page.get_by_role("link", name="Export CSV")
    await expect(export).to_have_attribute("href", re.compile("[?&]method=eth_gasPrice(&|$)"))
    await expect(chart.locator("canvas")).to_be_visible()
    await holder.button("Key").click()
    await expect(page.get_by_role("row", name="created in the browser")).to_contain_text("1")


async def test_overview_updates_without_a_reload(holder: Visitor) -> None:
    await holder.button("30 min").click()
    await holder.button("Method").click()
    await holder.site.service.rpc("net_version", key="test", network="ethereum/sepolia")
    await expect(holder.page.get_by_role("row", name="net_version")).to_be_visible()


async def test_key_is_rotated_with_an_overlap_and_revoked(holder: Visitor) -> None:
    page, post = holder.page, holder.site.service.rpc
    old = await holder.create_key("to be rotated")
    await holder.button("Rotate", page.get_by_role("row", name="to be rotated")).click()
    await holder.dialog.get_by_label("Expire the old key").select_option("3600")
    await holder.button("Rotate key", holder.dialog).click()
    shown = holder.dialog.get_by_label("API key", exact=True)
    await shown.wait_for()
    new = await shown.inner_text()
    await holder.button("Done").click()
    for key in (old, new):
        assert (await post("eth_chainId", key=key, network="ethereum/sepolia")).status == 200

    row = page.get_by_role("row", name="to be rotated").filter(has_text="Expiring")
    await holder.button("Revoke", row).click()
    await holder.button("Revoke key", holder.dialog).click()
    await expect(page.get_by_role("row", name="to be rotated").filter(has_text="Revoked")).to_be_visible()

    async def refused() -> bool:
        return (await post("eth_chainId", key=old, network="ethereum/sepolia")).status == 401

    await until(refused)
    assert (await post("eth_chainId", key=new, network="ethereum/sepolia")).status == 200


async def test_new_account_sees_first_steps_until_its_first_request(fresh_holder: Visitor) -> None:
    page = fresh_holder.page
    steps = page.get_by_role("heading", name="First steps")
    await fresh_holder.open("overview")
    await expect(steps).to_be_visible()
    await expect(page.get_by_role("heading", name="Breakdown")).to_be_hidden()
    key = await fresh_holder.create_key("first")
    url = f"{fresh_holder.site.service.base}/rpc/ethereum/sepolia"
    await fresh_holder.open("overview")
    await expect(steps).to_be_visible()
    assert (await asyncio.to_thread(curl, url, key, "eth_gasPrice"))["result"] == "eth_gasPrice"
    await expect(steps).to_be_hidden()
    await expect(page.get_by_role("heading", name="Breakdown")).to_be_visible()


async def test_escape_does_not_lose_a_new_key(holder: Visitor) -> None:
    await holder.open("keys")
    await holder.button("Create key").first.click()
    await holder.dialog.get_by_label("Name").fill("kept on screen")
    await holder.button("Create key", holder.dialog).click()
    shown = holder.dialog.get_by_label("API key", exact=True)
    await shown.wait_for()
    for _ in range(3):
        await holder.page.keyboard.press("Escape")
    await expect(shown).to_be_visible()
    await holder.button("Done").click()
    await expect(shown).to_have_count(0)


async def test_key_is_disabled_only_after_a_question(holder: Visitor) -> None:
    await holder.create_key("to be disabled")
    row = holder.page.get_by_role("row", name="to be disabled")
    await holder.button("Disable", row).click()
    await holder.button("Cancel", holder.dialog).click()
    await expect(row).to_contain_text("Active")
    await holder.button("Disable", row).click()
    await holder.button("Disable key", holder.dialog).click()
    await expect(row).to_contain_text("Disabled")


async def test_test_event_is_delivered_and_logged(holder: Visitor) -> None:
    page, receiver = holder.page, holder.site.receiver
    await holder.create_webhook("/arrives")
    await holder.button("Send test event").click()
    await expect(page.get_by_role("status").filter(has_text="Test event delivered: 200")).to_be_visible()
    sent = next(event for event in receiver.events if event["id"].startswith("evt_test_"))
    entry = page.locator(f'[data-event="{sent["id"]}"]')
    await expect(entry).to_contain_text("Delivered")
    await entry.locator("summary").click()
    await expect(entry.get_by_role("table", name="Attempts")).to_contain_text("200")


async def test_webhook_that_would_never_have_an_event_is_not_created(holder: Visitor) -> None:
    await holder.open("webhooks")
    await holder.button("Create webhook").first.click()
    await holder.dialog.get_by_label("Endpoint URL").fill(f"{holder.site.receiver.url}/nothing")
    await holder.dialog.get_by_label("Event").select_option("TOKEN_TRANSFER")
    await holder.dialog.get_by_label("Network").select_option("dev-mainnet")
    await holder.button("Create webhook", holder.dialog).click()
    await expect(holder.dialog.get_by_role("alert")).to_contain_text("matches nothing")


async def test_webhook_without_a_filter_says_that_it_watches_nothing(holder: Visitor) -> None:
    """The API creates one, which may get its filter later."""
    service, page = holder.site.service, holder.page
    wanted = {"chain": "dev", "event_type": "TOKEN_TRANSFER", "config": {}, "url": holder.site.receiver.url}
    status, webhook = await service.send("POST", "/webhooks", wanted, key="growth")
    assert status == 201
    await holder.open(f"webhooks/{webhook['id']}")
    await expect(page.get_by_text("This webhook watches nothing")).to_be_visible()
    address = {"config": {"addresses": ["0x" + "11" * 20]}}
    assert (await service.send("PATCH", f"/webhooks/{webhook['id']}", address, key="growth"))[0] == 200
    await expect(page.get_by_text("This webhook watches nothing")).to_be_hidden()
    await service.send("DELETE", f"/webhooks/{webhook['id']}", key="growth")


async def test_webhook_without_events_shows_what_a_back_test_finds(holder: Visitor) -> None:
    page = holder.page
    for address, found in ((f"0x{'5e' * 20}", "finds 0 in"), (FUNDED.address, "finds [1-9]")):
        await holder.create_webhook(f"/{address}", event="ADDRESS_ACTIVITY", filters={"Addresses": address})
        await expect(page.get_by_text("0 events matched in the last 24 h.")).to_be_visible()
        await holder.button("Back-test").click()
        silence = page.get_by_text(re.compile(f"^0 events matched in the last 24 h; the back-test {found}"))
        await expect(silence).to_be_visible()
        await holder.button("Send test event").click()
        await expect(page.get_by_role("status").filter(has_text="Test event delivered")).to_be_visible()
        await expect(silence).to_be_visible()  # a test event does not count


async def test_networks_have_addresses_to_copy_and_their_status(holder: Visitor) -> None:
    page, base = holder.page, holder.site.service.base
    await holder.open("networks")
    row = page.locator('[data-id="dev/mainnet"]')
    await expect(row).to_contain_text("Up")
    for url in (f"{base}/rpc/dev/mainnet", f"{base.replace('http', 'ws')}/ws/dev/mainnet"):
        await expect(row).to_contain_text(url)
    await expect(row).to_contain_text(f"{base}/tokens/dev-mainnet/balances/")
    await holder.button("Copy HTTP URL of dev/mainnet").click()
    await expect(holder.button("Copy HTTP URL of dev/mainnet")).to_have_text("Copied")
    await page.get_by_label("Search").fill("sepolia")
    await expect(row).to_have_count(0)
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")


async def test_page_has_no_scrollbar_beside_a_dialog(holder: Visitor) -> None:
    await holder.open("webhooks")
    overflow = "getComputedStyle(document.documentElement).overflow"
    assert await holder.page.evaluate(overflow) == "visible"
    edge = "document.querySelector('main').getBoundingClientRect().right"
    before = await holder.page.evaluate(edge)
    await holder.button("Create webhook").first.click()
    await expect(holder.dialog).to_be_visible()
    assert await holder.page.evaluate(overflow) == "hidden"
    assert await holder.page.evaluate(edge) == before, "the page must not move"
    await holder.button("Cancel", holder.dialog).click()
    await expect(holder.dialog).to_have_count(0)
    assert await holder.page.evaluate(overflow) == "visible"


async def test_id_is_shown_in_one_line(holder: Visitor) -> None:
    await holder.create_webhook("/one-line")
    for width in (390, 1440):
        await holder.page.set_viewport_size({"width": width, "height": 900})
        shown = holder.page.locator(".id code").first
        box = await shown.bounding_box()
        assert box is not None
        assert box["height"] < 30, width
        # The whole id is there to be copied, also if its middle is cut off.
        assert (await shown.text_content() or "").startswith("wh_")
        assert await holder.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width


async def test_webhook_form_has_one_list_of_events_and_a_choice_of_format(holder: Visitor) -> None:
    page, dialog = holder.page, holder.dialog
    await holder.open("webhooks")
    await holder.button("Create webhook").first.click()
    events = await dialog.get_by_label("Event").locator("option").all_inner_texts()
    assert len(events) == len({*events}) == 8
    await expect(dialog.get_by_label("Format B", exact=True)).to_be_checked()
    await dialog.get_by_label("Event").select_option("log")  # only in Format A
    await expect(dialog.get_by_label("Format B", exact=True)).to_be_disabled()
    await expect(dialog.get_by_label("Format A", exact=True)).to_be_checked()
    await dialog.get_by_label("Event").select_option("NEW_BLOCK")  # only in Format B
    await expect(dialog.get_by_label("Format A", exact=True)).to_be_disabled()
    await expect(dialog.get_by_label("Format B", exact=True)).to_be_checked()
    await holder.button("Cancel", dialog).click()
    filters = {"Token contracts": f"0x{'5e' * 20}"}
    for wire, event_type in (("Format A", "token_transfer"), ("Standard Webhooks", "TOKEN_TRANSFER")):
        await holder.create_webhook(f"/{event_type}", event="TOKEN_TRANSFER", wire=wire, filters=filters)
        await expect(page.get_by_text(event_type, exact=True)).to_be_visible()


async def test_webhook_of_a_test_key_gets_a_fault_plan(site: Site, page: Page) -> None:
    service = site.service
    account = await service.new_account()
    key = (await service.new_key(account["id"], "--mode", "test"))["key"]
    body = {"url": f"{site.receiver.url}/spoiled", "chain": "dev", "event_type": "NEW_BLOCK"}
    async with service.session.post(f"{service.base}/webhooks", json=body, headers={"X-API-Key": key}) as reply:
        made = await reply.json()
    await page.goto((await service.cli_json("accounts", "link", account["id"]))["url"])
    found = Visitor(site, page)
    await found.button("Sign in").click()
    await found.heading("Overview").wait_for()
    await found.open(f"webhooks/{made['id']}")
    await found.button("Edit").click()
    await found.dialog.get_by_label("Faults").fill("duplicate=1, status=503")
    await found.button("Save changes", found.dialog).click()
    await expect(found.dialog).to_contain_text("is not valid for a webhook")
    await found.dialog.get_by_label("Faults").fill("duplicate=1")
    await found.button("Save changes", found.dialog).click()
    await expect(page.locator("main").get_by_text("duplicate=1")).to_be_visible()


async def test_failed_delivery_shows_the_response_and_is_redelivered(holder: Visitor) -> None:
    page, receiver = holder.page, holder.site.receiver
    await holder.create_webhook("/fails")
    receiver.status, receiver.text = 503, "<b>overloaded</b>"
    try:
        await holder.button("Send test event").click()
        await expect(page.get_by_role("alert").filter(has_text="503")).to_be_visible()
    finally:
        receiver.status, receiver.text = 200, "thank you"
    entry = page.locator('[data-event^="evt_test_"]').first
    await entry.locator("summary").click()
    await expect(entry.get_by_role("table", name="Attempts")).to_contain_text("<b>overloaded</b>")
    await expect(entry.get_by_role("region", name="Payload")).to_contain_text('"type": "NEW_BLOCK"')
    await entry.get_by_text("Attempt 1: 503").click()
    sent = entry.get_by_role("region", name="Request headers")
    await expect(sent).to_contain_text(re.compile(r"X-Platform-Signature: sha256=\w{5}…"))
    await expect(entry.get_by_role("region", name="Response headers")).to_contain_text("Content-Type: text/plain")
    await expect(entry.get_by_role("region", name="Response body")).to_contain_text("<b>overloaded</b>")
    await holder.open("webhooks")
    row = page.get_by_role("row", name="/fails")
    await expect(row).to_contain_text("Failing")
    await expect(row).to_contain_text("503 in")
    await row.get_by_role("link").click()
    await entry.locator("summary").first.click()
    await holder.button("Redeliver", entry).click()
    await expect(entry).to_contain_text("Delivered")
    await expect(entry.get_by_text(re.compile(r"Attempt \d: 200"))).to_be_visible()
    await holder.open("webhooks")
    await expect(row).to_contain_text("Active")


async def test_paused_webhook_is_resumed(holder: Visitor) -> None:
    page = holder.page
    await holder.create_webhook("/pauses")
    await holder.button("Pause").click()
    await expect(page.locator("main").get_by_role("status").filter(has_text="This webhook is paused.")).to_be_visible()
    await holder.button("Resume").click()
    await expect(holder.button("Pause")).to_be_visible()
    await holder.open("webhooks")
    await expect(page.get_by_role("row", name="/pauses")).to_contain_text("Active")
    await page.get_by_role("link", name="/pauses").click()
    await holder.button("Delete").click()
    await holder.button("Delete webhook", holder.dialog).click()
    await holder.heading("Webhooks").wait_for()
    await expect(page.get_by_role("link", name="/pauses")).to_have_count(0)


async def test_gas_policy_is_created_edited_and_paused(holder: Visitor) -> None:
    page = holder.page
    await holder.open("policies")
    await holder.button("Create policy").first.click()
    await holder.dialog.get_by_label("Name").fill("Monthly budget")
    await holder.dialog.get_by_label("Network").select_option("dev-mainnet")
    await holder.dialog.get_by_label("Total spend (USD)").fill("25")
    await holder.button("Create policy", holder.dialog).click()
    await holder.heading("Monthly budget").wait_for()
    await expect(page.locator("main")).to_contain_text("of $25")
    await holder.button("Edit").click()
    await holder.dialog.get_by_label("Total spend (USD)").fill("40")
    await holder.button("Save changes", holder.dialog).click()
    await expect(page.locator("main")).to_contain_text("of $40")
    await holder.button("Pause").click()
    await expect(page.locator("main").get_by_role("status").filter(has_text="This policy is paused.")).to_be_visible()
    point = holder.site.service.ready["entry_points"]["0.7"]
    body = {
        "chain": "dev",
        "policy_id": page.url.rpartition("/")[2],
        "user_operation": OPERATION,
        "entry_point": point,
    }
    assert (await holder.site.service.post("/gas/sponsor", body, key="growth")).status == 403
    await expect(page.get_by_role("table", name="Recent refusals")).to_contain_text("the policy is paused")


async def test_explorer_sends_a_request_and_shows_snippets(holder: Visitor) -> None:
    page = holder.page
    await holder.open("explorer")
    await holder.paste_key("test")
    await page.get_by_label("Network").select_option("ethereum/sepolia")
    await page.get_by_label("Method").fill("eth_getBalance")
    await page.get_by_label("Method").blur()
    await expect(page.get_by_label("Params")).to_have_value(re.compile("latest"))
    await holder.button("Send").click()
    reply = page.get_by_role("region", name="Reply")
    await expect(reply.get_by_role("region", name="Body")).to_contain_text('"result": "eth_getBalance"')
    await expect(reply).to_contain_text("Compute units")
    for language, word in (("curl", "curl -X POST"), ("Python", "import requests"), ("viem", "createPublicClient")):
        await holder.button(language).click()
        snippet = page.get_by_role("region", name="Snippet")
        await expect(snippet).to_contain_text(word)
        await expect(snippet).not_to_contain_text("svc_test_")


async def test_explorer_sends_as_a_key_of_the_session(holder: Visitor) -> None:
    page = holder.page
    await holder.open("explorer")
    await expect(page.get_by_label("API key")).to_be_hidden()
    await page.get_by_label("Send as").select_option("dev live (live)")
    await page.get_by_label("Network").select_option("dev/mainnet")
    async with page.expect_request("**/v1/rpc/dev/mainnet") as sent:
        await holder.button("Send").click()
    await expect(page.get_by_role("region", name="Body")).to_contain_text('"result": "0x')
    assert not (await (await sent.value).all_headers())["x-api-key"].startswith("svc_")


async def test_explorer_sends_as_a_key_that_may_call_methods(fresh_holder: Visitor) -> None:
    page = fresh_holder.page
    await fresh_holder.open("keys")
    # The page's own module knows the session's CSRF token.
    create = """async (key) => {
        const script = document.querySelector("script[type=module][src]").src;
        await (await import(script.replace("page.js", "api.js"))).account.post("/keys", key);
    }"""
    await page.evaluate(create, {"name": "reader", "mode": "live", "scopes": ["rpc:read"]})
    await page.evaluate(create, {"name": "hooks", "mode": "live", "scopes": ["webhooks:manage"]})
    await fresh_holder.open("explorer")
    await expect(page.get_by_label("Send as").locator("option:checked")).to_have_text("reader (live)")


async def test_explorer_sends_routes_of_chains_with_a_rest_api(holder: Visitor) -> None:
    page = holder.page
    await holder.open("explorer")
    await page.get_by_label("Send as").select_option("dev live (live)")
    await page.get_by_label("Network").select_option("ethereum-beacon/mainnet")
    method, params = page.get_by_label("Method or route"), page.get_by_label("Params")
    await expect(method).to_have_value("GET /eth/v1/beacon/headers/{id}")
    await expect(params).to_have_value(re.compile('"id": "head"'))
    async with page.expect_request("**/v1/rest/ethereum-beacon/mainnet/eth/v1/beacon/headers/head"):
        await holder.button("Send").click()
    await expect(page.get_by_role("region", name="Body")).to_contain_text('"canonical": true')
    await params.fill(
        '{"path": {"id": "5"}, "query": {"a": ["1", "2"]}, "headers": {"eth-consensus-version": "deneb"}}'
    )
    snippet = page.get_by_role("region", name="Snippet")
    await expect(snippet).to_contain_text("/eth/v1/beacon/headers/5?a=1&a=2")
    await expect(snippet).to_contain_text("-H 'eth-consensus-version: deneb'")
    await params.fill("{}")
    await holder.button("Send").click()
    await expect(page.get_by_text("Enter the value of {id} in the params")).to_be_visible()


async def test_explorer_offers_what_the_key_may_do(holder: Visitor) -> None:
    page = holder.page
    await holder.create_key("only prices", methods="eth_gasPrice\neth_feeHistory", networks="ethereum/sepolia")
    await holder.open("explorer")
    networks = page.get_by_label("Network").locator("option")
    await page.get_by_label("Send as").select_option("Another key…")
    assert await networks.count() > 1
    await page.get_by_label("Send as").select_option("only prices (test)")
    await expect(page.get_by_text("This key is limited: only on ethereum/sepolia; only eth_gasPrice")).to_be_visible()
    await expect(networks).to_have_text([re.compile("ethereum/sepolia")])
    offered = page.locator("datalist option")
    assert sorted(await offered.evaluate_all("all => all.map((each) => each.value)")) == [
        "eth_feeHistory",
        "eth_gasPrice",
    ]
    await holder.button("Send").click()
    await expect(page.get_by_role("region", name="Body")).to_contain_text('"result"')


async def test_cordoned_upstream_gets_no_calls(operator: Visitor) -> None:
    page, (one, other) = operator.page, operator.site.upstreams
    await page.goto(f"{operator.site.url}#/operator/upstreams")
    card = page.locator('[data-network="ethereum/sepolia"]')
    await expect(card.get_by_role("row")).to_have_count(3)

    addresses = itertools.count()

    async def calls(many: int) -> tuple[int, int]:
        """Send distinct calls, which no cache can answer, and return how many each upstream got."""
        before = one.calls, other.calls
        for _ in range(many):
            params = [f"0x{next(addresses):040x}", "latest"]
            reply = await operator.site.service.rpc("eth_getBalance", params, key="test", network="ethereum/sepolia")
            assert reply.status == 200
        return one.calls - before[0], other.calls - before[1]

    row = card.locator("tbody tr").first
    await row.get_by_role("button", name="Cordon").click()
    await operator.dialog.get_by_label("Reason").fill("planned maintenance")
    await operator.button("Cordon", operator.dialog).click()
    await expect(row).to_contain_text("planned maintenance")

    async def has_moved() -> bool:
        return (await calls(8))[0] == 0

    await until(has_moved)
    assert (await calls(20)) == (0, 20)
    changes = page.get_by_role("table", name="State changes")
    await expect(changes.locator("tbody tr").filter(has_text="ethereum/sepolia").first).to_contain_text("Cordoned")
    await row.get_by_role("button", name="Uncordon").click()
    await expect(row).to_contain_text("Up")

    async def is_back() -> bool:
        return (await calls(8))[0] > 0

    await until(is_back)


async def test_upstream_on_trial_is_promoted_and_withdrawn(operator: Visitor) -> None:
    page, service = operator.page, operator.site.service
    for number in range(30):
        params = [f"0x{number:040x}", "latest"]
        reply = await service.rpc("eth_getBalance", params, key="test", network="ethereum/hoodi")
        assert reply.status == 200
    await page.goto(f"{operator.site.url}#/operator/upstreams")
    trial = page.locator('[data-trial="ethereum/hoodi#new"]')
    await expect(trial).to_contain_text("Too few reads to tell: 30 of 1,000, 0 different.")
    await operator.button("Promote ethereum/hoodi#new", trial).click()
    await expect(operator.dialog).to_contain_text("does not say that this is safe: too few reads to tell")
    await operator.button("Promote anyway", operator.dialog).click()
    await expect(trial).to_contain_text("of calls")
    await operator.button("Withdraw ethereum/hoodi#new", trial).click()
    await expect(operator.button("Promote ethereum/hoodi#new", trial)).to_be_visible()
    shown = await service.cli_json("audit", "list")
    changes = [(each["action"], each["after"]) for each in shown if each["subject"] == "ethereum/hoodi#new"]
    assert ("admin_promote", {"share": 0.01}) in changes
    assert ("admin_withdraw", {"share": 0.0}) in changes


async def test_cordon_of_the_last_upstream_asks_first(operator: Visitor) -> None:
    page = operator.page
    await page.goto(f"{operator.site.url}#/operator/upstreams")
    row = page.locator('[data-network="dev/testnet"] tbody tr').first
    await expect(row).to_contain_text("127.0.0.1")
    await row.get_by_role("button", name="Cordon").click()
    await expect(operator.dialog.get_by_role("alert")).to_contain_text("last upstream of dev/testnet")
    await operator.button("Cordon the last upstream", operator.dialog).click()
    await expect(row).to_contain_text("Cordoned")
    await row.get_by_role("button", name="Uncordon").click()
    await expect(row).to_contain_text("Up")


async def test_operator_finds_failed_requests_by_account_key_and_upstream(operator: Visitor) -> None:
    page, service = operator.page, operator.site.service
    account = await service.new_account()
    key = await service.new_key(account["id"], "--mode", "test", "--name", "the culprit")
    await service.rpc("eth_noSuchMethod", key=key["key"], network="ethereum/sepolia")
    one, other = operator.site.upstreams
    one.act = other.act = refuse
    try:  # an unknown method asks no upstream
        await service.rpc("eth_feeHistory", ["0x3", "latest", [7]], key=key["key"], network="ethereum/sepolia")
    finally:
        one.act = other.act = echo
    rows = page.get_by_role("table", name="Requests").locator("tbody tr")
    await operator.open("operator/requests?reason=failed")

    async def is_listed() -> bool:
        await page.reload()
        await operator.heading("Requests").wait_for()  # with its table
        culprits = rows.filter(has_text="the culprit")
        return all(
            [await culprits.filter(has_text=text).count() > 0 for text in ("eth_noSuchMethod", "eth_feeHistory")]
        )

    await until(is_listed)
    await page.get_by_label("Account").select_option(account["id"])
    await expect(rows.filter(has_not_text="the culprit")).to_have_count(0)
    await expect(rows.first).to_contain_text(account["name"])
    await page.get_by_label("Key", exact=True).select_option(label="the culprit")
    await page.get_by_label("Method", exact=True).select_option("other")
    await expect(rows).to_have_count(1)
    await page.get_by_label("Account").select_option("")
    await expect(page.get_by_label("Key", exact=True)).to_have_value("")
    await page.get_by_label("Method", exact=True).select_option("eth_feeHistory")
    culprit = rows.filter(has_text="the culprit")
    asked = (await culprit.get_by_text("ethereum/sepolia#").inner_text()).split()[0]
    await page.get_by_label("Upstream", exact=True).select_option(asked)
    await expect(page).to_have_url(re.compile("upstream=ethereum"))
    await expect(rows.filter(has_not_text=asked)).to_have_count(0)
    await expect(culprit).to_have_count(1)


async def test_history_of_an_upstream_is_drawn(operator: Visitor) -> None:
    page = operator.page
    await page.goto(f"{operator.site.url}#/operator/upstreams")
    await page.locator('[data-network="ethereum/sepolia"] tbody tr').first.get_by_role("link").click()
    await page.locator("main h1").filter(has_text="ethereum/sepolia").wait_for()
    for chart in ("Latency: p50", "Error rate: failed", "Lag: behind", "Circuit breaker: not closed"):
        await expect(page.get_by_role("img", name=chart).locator("canvas")).to_be_visible()
    await operator.button("3 h").click()
    await expect(page).to_have_url(re.compile("range=3h"))


async def test_operator_finds_an_account_by_its_key_and_by_name(operator: Visitor) -> None:
    page, service = operator.page, operator.site.service
    account = await service.new_account()
    key = await service.cli_json("keys", "create", "--account", account["id"])
    await operator.open("operator/accounts")
    await page.get_by_label("Search").fill(key["id"])
    await expect(page.get_by_role("table", name="Accounts").locator("tbody tr")).to_have_count(1)
    await expect(page.locator(f'[data-id="{account["id"]}"]')).to_be_visible()
    await service.rpc("eth_chainId", key="growth", network="ethereum/sepolia")
    await operator.open("operator/usage?range=live")
    await expect(page.get_by_role("table", name="Usage by account")).to_contain_text("Development (growth)")


async def test_operator_creates_an_account_whose_holder_signs_in_by_link(operator: Visitor) -> None:
    page = operator.page
    await operator.open("operator/accounts")
    await operator.button("Create account").click()
    await operator.dialog.get_by_label("Name").fill("Newcomer")
    await operator.dialog.get_by_label("Email").fill("newcomer@example.com")
    await operator.button("Create account", operator.dialog).click()
    row = page.get_by_role("row", name="Newcomer")
    await row.get_by_role("button", name="Sign-in link").click()
    link = operator.dialog.get_by_label("Sign-in link", exact=True)
    await link.wait_for()
    url = await link.inner_text()
    assert "#token=" in url
    await page.keyboard.press("Escape")
    await page.keyboard.press("Escape")
    assert await link.is_visible(), "the link is shown once: only Done closes it"
    await operator.button("Done", operator.dialog).click()
    other = await page.context.browser.new_context() if page.context.browser else page.context
    holder = Visitor(operator.site, await other.new_page())
    await holder.page.goto(url)
    await holder.page.get_by_label("New password").fill("a password of some length")
    await holder.button("Sign in").click()
    await holder.heading("Overview").wait_for()
    assert "token" not in holder.page.url
    holder.assert_no_faults()
    await other.close()


async def test_operator_sees_the_fleet(operator: Visitor) -> None:
    await operator.open("operator/fleet")
    hosts = operator.page.get_by_role("table", name="Hosts").locator("tbody tr")
    await expect(hosts).to_have_count(1)
    await expect(hosts).to_contain_text("gateway")
    processes = operator.page.get_by_role("table", name="Processes")
    await expect(processes.locator("tbody tr").first).to_be_visible()
    # The two workers report their connections.
    connections = processes.locator("tbody [data-label='Connections']").filter(has_text=re.compile(r"^\d+$"))
    await expect(connections).to_have_count(2)


async def test_operator_sees_backfills(operator: Visitor) -> None:
    url = orjson.loads((operator.site.service.data / "running.json").read_bytes())["database"]["url"]
    progress = BackfillProgress(last=999, total=1000, done=450, block=449, transfers=9_000, calls=12)
    shown = BackfillReport("ethereum/mainnet", progress, time.monotonic() - 10)
    async with pooled(url) as pool:
        reports = ProcessReports(FleetStore(pool), "backfill", backfills=lambda: [shown.values()])
        tasks = Tasks()
        tasks.start("process report", reports.run)
        await operator.open("operator/fleet")
        row = operator.page.get_by_role("table", name="Processes").get_by_role("row", name="Backfill")
        await expect(row).to_contain_text("ethereum/mainnet: back-fill 45 %")
        await expect(row).to_contain_text("transfers/s, 1 min left")
        await tasks.close()
        await reports.close()


async def test_operator_sees_followers(operator: Visitor) -> None:
    await operator.open("operator/queues")
    await expect(operator.page.get_by_role("row", name="dev/mainnet")).to_contain_text("Following")
    await operator.open("operator/usage")
    await expect(operator.page.get_by_role("img", name="Requests: requests")).to_be_visible()


async def test_address_shows_its_transfers_balances_and_nfts(holder: Visitor) -> None:
    page, service = holder.page, holder.site.service
    head = int((await (await service.rpc("eth_blockNumber", key="growth")).json())["result"], 16)

    async def indexed() -> list[dict[str, Any]]:
        status, reply = await service.send("GET", f"/transfers/dev-mainnet/{ALICE.address}?limit=100", key="growth")
        return list(reply["transfers"]) if status == 200 and reply["block_number"] >= head else []

    found = await until(indexed)
    # Pages of five, so that there are several.
    await page.route(
        "**/v1/transfers/**limit=25*",
        lambda route: route.continue_(url=route.request.url.replace("limit=25", "limit=5")),
    )
    await page.get_by_role("link", name="Addresses").click()
    await holder.heading("Addresses").wait_for()
    await page.get_by_label("Network").select_option("dev-mainnet")
    await page.get_by_label("Address", exact=True).fill(ALICE.address)
    await holder.button("Show").click()
    table = page.get_by_role("table", name="Transfers", exact=True)
    await expect(table.locator("tbody tr")).to_have_count(5)
    await expect(table.locator("tbody tr").first).to_contain_text(found[0]["tx_hash"][-6:])
    await expect(page.get_by_role("table", name="Balances")).to_contain_text("DUSD")
    await expect(page.get_by_role("table", name="NFTs")).to_contain_text("Penstock Items")
    pages = page.get_by_role("navigation", name="Pagination").first
    await holder.button("Next", pages).click()
    await expect(table.locator("tbody tr").first).to_contain_text(found[5]["tx_hash"][-6:])
    await holder.button("Previous", pages).click()
    await expect(table.locator("tbody tr").first).to_contain_text(found[0]["tx_hash"][-6:])

    # Filters are in the address of the page, and apply to the file.
    await page.get_by_label("Category").select_option("erc1155")
    await holder.button("In").click()
    wanted = [each for each in found if each["category"] == "erc1155" and each["direction"] == "in"]
    await expect(table.locator("tbody tr")).to_have_count(len(wanted))
    await page.reload()
    await expect(table.locator("tbody tr")).to_have_count(len(wanted))
    async with page.expect_download() as download:
        await holder.button("Export CSV").click()
    rows = [*csv.DictReader((await (await download.value).path()).read_text("utf-8").splitlines())]
    assert [each["tx_hash"] for each in rows] == [each["tx_hash"] for each in wanted]
    assert {each["to"] for each in rows} == {ALICE.address}
    await page.get_by_label("Token contract").fill("nonsense")
    await page.get_by_label("Token contract").blur()
    await expect(page.get_by_role("alert")).to_contain_text("contract")

    # The other address of a transfer has a page too.
    await page.get_by_label("Token contract").fill("")
    await page.get_by_label("Token contract").blur()
    await holder.button("All").click()
    await page.get_by_label("Category").select_option("")
    other = next(each for each in found if each["direction"] == "out")["to"]
    await table.get_by_role("link").filter(has_text=other[-6:]).first.click()
    await expect(page.get_by_label("Address", exact=True)).to_have_value(other)


async def test_address_page_needs_a_key_that_may_read_data(fresh_holder: Visitor) -> None:
    await fresh_holder.open(f"addresses/dev-mainnet/{ALICE.address}")
    await expect(fresh_holder.page.get_by_text("No key can read this")).to_be_visible()
    await fresh_holder.open("addresses/nowhere/0x1")
    await expect(fresh_holder.page.get_by_text("Network not found")).to_be_visible()


async def test_account_is_exported_without_secrets(fresh_holder: Visitor) -> None:
    key = await fresh_holder.create_key("Exported key")
    await fresh_holder.open("account/data")
    async with fresh_holder.page.expect_download() as download:
        await fresh_holder.button("Export").click()
    text = (await (await download.value).path()).read_text("utf-8")
    found = orjson.loads(text)
    assert [each["name"] for each in found["keys"]] == ["Exported key"]
    done = {each["action"] for each in found["actions"]}
    assert done == {"admin_create_account", "admin_make_link", "account_redeem_link", "create_key"}
    assert key not in text


async def test_alerts_are_sent_to_a_webhook_and_listed(fresh_holder: Visitor) -> None:
    page, receiver = fresh_holder.page, fresh_holder.site.receiver
    await fresh_holder.open("alerts")
    await page.get_by_label("Requests of the day").check()
    await page.get_by_label("Webhook URL").fill(f"{receiver.url}/alerts")
    await fresh_holder.button("Save").click()
    await expect(fresh_holder.dialog.get_by_label("Signing secret")).to_contain_text("whsec_")
    await fresh_holder.button("Done").click()
    await fresh_holder.button("Send a test alert").click()
    row = page.get_by_role("row", name="This is a test alert")
    await expect(row).to_be_visible()
    await until(lambda: any(event.get("event_type") == "alert" and event["test"] for event in receiver.events))
    await fresh_holder.open("overview")
    await fresh_holder.open("alerts")
    await expect(page.get_by_label("Requests of the day")).to_be_checked()
    await expect(row).to_contain_text("Delivered")


async def test_announcement_is_shown_until_it_is_dismissed(operator: Visitor) -> None:
    page, text = operator.page, "Maintenance <b>on Sunday</b>"
    await operator.open("operator/announcements")
    await operator.button("Announce").click()
    await operator.dialog.get_by_label("Notice").fill(text)
    await operator.dialog.get_by_label("Level").select_option("warning")
    await operator.button("Announce", operator.dialog).click()
    await expect(page.get_by_role("row", name=text)).to_be_visible()
    await operator.open("overview")
    await page.reload()
    bar = page.get_by_role("complementary", name="Announcements")
    await expect(bar).to_contain_text(text)
    await operator.button("Dismiss", bar).click()
    await expect(page.get_by_text(text)).to_have_count(0)
    await page.reload()
    await page.locator("main h1").wait_for()
    await expect(page.get_by_text(text)).to_have_count(0)
    await operator.open("operator/announcements")
    await page.get_by_role("button", name=f"Delete {text}").click()
    await operator.button("Delete announcement", operator.dialog).click()
    await expect(page.get_by_text("No announcements")).to_be_visible()


async def test_methods_are_shown_with_their_calls_and_errors(operator: Visitor) -> None:
    page, service = operator.page, operator.site.service
    url = f"{service.base}/rpc/ethereum/sepolia"
    call = '{"jsonrpc":"2.0","id":1,"method":"eth_gasPrice","params":[]}'
    # A reply from the cache has no upstream, and other tests make this call too.
    headers = ["-H", f"X-API-Key: {service.keys['test']}", "-H", "X-Explain: 1", "-H", "Cache-Control: no-cache"]
    await asyncio.to_thread(
        subprocess.run,
        ["curl", "-sSf", url, *headers, "--json", call],
        check=True,
        capture_output=True,
    )
    row = page.get_by_role("table", name="Methods of ethereum/sepolia").get_by_role("row", name="eth_gasPrice")

    async def is_shown() -> bool:
        await page.reload()
        await operator.heading("Methods").wait_for()  # with its tables
        return await row.is_visible()

    await operator.open("operator/methods")
    await until(is_shown)
    await expect(row).to_contain_text("0 (0%)")


async def test_operators_overview_has_the_figures_of_the_other_pages(operator: Visitor) -> None:
    page, service = operator.page, operator.site.service
    await service.rpc("eth_gasPrice", key="test", network="ethereum/sepolia")
    await operator.open("operator")
    await operator.heading("Overview").wait_for()
    requests = page.locator(".tile").filter(has_text="Requests").locator(".figure")
    await expect(requests).not_to_have_text("0")
    for tile in ("Callers' errors", "Upstreams' failures", "Our failures"):
        await expect(page.locator(".tile").filter(has_text=tile)).to_have_count(1)
    await expect(page.get_by_role("table", name="Largest customers")).to_contain_text("Development (growth)")
    await expect(page.get_by_role("row", name="ethereum/sepolia").first).to_contain_text("2 of 2")
    await expect(page.get_by_role("table", name="Followers")).to_contain_text("dev/mainnet")
    await expect(page.get_by_role("table", name="Latest changes").locator("tbody tr").first).to_be_visible()
    await requests.get_by_role("link").click()
    await operator.heading("Usage").wait_for()


async def test_operator_reads_who_changed_what(operator: Visitor) -> None:
    page = operator.page
    await operator.open("operator/accounts")
    await operator.button("Create account").click()
    await operator.dialog.get_by_label("Name").fill("Audited <i>Labs</i>")
    await operator.dialog.get_by_label("Email").fill("audited@example.com")
    await operator.button("Create account", operator.dialog).click()
    row = page.get_by_role("row", name="Audited <i>Labs</i>")
    await row.get_by_role("button", name="Edit").click()
    await operator.dialog.get_by_label("Plan").select_option("growth")
    await operator.button("Save changes", operator.dialog).click()
    await expect(operator.dialog).to_have_count(0)
    await operator.open("operator/audit")
    entry = page.get_by_role("table", name="Audit log").get_by_role("row").filter(has_text="Audited <i>Labs</i>").first
    await expect(entry).to_contain_text("Changed the account")
    await expect(entry).to_contain_text("Plan: free → growth")
    await operator.button("Audited <i>Labs</i>", entry).click()
    rows = page.get_by_role("table", name="Audit log").locator("tbody tr")
    await expect(rows).to_have_count(2)
    await expect(rows.last).to_contain_text("Created the account")
    await page.get_by_label("By", exact=True).select_option("key")
    await expect(page.get_by_text("No entries")).to_be_visible()
    await operator.button("Remove filter account").click()


async def test_alerts_are_sent_in_the_format_of_slack(fresh_holder: Visitor) -> None:
    page, receiver = fresh_holder.page, fresh_holder.site.receiver
    await fresh_holder.open("alerts")
    await fresh_holder.button("Send a test alert").click()
    await expect(page.get_by_text("Webhook URL (webhook_url)")).to_be_visible()
    await expect(page.get_by_label("PagerDuty integration key")).to_be_hidden()
    await page.get_by_label("Slack", exact=True).check()
    await page.get_by_label("Webhook URL").fill(f"{receiver.url}/slack")
    await fresh_holder.button("Save").click()
    await expect(page.get_by_text("Alerts saved")).to_be_visible()
    await fresh_holder.button("Send a test alert").click()
    await until(lambda: any(event.get("text") == "Penstock: This is a test alert" for event in receiver.events))
    await page.get_by_label("PagerDuty", exact=True).check()
    await fresh_holder.button("Save").click()
    alert = page.get_by_role("alert")
    await expect(alert).to_contain_text("PagerDuty integration key: is required")
    await expect(page.get_by_label("PagerDuty integration key")).to_have_attribute("aria-invalid", "true")
    await page.get_by_label("PagerDuty integration key").fill("0123456789abcdef0123456789abcdef")
    await fresh_holder.button("Save").click()
    await expect(alert).to_have_count(0)
    await expect(page.get_by_label("PagerDuty", exact=True)).to_be_checked()


async def test_form_shows_all_errors_with_the_labels_of_its_fields(holder: Visitor) -> None:
    await holder.open("keys")
    await holder.button("Create key").first.click()
    await holder.dialog.get_by_label("Name").fill("wrong in two places")
    await holder.dialog.get_by_text("Limits and restrictions").click()
    await holder.dialog.get_by_label("Allowed IP addresses").fill("x" * 60)
    await holder.dialog.get_by_label("Networks").fill("y" * 90)
    await holder.button("Create key", holder.dialog).click()
    problems = holder.dialog.get_by_role("alert").get_by_role("listitem")
    await expect(problems).to_have_count(2)
    await expect(problems.filter(has_text="Allowed IP addresses: ")).to_have_count(1)
    await expect(problems.filter(has_text="Networks: ")).to_have_count(1)
    for label in ("Allowed IP addresses", "Networks"):
        await expect(holder.dialog.get_by_label(label)).to_have_attribute("aria-invalid", "true")
    await holder.button("Cancel", holder.dialog).click()


async def test_budget_is_shown_with_its_forecast_and_changed(operator: Visitor) -> None:
    page, service, name = operator.page, operator.site.service, "ethereum/hoodi#new"
    await operator.open("operator/costs")
    row = page.get_by_role("table", name="Budgets of upstreams").get_by_role("row", name=name)
    await expect(row).to_contain_text("of 1,000,000")
    await expect(row).to_contain_text("Not in this period")
    await row.get_by_role("button", name=f"Change the budget {name}").click()
    field = operator.dialog.get_by_label("Credits per month")
    await expect(field).to_have_value("1000000")
    await field.fill("0")
    await operator.button("Set budget", operator.dialog).click()
    await field.fill("2000")
    await operator.button("Set budget", operator.dialog).click()
    await expect(row).to_contain_text("of 2,000")
    await expect(row).to_contain_text("set by")
    listed = await service.cli_json("cost", "--budgets")
    assert [(each["credits"], each["set_by"]) for each in listed if each["name"] == name] == [(2000, "development")]
    assert (await service.cli_json("upstreams", "budget", name, "--reset"))["credits"] == 1_000_000
    shown = await service.cli_json("audit", "list")
    changes = [each["after"] for each in shown if (each["action"], each["subject"]) == ("admin_set_budget", name)]
    assert {"credits": 2000} in changes
    assert {"credits": 1_000_000} in changes


async def test_costs_are_shown_beside_units_and_margins(operator: Visitor) -> None:
    page, service = operator.page, operator.site.service
    today, account = datetime.datetime.now(datetime.UTC).date(), (await service.cli_json("accounts", "list"))[0]
    running = orjson.loads((service.data / "running.json").read_bytes())
    pool = Pool(running["database"]["url"], size=1, acquire_timeout_s=5.0)
    await pool.open()
    spent = {("dev/mainnet#dear", "dev/mainnet", ("eth_call", account["id"], "key_1")): Spent(1200, 31_200, 12_480_000)}
    await SpendingStore(pool).write("costs", 1, today, spent)
    await pool.close()
    await operator.open("operator/costs")
    await operator.heading("Costs").wait_for()
    # Upstreams with a budget, of the tests before, have costs too.
    await expect(page.locator(".tile").filter(has_text="Cost").first).to_contain_text(re.compile(r"[1-9],\d{3} calls"))
    dear = page.get_by_role("table", name="Upstreams by cost").get_by_role("row", name="dev/mainnet#dear")
    await expect(dear).to_contain_text("1,200")
    await expect(dear).to_contain_text("31,200")
    methods, accounts = (page.get_by_role("table", name=name) for name in ("Methods by cost", "Accounts by cost"))
    await expect(methods.get_by_role("row", name="eth_call")).to_contain_text("$0.012")
    await expect(accounts).to_contain_text(account["name"])
    await accounts.get_by_role("link").first.click()
    await operator.heading("Usage").wait_for()
