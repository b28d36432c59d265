"""Sessions of an account, the log of what was done in it, and how much of its plan is used."""

from __future__ import annotations

from typing import Any

import aiohttp

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
        ("operator", "admin_update_account", "plan growth"),
        ("key", "delete_webhook", webhook),
        ("holder", "create_key", key_id),
        ("holder", "account_create_webhook", webhook),
        ("holder", "account_sign_in", ""),
    ]
    names = [each["name"] for each in await actions_of(holder)]
    email = holder.account["email"]
    assert names == ["operator", key_id, email, email, email]
    assert [each["action"] for each in await actions_of(stranger)] == ["account_sign_in"]


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
