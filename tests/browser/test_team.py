"""Members of an account and an operator's visit, in a real browser."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser, BrowserContext, Page, StorageState, expect

from tests.browser.test_page import CONTRAST, UNNAMED
from tests.browser.visitor import WAIT_MS, Site, Visitor

expect.set_options(timeout=WAIT_MS)
PASSWORD = "the member's own password"


async def assert_accessible(page: Page) -> None:
    assert await page.evaluate(UNNAMED) == []
    for theme in ("light", "dark"):
        await page.emulate_media(color_scheme=theme)
        assert await page.evaluate(CONTRAST) == [], theme


async def invited(owner: Visitor, email: str, role: str) -> str:
    """Invite through the form and return the link, which is shown because the service sends no mail."""
    await owner.open("account/members")
    await owner.button("Invite member").click()
    await owner.dialog.get_by_label("Email").fill(email)
    await owner.dialog.get_by_label("Role").select_option(role)
    await owner.button("Send invitation").click()
    link = owner.dialog.get_by_label("Invitation link")
    await link.wait_for()
    await owner.page.keyboard.press("Escape")
    url = await link.inner_text()
    await owner.button("Done").click()
    return url


async def test_member_joins_by_link_looks_around_and_is_removed(
    site: Site, fresh_holder: Visitor, browser: Browser
) -> None:
    await fresh_holder.create_key("of the owner")
    email = "reader@example.com"
    url = await invited(fresh_holder, email, "read-only")
    await expect(fresh_holder.page.get_by_role("table", name="Open invitations")).to_contain_text(email)

    context = await browser.new_context(viewport={"width": 1280, "height": 860}, locale="en-US")
    page = await context.new_page()
    member = Visitor(site, page)
    await page.goto(url)
    await expect(page.get_by_text("with the role read-only")).to_be_visible()
    assert "invitation" not in page.url
    await page.get_by_label("New password").fill(PASSWORD)
    await member.button("Join").click()
    await member.heading("Overview").wait_for()
    await member.open("keys")
    await expect(page.get_by_role("row", name="of the owner")).to_be_visible()
    for name in ("Create key", "Edit", "Revoke"):
        await expect(member.button(name)).to_have_count(0)
    await member.open("account/members")
    await expect(page.get_by_role("table", name="Members", exact=True)).to_contain_text(email)
    await expect(member.button("Invite member")).to_have_count(0)
    tabs = page.get_by_role("navigation", name="Account")
    await expect(tabs.get_by_role("link", name="Export and deletion")).to_have_count(0)
    await tabs.get_by_role("link", name="Security").click()
    await expect(member.button("Save password")).to_be_visible()

    await fresh_holder.page.reload()
    row = fresh_holder.page.get_by_role("table", name="Members", exact=True).get_by_role("row", name=email)
    await expect(row).to_contain_text("Read-only")
    await assert_accessible(fresh_holder.page)
    await fresh_holder.button(f"Remove {email}", row).click()
    await fresh_holder.button("Remove member", fresh_holder.dialog).click()
    await expect(row).to_have_count(0)
    tabs = fresh_holder.page.get_by_role("navigation", name="Account")
    await tabs.get_by_role("link", name="Activity").click()
    await expect(fresh_holder.page.get_by_role("table", name="Activity")).to_contain_text(email)
    await page.reload()
    await expect(member.button("Sign in")).to_be_visible()
    member.assert_no_faults()
    await context.close()


async def test_sessions_are_ended_from_the_account_page(site: Site, fresh_holder: Visitor) -> None:
    page = fresh_holder.page
    await fresh_holder.open("account")
    account = (await page.locator("main dd code").first.inner_text()).strip()
    other = await page.context.browser.new_page()  # type: ignore[union-attr]
    await other.goto((await site.service.cli_json("accounts", "link", account))["url"])
    elsewhere = Visitor(site, other)
    await elsewhere.button("Sign in").click()
    await elsewhere.heading("Overview").wait_for()
    await fresh_holder.open("account/security")
    sessions = page.get_by_role("table", name="Sessions")
    await fresh_holder.button("Sign out", sessions).click()
    await expect(sessions.get_by_role("row")).to_have_count(2)
    await other.context.close()


@pytest.fixture
async def operator_alone(browser: Browser, site: Site, signed_in: StorageState) -> AsyncIterator[Visitor]:
    """An operator in a context that other tests do not share: a visit replaces the session of the account."""
    context: BrowserContext = await browser.new_context(
        storage_state=signed_in, viewport={"width": 1280, "height": 860}
    )
    found = Visitor(site, await context.new_page())
    yield found
    await context.close()
    found.assert_no_faults()


async def test_operator_looks_at_an_account_under_a_banner(site: Site, operator_alone: Visitor) -> None:
    page = operator_alone.page
    account = await site.service.new_account()
    await operator_alone.open("operator/accounts")
    await page.get_by_label("Search").fill(account["id"])
    row = page.locator(f'[data-id="{account["id"]}"]')
    await expect(page.get_by_role("table", name="Accounts").locator("tbody tr")).to_have_count(1)
    await row.get_by_role("button", name="View the account of").click()
    await operator_alone.button("View account", operator_alone.dialog).click()
    await operator_alone.heading("Overview").wait_for()
    banner = page.get_by_role("complementary", name="Visit")
    await expect(banner).to_contain_text("You cannot change anything")
    await operator_alone.open("account/activity")
    await expect(page.get_by_role("table", name="Activity")).to_contain_text("Looked at the account")
    await expect(operator_alone.button("Save password")).to_have_count(0)
    await assert_accessible(page)
    await operator_alone.button("End visit").click()
    await operator_alone.heading("Accounts").wait_for()
    await expect(banner).to_have_count(0)


async def test_deleted_account_is_signed_out_with_a_notice(fresh_holder: Visitor) -> None:
    page = fresh_holder.page
    await fresh_holder.open("account/data")
    await expect(page.get_by_role("heading", name="Change email address")).to_have_count(0)  # no mail is configured
    card = page.locator("section.card").filter(has=page.get_by_role("heading", name="Delete account"))
    email = await page.locator("header.top .lead").inner_text()
    await card.get_by_label("Email address").fill(email)
    await fresh_holder.button("Delete account", card).click()
    await expect(page.get_by_label("Password")).to_be_visible()
    await expect(page.locator("#toasts")).to_contain_text("Your account has been deleted")
