"""Deleting an account: by its holder, by an operator, and on the command line."""

from __future__ import annotations

from typing import Any

from tests.dashboard.service import PASSWORD, Client, DashboardService, call
from tests.dashboard.test_account_isolation import POLICY, WEBHOOK
from tests.dashboard.test_usage import known_key
from tests.database import connected
from tests.service import until


async def furnished(service: DashboardService) -> tuple[Client, str]:
    """The holder of an account with a webhook and a policy, and a key that works."""
    holder = await service.holder()
    for path, body in (("/account/webhooks", WEBHOOK), ("/account/gas/policies", POLICY)):
        assert (await holder.post(path, body)).status == 201
    return holder, await known_key(service, holder)


async def remains(service: DashboardService, account: str) -> dict[str, Any]:
    async with connected(service.database) as database:
        row = await database.fetchrow("select name, email, disabled from accounts where id = $1", account)
        counts = {
            table: await database.fetchval(f"select count(*) from {table} where account_id = $1 {condition}", account)
            for table, condition in {
                "keys": "and status <> 'revoked'",
                "webhooks": "and status <> 'deleted'",
                "gas_policies": "and status <> 'deleted'",
                "sessions": "",
                "account_passwords": "",
            }.items()
        }
    assert row is not None
    return {**dict(row), "left": sum(counts.values())}


GONE = {"name": "deleted", "email": "", "disabled": True, "left": 0}


async def test_holder_deletes_the_account_after_typing_its_address(service: DashboardService) -> None:
    holder, key = await furnished(service)
    account, other = holder.account, await service.holder()
    wrong = await holder.post("/account/delete", {"email": other.account["email"]})
    assert wrong.fault(400) == "email: must be the account's email address"
    (await holder.post("/account/delete", {})).fault(400)
    assert (await holder.post("/account/delete", {"email": account["email"].upper()})).data == {"deleted": True}
    assert await remains(service, account["id"]) == GONE
    (await holder.get("/account/session")).fault(401)
    sign_in = {"email": account["email"], "password": PASSWORD}
    (await Client(service).post("/account/sign-in", sign_in)).fault(401)

    async def is_refused() -> bool:
        return (await call(service, key)).status == 401

    await until(is_refused)
    assert (await other.get("/account/session")).status == 200


async def test_operator_deletes_an_account_and_may_repeat_it(service: DashboardService) -> None:
    holder, _ = await furnished(service)
    operator, account = await service.operator(), holder.account["id"]
    for _ in range(2):
        assert (await operator.request("DELETE", f"/admin/accounts/{account}")).data == {"deleted": True}
        assert await remains(service, account) == GONE
    (await operator.request("DELETE", "/admin/accounts/acct_000000000000000000000000")).fault(404)
