"""What people come for, from the first click to the last, in a real browser."""

from __future__ import annotations

import asyncio
import itertools
import re
import subprocess

import orjson
from playwright.async_api import expect

from tests.browser.visitor import WAIT_MS, Visitor
from tests.service import until

expect.set_options(timeout=WAIT_MS)
# Nobody's, but in order.
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


def curl(url: str, key: str, method: str) -> dict[str, object]:
    """As a person would: the program, not a library."""
    call = f'{{"jsonrpc":"2.0","id":1,"method":"{method}","params":[]}}'
    words = ["curl", "-sS", url, "-H", f"X-API-Key: {key}", "-H", "Content-Type: application/json", "-d", call]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    return dict(orjson.loads(done.stdout))


async def test_a_new_key_is_used_with_curl_and_its_request_shows_in_the_chart(holder: Visitor) -> None:
    page = holder.page
    key = await holder.make_key("made in the browser")
    url = f"{holder.site.service.base}/rpc/ethereum/sepolia"
    assert (await asyncio.to_thread(curl, url, key, "eth_accounts"))["error"]
    assert (await asyncio.to_thread(curl, url, key, "eth_gasPrice"))["result"] == "eth_gasPrice"

    await expect(page.get_by_role("row", name="made in the browser")).to_contain_text("Active")
    await holder.open("overview")
    await holder.button("30 min").click()
    await holder.button("Method").click()
    await expect(page.get_by_role("row", name="eth_gasPrice")).to_be_visible()
    await holder.button("eth_gasPrice").click()  # from now on only this
    chart = page.get_by_role("img", name="Requests: requests")
    await expect(chart).to_have_attribute("aria-label", "Requests: requests 1, errors 0")
    # What is taken along is what is shown.
    taken = page.get_by_role("link", name="Export CSV")
    await expect(taken).to_have_attribute("href", re.compile("[?&]method=eth_gasPrice(&|$)"))
    await expect(chart.locator("canvas")).to_be_visible()
    await holder.button("Key").click()
    await expect(page.get_by_role("row", name="made in the browser")).to_contain_text("1")


async def test_chart_follows_what_happens_without_a_reload(holder: Visitor) -> None:
    await holder.button("30 min").click()
    await holder.button("Method").click()
    await holder.site.service.rpc("net_version", key="test", network="ethereum/sepolia")
    await expect(holder.page.get_by_role("row", name="net_version")).to_be_visible()


async def test_key_is_rotated_with_an_overlap_and_revoked(holder: Visitor) -> None:
    page, post = holder.page, holder.site.service.rpc
    old = await holder.make_key("to be rotated")
    await holder.button("Rotate", page.get_by_role("row", name="to be rotated")).click()
    await holder.dialog.get_by_label("The old key ends").select_option("3600")
    await holder.button("Rotate", holder.dialog).click()
    shown = holder.dialog.get_by_label("The key", exact=True)
    await shown.wait_for()
    new = await shown.inner_text()
    await holder.button("I have it").click()
    for key in (old, new):
        assert (await post("eth_chainId", key=key, network="ethereum/sepolia")).status == 200

    row = page.get_by_role("row", name="to be rotated").filter(has_text="Expiring")
    await holder.button("Revoke", row).click()
    await holder.button("Revoke", holder.dialog).click()
    await expect(page.get_by_role("row", name="to be rotated").filter(has_text="Revoked")).to_be_visible()

    async def refused() -> bool:
        return (await post("eth_chainId", key=old, network="ethereum/sepolia")).status == 401

    await until(refused)
    assert (await post("eth_chainId", key=new, network="ethereum/sepolia")).status == 200


async def test_test_event_is_seen_to_arrive(holder: Visitor) -> None:
    page, receiver = holder.page, holder.site.receiver
    await holder.make_webhook("/arrives")
    await holder.button("Send test event").click()
    await expect(page.get_by_role("status").filter(has_text="The test event arrived: 200")).to_be_visible()
    sent = next(event for event in receiver.events if event["id"].startswith("evt_test_"))
    entry = page.locator(f'[data-event="{sent["id"]}"]')
    await expect(entry).to_contain_text("Delivered")
    await entry.locator("summary").click()
    await expect(entry.get_by_role("table", name="Attempts")).to_contain_text("200")


async def test_failed_delivery_shows_what_the_receiver_said_and_is_sent_again(holder: Visitor) -> None:
    page, receiver = holder.page, holder.site.receiver
    await holder.make_webhook("/fails")
    receiver.status, receiver.said = 503, "<b>overloaded</b>"
    try:
        await holder.button("Send test event").click()
        await expect(page.get_by_role("alert").filter(has_text="503")).to_be_visible()
    finally:
        receiver.status, receiver.said = 200, "thank you"
    entry = page.locator('[data-event^="evt_test_"]').first
    await entry.locator("summary").click()
    await expect(entry.get_by_role("table", name="Attempts")).to_contain_text("<b>overloaded</b>")
    await holder.button("Redeliver", entry).click()
    await expect(entry).to_contain_text("Delivered")


async def test_paused_webhook_is_resumed(holder: Visitor) -> None:
    page = holder.page
    await holder.make_webhook("/pauses")
    await holder.button("Pause").click()
    await expect(page.locator("main").get_by_role("status").filter(has_text="Paused.")).to_be_visible()
    await holder.button("Resume").click()
    await expect(holder.button("Pause")).to_be_visible()
    await holder.open("webhooks")
    await expect(page.get_by_role("row", name="/pauses")).to_contain_text("Active")
    await page.get_by_role("link", name="/pauses").click()
    await holder.button("Delete").click()
    await holder.button("Delete", holder.dialog).click()
    await holder.heading("Webhooks").wait_for()
    await expect(page.get_by_role("link", name="/pauses")).to_have_count(0)


async def test_gas_policy_is_made_changed_and_paused(holder: Visitor) -> None:
    page = holder.page
    await holder.open("policies")
    await holder.button("Create policy").first.click()
    await holder.dialog.get_by_label("Name").fill("Lunch money")
    await holder.dialog.get_by_label("Chain").select_option("dev-mainnet")
    await holder.dialog.get_by_label("Whole policy, US dollars").fill("25")
    await holder.button("Create policy", holder.dialog).click()
    await holder.heading("Lunch money").wait_for()
    await expect(page.locator("main")).to_contain_text("of $25")
    await holder.button("Edit limits").click()
    await holder.dialog.get_by_label("Whole policy, US dollars").fill("40")
    await holder.button("Save", holder.dialog).click()
    await expect(page.locator("main")).to_contain_text("of $40")
    await holder.button("Pause").click()
    await expect(
        page.locator("main").get_by_role("status").filter(has_text="Paused: nothing is sponsored")
    ).to_be_visible()
    body = {"chain": "dev", "policy_id": page.url.rpartition("/")[2], "user_operation": OPERATION}
    assert (await holder.site.service.post("/gas/sponsor", body, key="growth")).status == 403
    await expect(page.get_by_role("table", name="Last refusals")).to_contain_text("the policy is paused")


async def test_method_is_tried_in_the_explorer(holder: Visitor) -> None:
    page = holder.page
    await holder.open("explorer")
    await page.get_by_label("API key").fill(holder.site.service.keys["test"])
    await page.get_by_label("Network").select_option("ethereum/sepolia")
    await page.get_by_label("Method").fill("eth_getBalance")
    await page.get_by_label("Method").blur()
    await expect(page.get_by_label("Params")).to_have_value(re.compile("latest"))
    await holder.button("Send").click()
    reply = page.get_by_role("region", name="Reply")
    await expect(reply.get_by_role("region", name="Body")).to_contain_text('"result": "eth_getBalance"')
    await expect(reply).to_contain_text("Units")
    for language, word in (("curl", "curl -X POST"), ("Python", "import requests"), ("viem", "createPublicClient")):
        await holder.button(language).click()
        snippet = page.get_by_role("region", name="Snippet")
        await expect(snippet).to_contain_text(word)
        await expect(snippet).not_to_contain_text("svc_test_")


async def test_cordoned_upstream_takes_no_more_calls(operator: Visitor) -> None:
    page, (one, other) = operator.page, operator.site.upstreams
    card = page.locator('[data-network="ethereum/sepolia"]')
    await expect(card.get_by_role("row")).to_have_count(3)

    whose = itertools.count()

    async def calls(many: int) -> tuple[int, int]:
        """To each of the two; every call is a new one, which no cache answers."""
        before = one.calls, other.calls
        for _ in range(many):
            params = [f"0x{next(whose):040x}", "latest"]
            reply = await operator.site.service.rpc("eth_getBalance", params, key="test", network="ethereum/sepolia")
            assert reply.status == 200
        return one.calls - before[0], other.calls - before[1]

    row = card.locator("tbody tr").first
    await row.get_by_role("button", name="Cordon").click()
    await operator.dialog.get_by_label("Reason").fill("a walk in the park")
    await operator.button("Cordon", operator.dialog).click()
    await expect(row).to_contain_text("a walk in the park")

    async def has_moved() -> bool:
        return (await calls(8))[0] == 0

    await until(has_moved)
    assert (await calls(20)) == (0, 20)
    await row.get_by_role("button", name="Uncordon").click()
    await expect(row).to_contain_text("Up")

    async def is_back() -> bool:
        return (await calls(8))[0] > 0

    await until(is_back)


async def test_operator_makes_an_account_whose_holder_comes_in_by_a_link(operator: Visitor) -> None:
    page = operator.page
    await operator.open("operator/accounts")
    await operator.button("Create account").click()
    await operator.dialog.get_by_label("Name").fill("Newcomer")
    await operator.dialog.get_by_label("E-mail").fill("newcomer@example.com")
    await operator.button("Create account", operator.dialog).click()
    row = page.get_by_role("row", name="Newcomer")
    await row.get_by_role("button", name="Sign-in link").click()
    link = operator.dialog.get_by_label("The link")
    await link.wait_for()
    url = await link.inner_text()
    assert "#token=" in url
    other = await page.context.browser.new_context() if page.context.browser else page.context
    guest = Visitor(operator.site, await other.new_page())
    await guest.page.goto(url)
    await guest.page.get_by_label("New password").fill("a password of some length")
    await guest.button("Sign in").click()
    await guest.heading("Overview").wait_for()
    assert "token" not in guest.page.url
    guest.has_seen_no_fault()
    await other.close()


async def test_operator_sees_what_runs_beside_the_calls(operator: Visitor) -> None:
    await operator.open("operator/queues")
    await expect(operator.page.get_by_role("row", name="dev/mainnet")).to_contain_text("Following")
    await expect(operator.page.get_by_role("table", name="Workers").locator("tbody tr")).to_have_count(2)
    await operator.open("operator/usage")
    await expect(operator.page.get_by_role("img", name="Requests: requests")).to_be_visible()
