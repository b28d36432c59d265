"""The alerts of an account over HTTP: for its holder, and for its keys."""

from __future__ import annotations

import aiohttp

from tests.dashboard.service import PASSWORD, Client, DashboardService
from tests.dashboard.test_usage import known_key


async def test_holder_chooses_alerts(service: DashboardService) -> None:
    holder, stranger = await service.holder(), await service.holder()
    before = (await holder.get("/account/alerts")).data
    assert before["alerts"] == ["webhook_paused"]
    assert (before["mail"], before["mail_available"], before["webhook"], before["recent"]) == (True, False, None, [])
    wanted = {"alerts": ["policy_budget", "day_usage"], "error_rate_percent": 25, "mail": False}
    after = (await holder.request("PATCH", "/account/alerts", wanted)).data
    assert after["alerts"] == ["day_usage", "policy_budget"]
    assert (after["error_rate_percent"], after["mail"]) == (25, False)
    for wrong in ({"alerts": ["all"]}, {"error_rate_percent": 0}, {"webhook_url": "https://10.0.0.1/"}, {}):
        (await holder.request("PATCH", "/account/alerts", wrong)).fault(400)
    assert "alerts have no address" in (await holder.post("/account/alerts/test", {})).fault(400)
    assert (await stranger.get("/account/alerts")).data["alerts"] == ["webhook_paused"]
    (await Client(service).get("/account/alerts")).fault(401)


async def test_webhook_for_alerts_is_none_of_the_others(service: DashboardService) -> None:
    holder = await service.holder()
    made = (await holder.request("PATCH", "/account/alerts", {"webhook_url": "https://example.com/alerts"})).data
    assert made["signing_secret"].startswith("whsec_")
    hook = made["webhook"]
    assert (hook["url"], hook["status"]) == ("https://example.com/alerts", "active")
    assert (await holder.get("/account/webhooks")).data["total"] == 0
    (await holder.get(f"/account/webhooks/{hook['id']}")).fault(404)
    assert (await holder.get("/account")).data["used"]["webhooks"] == 0
    again = (await holder.request("PATCH", "/account/alerts", {"webhook_url": "https://example.com/b"})).data
    assert (again["webhook"]["id"], "signing_secret" in again) == (hook["id"], False)
    assert (await holder.post("/account/alerts/test", {})).data == {"mail": False, "webhook": True}
    (recent,) = (await holder.get("/account/alerts")).data["recent"]
    assert (recent["alert"], recent["message"], recent["delivery"]) == ("test", "This is a test alert", "pending")
    removed = (await holder.request("PATCH", "/account/alerts", {"webhook_url": None})).data
    assert removed["webhook"] is None


async def test_keys_need_the_scope_and_the_live_mode(service: DashboardService) -> None:
    holder = await service.holder()
    key = await known_key(service, holder, mode="live")
    test_key = await known_key(service, holder, mode="test")
    narrow = await known_key(service, holder, mode="live", scopes=["rpc:read"])

    async def status(method: str, given: str) -> int:
        async with (
            aiohttp.ClientSession(headers={"X-API-Key": given}) as session,
            session.request(method, f"{service.base}/alerts", json={"mail": False}) as reply,
        ):
            return reply.status

    assert (await status("PATCH", test_key), await status("GET", narrow)) == (403, 403)
    assert (await status("PATCH", key), await status("GET", key)) == (200, 200)


async def test_deleted_account_has_no_alerts(service: DashboardService) -> None:
    holder = await service.holder()
    await holder.request(
        "PATCH", "/account/alerts", {"webhook_url": "https://example.com/alerts", "alerts": ["day_usage"]}
    )
    account = holder.account
    assert (
        await holder.post("/account/delete", {"email": account["email"], "current_password": PASSWORD})
    ).status == 200
    async with service.pool.connection() as connection:
        assert (
            await connection.fetchval("select count(*) from alert_settings where account_id = $1", account["id"]) == 0
        )
        query = "select count(*) from webhooks where account_id = $1 and status <> 'deleted'"
        assert await connection.fetchval(query, account["id"]) == 0
