"""Coming in, going out, and those who should do neither."""

from __future__ import annotations

from playwright.async_api import Browser, Page, expect

from tests.browser.visitor import WAIT_MS, Site, Visitor

expect.set_options(timeout=WAIT_MS)


async def test_wrong_password_is_told_and_what_was_typed_stays(site: Site, page: Page) -> None:
    visitor = Visitor(site, page)
    await page.goto(site.url)
    await page.get_by_label("E-mail").fill("growth@example.com")
    await page.get_by_label("Password").fill("not the password")
    await visitor.button("Sign in").click()
    await expect(page.get_by_role("alert")).to_contain_text("the e-mail or the password is wrong")
    await expect(page.get_by_label("E-mail")).to_have_value("growth@example.com")
    visitor.has_seen_no_fault()


async def test_root_leads_to_the_dashboard_and_signing_out_leads_out(site: Site, page: Page) -> None:
    visitor = Visitor(site, page)
    await page.goto(site.url.removesuffix("dashboard"))
    await page.get_by_label("E-mail").wait_for()
    await visitor.sign_in()
    before = await page.context.cookies()
    assert [(each["httpOnly"], each["sameSite"]) for each in before] == [(True, "Strict")]
    assert await page.evaluate("document.cookie") == ""
    await visitor.button("Sign out").click()
    await page.get_by_label("E-mail").wait_for()
    # The cookie of before opens nothing any more, even for somebody who kept it.
    await page.context.add_cookies(before)
    await page.reload()
    await page.get_by_label("E-mail").wait_for()
    visitor.has_seen_no_fault()


async def test_session_that_ended_elsewhere_leads_to_the_door_and_back_again(site: Site, page: Page) -> None:
    visitor = Visitor(site, page)
    await visitor.sign_in()
    await page.context.clear_cookies()
    await page.get_by_role("link", name="API keys").click()
    await expect(page.locator("#toasts")).to_contain_text("sign in again")
    await page.get_by_label("E-mail").fill("growth@example.com")
    await page.get_by_label("Password").fill(site.people["password"])
    await visitor.button("Sign in").click()
    await visitor.heading("API keys").wait_for()
    visitor.has_seen_no_fault()


async def test_key_that_was_typed_into_the_explorer_is_gone_with_its_owner(site: Site, page: Page) -> None:
    visitor = Visitor(site, page)
    await visitor.sign_in()
    await visitor.open("explorer")
    await page.get_by_label("API key").fill(site.service.keys["test"])
    await visitor.button("Sign out").click()
    await page.get_by_label("E-mail").fill("free@example.com")
    await page.get_by_label("Password").fill(site.people["password"])
    await visitor.button("Sign in").click()
    await visitor.heading("Overview").wait_for()
    await page.get_by_role("link", name="Explorer", exact=True).click()
    await expect(page.get_by_label("API key")).to_have_value("")
    visitor.has_seen_no_fault()


async def test_link_that_was_used_ends_no_session_that_is_there(site: Site, page: Page) -> None:
    visitor = Visitor(site, page)
    await visitor.sign_in()
    await page.evaluate("location.hash = '#token=' + 'A'.repeat(43)")
    await visitor.button("Sign in").click()
    await expect(page.get_by_role("alert")).to_contain_text("this link was used already")
    await page.evaluate("location.hash = '#/keys'")
    await visitor.heading("API keys").wait_for()
    visitor.has_seen_no_fault()


async def test_link_works_once_and_is_gone_from_the_address(site: Site, page: Page, browser: Browser) -> None:
    account = await site.service.new_account()
    made = await site.service.ask("accounts", "link", account["id"])
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
    await expect(other.get_by_role("alert")).to_contain_text("this link was used already")
    await again.close()
    visitor.has_seen_no_fault()


async def test_mail_link_is_promised_to_everybody(site: Site, page: Page) -> None:
    visitor = Visitor(site, page)
    await page.goto(site.url)
    await visitor.button("Mail me a sign-in link").click()
    await page.get_by_label("E-mail").fill("nobody@example.com")
    await visitor.button("Send me a link").click()
    await expect(page.get_by_role("status").filter(has_text="If nobody@example.com has an account")).to_be_visible()
    visitor.has_seen_no_fault()


async def test_cookie_that_a_browser_brought_along_is_not_the_one_it_is_signed_in_with(site: Site, page: Page) -> None:
    visitor = Visitor(site, page)
    planted = "A" * 43
    root = site.url.removesuffix("/dashboard")
    await page.context.add_cookies([{"name": "penstock_session", "value": planted, "url": root}])
    await visitor.sign_in()
    found = {each["name"]: each["value"] for each in await page.context.cookies()}
    assert found["penstock_session"] != planted


async def test_page_of_another_origin_can_forge_nothing(holder: Visitor) -> None:
    """Another port of the same host is the same site: the cookies go along, and must not be enough."""
    site = holder.site
    forged = f"{site.service.base}/account/keys"
    site.receiver.html = f"""<!doctype html><form method=post enctype=text/plain action="{forged}">
        <input name='{{"name":"forged","mode":"test","x":"' value='"}}'></form>"""
    before = await _keys(holder)
    other = await holder.page.context.new_page()
    await other.goto(site.receiver.url)
    async with other.expect_navigation() as told:
        await other.evaluate("document.forms[0].submit()")
    refusal = await told.value
    assert refusal is not None
    assert refusal.status == 403
    await other.goto(site.receiver.url)
    ways = """async (url) => {
        const body = JSON.stringify({ name: "forged", mode: "test" });
        const said = [];
        await fetch(url, { method: "POST", mode: "no-cors", credentials: "include", body }).catch(() => said.push("refused"));
        await fetch(url, { credentials: "include" }).then((reply) => said.push(reply.status), () => said.push("unreadable"));
        return said;
    }"""
    assert "unreadable" in await other.evaluate(ways, forged)
    await other.close()
    site.receiver.html = ""
    assert await _keys(holder) == before


async def _keys(visitor: Visitor) -> list[str]:
    found = await visitor.page.evaluate("fetch('/v1/account/keys').then((reply) => reply.json())")
    return sorted(key["id"] for key in found["keys"])


async def test_two_accounts_in_two_browsers_see_only_their_own(holder: Visitor, browser: Browser) -> None:
    name = "only of growth"
    await holder.make_key(name)
    await holder.make_webhook("/only-of-growth")
    mine = holder.page.url
    context = await browser.new_context()
    other = Visitor(holder.site, await context.new_page())
    await other.sign_in("free")
    await other.open("keys")
    await expect(other.page.get_by_role("row").nth(1)).to_be_visible()
    await expect(other.page.get_by_text(name)).to_have_count(0)
    await other.page.goto(mine)
    await expect(other.page.get_by_role("alert")).to_contain_text("This is not here")
    await context.close()
