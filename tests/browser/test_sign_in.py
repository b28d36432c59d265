"""Signing in and out, request forgery, and isolation between accounts."""

from __future__ import annotations

import base64
import time
from typing import Any

from playwright.async_api import Browser, Page, expect

from proxy.core.one_time_codes import STEP_S, code_at
from tests.browser.visitor import WAIT_MS, Site, Visitor

expect.set_options(timeout=WAIT_MS)


async def test_wrong_password_shows_an_error_and_keeps_the_input(site: Site, page: Page) -> None:
    visitor = Visitor(site, page)
    await page.goto(site.url)
    await page.get_by_label("Email").fill("growth@example.com")
    await page.get_by_label("Password").fill("not the password")
    await visitor.button("Sign in").click()
    await expect(page.get_by_role("alert")).to_contain_text("the email address or the password is wrong")
    await expect(page.get_by_label("Email")).to_have_value("growth@example.com")
    visitor.assert_no_faults()


async def test_root_redirects_to_the_dashboard_and_sign_out_ends_the_session(site: Site, page: Page) -> None:
    visitor = Visitor(site, page)
    await page.goto(site.url.removesuffix("dashboard"))
    await page.get_by_label("Email", exact=True).wait_for()
    await visitor.sign_in()
    before = await page.context.cookies()
    # The session and the device.
    assert [(each["httpOnly"], each["sameSite"]) for each in before] == [(True, "Strict")] * 2
    assert await page.evaluate("document.cookie") == ""
    await visitor.button("Sign out").click()
    await page.get_by_label("Email", exact=True).wait_for()
    # A kept copy of the old cookie no longer works.
    kept: list[Any] = [*before]
    await page.context.add_cookies(kept)
    await page.reload()
    await page.get_by_label("Email", exact=True).wait_for()
    visitor.assert_no_faults()


async def test_expired_session_returns_to_the_same_view_after_sign_in(site: Site, page: Page) -> None:
    visitor = Visitor(site, page)
    await visitor.sign_in()
    await page.context.clear_cookies()
    await page.get_by_role("link", name="API keys").click()
    await expect(page.locator("#toasts")).to_contain_text("Your session expired")
    await page.get_by_label("Email").fill("growth@example.com")
    await page.get_by_label("Password").fill(site.credentials["password"])
    await visitor.button("Sign in").click()
    await visitor.heading("API keys").wait_for()
    visitor.assert_no_faults()


async def test_sign_out_clears_the_api_key_in_the_explorer(site: Site, page: Page) -> None:
    visitor = Visitor(site, page)
    await visitor.sign_in()
    await visitor.open("explorer")
    await visitor.paste_key("test")
    await visitor.button("Sign out").click()
    await page.get_by_label("Email").fill("free@example.com")
    await page.get_by_label("Password").fill(site.credentials["password"])
    await visitor.button("Sign in").click()
    await visitor.heading("Overview").wait_for()
    await page.get_by_role("link", name="Explorer", exact=True).click()
    await expect(page.get_by_label("API key")).to_have_value("")
    visitor.assert_no_faults()


async def test_used_link_does_not_end_an_existing_session(site: Site, page: Page) -> None:
    visitor = Visitor(site, page)
    await visitor.sign_in()
    await page.evaluate("location.hash = '#token=' + 'A'.repeat(43)")
    await visitor.button("Sign in").click()
    await expect(page.get_by_role("alert")).to_contain_text("this link has been used or has expired")
    await page.evaluate("location.hash = '#/keys'")
    await visitor.heading("API keys").wait_for()
    visitor.assert_no_faults()


async def test_link_works_once_and_is_removed_from_the_address_bar(site: Site, page: Page, browser: Browser) -> None:
    account = await site.service.new_account()
    made = await site.service.cli_json("accounts", "link", account["id"])
    visitor = Visitor(site, page)
    await page.goto(made["url"])
    await visitor.button("Sign in").click()
    await visitor.heading("Overview").wait_for()
    assert "token" not in await page.evaluate("location.href")
    assert not [request.url for request in visitor.requests if made["url"].partition("#token=")[2] in request.url]
    again = await browser.new_context()
    other = await again.new_page()
    await other.goto(made["url"])
    await other.get_by_role("button", name="Sign in", exact=True).click()
    await expect(other.get_by_role("alert")).to_contain_text("this link has been used or has expired")
    await again.close()
    visitor.assert_no_faults()


async def test_link_request_shows_the_same_reply_for_an_unknown_email(site: Site, page: Page) -> None:
    visitor = Visitor(site, page)
    await page.route("**/dashboard/options.json", lambda route: route.fulfill(json={"mail": True}))
    await page.goto(site.url)
    await visitor.button("Email me a sign-in link").click()
    await page.get_by_label("Email").fill("unknown@example.com")
    await visitor.button("Send link").click()
    await expect(page.get_by_role("status").filter(has_text="If unknown@example.com has an account")).to_be_visible()
    visitor.assert_no_faults()


async def test_sign_in_replaces_a_planted_session_cookie(site: Site, page: Page) -> None:
    visitor = Visitor(site, page)
    planted = "A" * 43
    root = site.url.removesuffix("/dashboard")
    await page.context.add_cookies([{"name": "penstock_session", "value": planted, "url": root}])
    await visitor.sign_in()
    found = {each["name"]: each["value"] for each in await page.context.cookies()}
    assert found["penstock_session"] != planted


async def test_page_of_another_origin_cannot_forge_requests(holder: Visitor) -> None:
    """Another port of the same host is same-site, so the browser sends the cookies. They must not be enough."""
    site = holder.site
    forged = f"{site.service.base}/account/keys"
    site.receiver.html = f"""<!doctype html><form method=post enctype=text/plain action="{forged}">
        <input name='{{"name":"forged","mode":"test","x":"' value='"}}'></form>"""
    before = await _keys(holder)
    other = await holder.page.context.new_page()
    await other.goto(site.receiver.url)
    async with other.expect_navigation() as navigation:
        await other.evaluate("document.forms[0].submit()")
    reply = await navigation.value
    assert reply is not None
    assert reply.status == 403
    await other.goto(site.receiver.url)
    attempts = """async (url) => {
        const body = JSON.stringify({ name: "forged", mode: "test" });
        const seen = [];
        await fetch(url, { method: "POST", mode: "no-cors", credentials: "include", body }).catch(() => seen.push("refused"));
        await fetch(url, { credentials: "include" }).then((reply) => seen.push(reply.status), () => seen.push("unreadable"));
        return seen;
    }"""
    assert "unreadable" in await other.evaluate(attempts, forged)
    await other.close()
    site.receiver.html = ""
    assert await _keys(holder) == before


async def _keys(visitor: Visitor) -> list[str]:
    found = await visitor.page.evaluate("fetch('/v1/account/keys').then((reply) => reply.json())")
    return sorted(key["id"] for key in found["keys"])


async def test_two_accounts_see_only_their_own_keys_and_webhooks(holder: Visitor, browser: Browser) -> None:
    name = "growth only"
    await holder.create_key(name)
    await holder.create_webhook("/growth-only")
    webhook_url = holder.page.url
    context = await browser.new_context()
    other = Visitor(holder.site, await context.new_page())
    await other.sign_in("free")
    await other.open("keys")
    await expect(other.page.get_by_role("row").nth(1)).to_be_visible()
    await expect(other.page.get_by_text(name)).to_have_count(0)
    await other.page.goto(webhook_url)
    await expect(other.page.get_by_role("alert")).to_contain_text("Not found")
    await context.close()


async def test_holder_turns_two_factor_sign_in_on_and_signs_in_with_a_code(site: Site, fresh_holder: Visitor) -> None:
    page, dialog = fresh_holder.page, fresh_holder.dialog
    await fresh_holder.open("account")
    account = (await page.locator("main dd code").first.inner_text()).strip()
    await fresh_holder.open("account/security")
    await fresh_holder.button("Set up").click()
    await expect(dialog.get_by_role("img", name="QR code for your authenticator app")).to_be_visible()
    secret = base64.b32decode(await dialog.get_by_label("Secret", exact=True).inner_text())
    step = int(time.time()) // STEP_S
    await dialog.get_by_label("Code", exact=True).fill(code_at(secret, step))
    await fresh_holder.button("Turn on").click()
    await expect(dialog.get_by_role("listitem")).to_have_count(10)
    await page.keyboard.press("Escape")
    await fresh_holder.button("I have saved them").click()
    await expect(fresh_holder.button("Turn off")).to_be_visible()

    await fresh_holder.button("Sign out").click()
    await page.get_by_label("Email", exact=True).wait_for()
    await page.goto((await site.service.cli_json("accounts", "link", account))["url"])
    await fresh_holder.button("Sign in").click()
    await expect(page.get_by_label("Code", exact=True)).to_be_focused()
    await page.get_by_label("Code", exact=True).fill(code_at(secret, step + 1))
    await fresh_holder.button("Sign in").click()
    await fresh_holder.heading("Overview").wait_for()


async def test_holder_ends_another_session(fresh_holder: Visitor, browser: Browser) -> None:
    page, service = fresh_holder.page, fresh_holder.site.service
    await fresh_holder.open("account")
    account = await page.locator(".id code").first.inner_text()
    other = await browser.new_page()
    await other.goto((await service.cli_json("accounts", "link", account))["url"])
    await other.get_by_role("button", name="Sign in", exact=True).click()
    await other.get_by_role("heading", name="Overview", exact=True).wait_for()
    await fresh_holder.open("account/security")
    rows = page.get_by_role("table", name="Sessions").locator("tbody tr")
    await expect(rows).to_have_count(2)
    await fresh_holder.button("Sign out", rows.filter(has_not_text="This session")).click()
    await expect(rows).to_have_count(1)
    await other.close()
