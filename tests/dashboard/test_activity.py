"""Sessions of an account, the log of what was done in it, and how much of its plan is used."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import aiohttp
import pytest

from tests.dashboard.service import PASSWORD, Client, DashboardService
from tests.dashboard.test_account_isolation import POLICY, WEBHOOK
from tests.dashboard.test_usage import known_key


async def actions_of(holder: Client) -> list[dict[str, Any]]:
    listed = (await holder.get("/account/actions?limit=100")).data
    assert listed["total"] == len(listed["actions"])
    return list(listed["actions"])


async def test_sessions_are_listed_with_their_place_and_can_be_ended(service: DashboardService) -> None:
    holder = await service.holder()
    other = Client(service)
    credentials = {"email": holder.account["email"], "password": PASSWORD}
    reply = await other.post("/account/sign-in", credentials, User_Agent="A browser\t(with control characters)")
    other.csrf = reply.data["csrf_token"]

    rows = (await holder.get("/account/sessions")).data["sessions"]
    assert {(row["address"], row["current"]) for row in rows} == {(holder.address, True), (other.address, False)}
    theirs = next(row for row in rows if not row["current"])
    assert theirs["agent"] == "A browser (with control characters)"

    stranger = await service.holder()
    (await stranger.request("DELETE", f"/account/sessions/{theirs['id']}")).fault(404)
    (await holder.request("DELETE", "/account/sessions/sess_nonsense")).fault(400)
    assert (await other.get("/account/session")).status == 200

    assert (await holder.request("DELETE", f"/account/sessions/{theirs['id']}")).data == {"signed_out": True}
    (await other.get("/account/session")).fault(401)
    (await holder.request("DELETE", f"/account/sessions/{theirs['id']}")).fault(404)


async def test_holder_signs_out_everywhere_else(service: DashboardService) -> None:
    holder, stranger = await service.holder(), await service.holder()
    others = [await service.holder(holder.account) for _ in range(2)]
    assert len((await holder.get("/account/sessions")).data["sessions"]) == 3
    await holder.request("DELETE", "/account/sessions")
    for other in others:
        (await other.get("/account/session")).fault(401)
    assert (await holder.get("/account/session")).status == 200
    assert (await stranger.get("/account/session")).status == 200


@pytest.mark.parametrize(("count", "shown"), [(1, [f"0x{1:040x}"]), (1000, "1000 values")])
async def test_log_shows_the_addresses_of_a_webhook(service: DashboardService, count: int, shown: Any) -> None:
    """They are encoded ahead, and a long list is not read again for the log."""
    holder = await service.holder()
    config = {"addresses": [f"0x{number:040x}" for number in range(1, count + 1)]}
    body = {**WEBHOOK, "event_type": "address_activity", "config": config}
    webhook = (await holder.post("/account/webhooks", body)).data["id"]
    assert (await holder.request("DELETE", f"/account/webhooks/{webhook}")).status == 200
    deleted, created, *_ = await actions_of(holder)
    assert deleted["before"]["config.addresses"] == created["after"]["config.addresses"] == shown


async def test_log_has_changes_of_the_holder_keys_and_operators(service: DashboardService) -> None:
    holder, stranger, operator = await service.holder(), await service.holder(), await service.operator()
    webhook = (await holder.post("/account/webhooks", WEBHOOK)).data["id"]
    (await holder.post("/account/gas/policies", {})).fault(400)
    key = await known_key(service, holder)
    async with aiohttp.ClientSession(headers={"X-API-Key": key}) as session:
        async with session.delete(f"{service.base}/webhooks/{webhook}") as reply:
            assert reply.status == 200
        async with session.get(f"{service.base}/webhooks") as reply:
            assert reply.status == 200
    account = holder.account["id"]
    assert (await operator.request("PATCH", f"/admin/accounts/{account}", {"plan": "growth"})).status == 200

    found = [(each["by"], each["action"], each["subject"]) for each in await actions_of(holder)]
    key_id = (await holder.get("/account/keys")).data["keys"][0]["id"]
    assert found == [
        ("operator", "admin_update_account", ""),
        ("key", "delete_webhook", webhook),
        ("holder", "create_key", key_id),
        ("holder", "account_create_webhook", webhook),
        ("holder", "account_sign_in", ""),
    ]
    names = [each["name"] for each in await actions_of(holder)]
    email = holder.account["email"]
    assert names == ["operator", key_id, email, email, email]
    assert [each["action"] for each in await actions_of(stranger)] == ["account_sign_in"]
    changed, deleted, created, *_ = await actions_of(holder)
    assert (changed["before"], changed["after"]) == ({"plan": "enterprise"}, {"plan": "growth"})
    assert (deleted["before"]["url"], deleted["after"]) == ("https://hooks.example.com/…", None)
    assert (created["before"], created["after"]["name"], created["after"]["mode"]) == (None, "a key", "test")
    assert key not in str(await actions_of(holder))


async def test_used_counts_what_the_plan_limits(service: DashboardService) -> None:
    holder = await service.holder()
    webhook = (await holder.post("/account/webhooks", WEBHOOK)).data["id"]
    await holder.post("/account/gas/policies", POLICY)
    await holder.new_key()
    overview = (await holder.get("/account")).data
    assert overview["used"] == {
        "keys": 1,
        "webhooks": 1,
        "policies": 1,
        "wallets": 0,
        "webhook_deliveries_per_day": 0,
        "webhook_events_per_day": 0,
        "sponsored_usd_per_day": 0,
    }
    assert [plan["name"] for plan in overview["plans"]] == ["free", "growth", "enterprise"]
    assert overview["plan"] in overview["plans"]
    # Other tests count the webhooks of the service.
    assert (await holder.request("DELETE", f"/account/webhooks/{webhook}")).status == 200


async def audit(operator: Client, **filters: str) -> list[dict[str, Any]]:
    return list((await operator.get(f"/admin/actions?{urlencode({'limit': 100, **filters})}")).data["actions"])


async def test_operators_see_the_actions_of_all_accounts_and_operators(service: DashboardService) -> None:
    first, second, operator = await service.holder(), await service.holder(), await service.operator()
    accounts = [each.account["id"] for each in (first, second)]
    key = await first.new_key(name="backend")
    assert (await first.request("PATCH", f"/account/keys/{key['id']}", {"name": "frontend"})).status == 200
    networks = (await operator.get("/admin/networks")).data["networks"]
    upstream = next(each for network in networks for each in network["upstreams"])
    for word, body in (("cordon", {"reason": "maintenance"}), ("uncordon", {})):
        assert (await operator.post(f"/admin/upstreams/{upstream['id']}/{word}", body)).status == 200
    assert (await operator.request("DELETE", f"/admin/accounts/{accounts[1]}")).status == 200

    found = await audit(operator)
    changed = next(each for each in found if each["action"] == "update_key" and each["account_id"] == accounts[0])
    assert (changed["by"], changed["name"]) == ("holder", first.account["email"])
    assert (changed["subject"], changed["account_name"]) == (key["id"], "Holder")
    assert (changed["before"], changed["after"]) == ({"name": "backend"}, {"name": "frontend"})
    assert changed["address"] == first.address
    assert key["key"] not in str(found)

    of_operator = await audit(operator, by="operator", name="operator")
    deleted, uncordoned, cordoned, signed_in = of_operator[:4]
    assert (deleted["action"], deleted["account_id"]) == ("admin_delete_account", None)
    assert (deleted["subject"], deleted["before"]) == (accounts[1], None)
    assert second.account["email"] not in str(found)
    assert (uncordoned["after"], uncordoned["subject"]) == ({"cordoned": False}, upstream["label"])
    assert cordoned["after"] == {"cordoned": True, "reason": "maintenance"}
    assert signed_in["action"] == "admin_sign_in"
    # The log of an erased account is erased with it.
    assert await audit(operator, account=accounts[1]) == []
    (await first.get("/admin/actions")).fault(401)


async def test_audit_log_has_filters_and_pages(service: DashboardService) -> None:
    holder, operator = await service.holder(), await service.operator()
    account = holder.account["id"]
    keys = [(await holder.new_key(name=f"key {number}"))["id"] for number in range(5)]
    pages: list[list[str]] = []
    cursor: str | None = ""
    while cursor is not None:
        query = {"account": account, "action": "create_key", "limit": "2", **({"cursor": cursor} if cursor else {})}
        page = (await operator.get(f"/admin/actions?{urlencode(query)}")).data
        pages.append([each["subject"] for each in page["actions"]])
        cursor = page["next_cursor"]
    assert pages == [[keys[4], keys[3]], [keys[2], keys[1]], [keys[0]]]
    assert await audit(operator, account=account, since="2100-01-01") == []
    assert await audit(operator, account=account, until="2000-01-01") == []
    for wrong in ("cursor=x", "by=nobody", "since=yesterday", "limit=0"):
        (await operator.get(f"/admin/actions?{wrong}")).fault(400)
