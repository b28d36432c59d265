"""Deleting an account: by its holder, by an operator, and on the command line."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from proxy.core.alerts import Alert
from proxy.core.request_records import RequestRecord
from proxy.core.usage import UsageSums
from proxy.store.postgres.actions import Action, ActionStore, Actor
from proxy.store.postgres.alerts import AlertStore
from proxy.store.postgres.keys import KeyStore
from proxy.store.postgres.request_store import RequestStore
from proxy.store.postgres.usage import UsageStore
from tests.dashboard.service import PASSWORD, Client, DashboardService, call
from tests.dashboard.test_account_isolation import POLICY, WEBHOOK
from tests.dashboard.test_second_factor import protected
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
    proven = {"email": account["email"].upper(), "current_password": PASSWORD}
    assert (await holder.post("/account/delete", proven)).data == {"deleted": True}
    assert await remains(service, account["id"]) == GONE
    (await holder.get("/account/session")).fault(401)
    sign_in = {"email": account["email"], "password": PASSWORD}
    (await Client(service).post("/account/sign-in", sign_in)).fault(401)

    async def is_refused() -> bool:
        return (await call(service, key)).status == 401

    await until(is_refused)
    assert (await other.get("/account/session")).status == 200


async def test_deletion_asks_for_the_password_and_the_second_factor(service: DashboardService) -> None:
    holder, app, _ = await protected(service)
    email = {"email": holder.account["email"]}
    for proof in ({}, {"code": "000000"}, {"current_password": "not the password"}):
        assert (await holder.post("/account/delete", {**email, **proof})).fault(400) == "current_password: is wrong"
    proven = {**email, "current_password": PASSWORD}
    assert (await holder.post("/account/delete", proven)).fault(400).startswith("code: enter a code")
    assert (await holder.post("/account/delete", {**proven, "code": "000000"})).fault(400).startswith("code: ")
    assert (await remains(service, holder.account["id"]))["disabled"] is False
    assert (await holder.post("/account/delete", {**proven, "code": app.code()})).data == {"deleted": True}


async def test_nothing_is_recorded_of_an_erased_account(service: DashboardService) -> None:
    erased, other = (await service.holder()).account["id"], (await service.holder()).account["id"]
    store, keys = RequestStore(service.pool), KeyStore(service.pool, pepper="p" * 32, plans={"free": 10})
    await store.write([record_of(erased), record_of(other)])
    async with connected(service.database) as database, asyncio.TaskGroup() as group:

        async def written() -> dict[str, int]:
            found = await database.fetch("select account, count(*) as count from requests group by account")
            return {row["account"]: row["count"] for row in found if row["account"] in (erased, other)}

        assert await written() == {erased: 1, other: 1}
        # A record is being written while the account is erased.
        transaction = database.transaction()
        await transaction.start()
        await database.execute("select from accounts where id = $1 for key share", erased)
        await database.execute("insert into requests select * from requests where account = $1", erased)
        erasing = group.create_task(keys.erase_account(erased))
        await until(lambda: waits_for_lock(service))
        assert not erasing.done()
        await transaction.commit()
        await erasing
        assert await written() == {other: 1}
        # Records that waited in the memory of workers come later.
        await store.write([record_of(erased), record_of(other)])
        assert await written() == {other: 2}
        actions = ActionStore(service.pool)
        await actions.record(erased, Actor("holder", "a@b"), Action("create_key"))
        assert not await database.fetchval("select count(*) from actions where account_id = $1", erased)
        assert (
            await AlertStore(service.pool, sends_mail=True).raise_all(erased, [Alert("webhook_paused", 0, "now")]) == 0
        )


async def test_no_usage_is_written_of_an_erased_account(service: DashboardService) -> None:
    erased, other = (await service.holder()).account["id"], (await service.holder()).account["id"]
    keys, store = KeyStore(service.pool, pepper="p" * 32, plans={"free": 10}), UsageStore(service.pool)
    batch = {((account, "key_1", "net/one", "m"), int(time.time()) // 60): UsageSums(1) for account in (erased, other)}
    async with connected(service.database) as database, asyncio.TaskGroup() as group:

        async def written() -> dict[str, int]:
            found = await database.fetch(
                "select account_id, sum(requests)::int as requests from usage join usage_series on id = series "
                "where step = 'minute' and key_id = '' and network = '' and method = '' group by account_id"
            )
            return {row["account_id"]: row["requests"] for row in found if row["account_id"] in (erased, other)}

        await store.write("w", 1, batch)
        assert await written() == {erased: 1, other: 1}
        # A batch that begins while the account is being erased.
        transaction = database.transaction()
        await transaction.start()
        await database.execute("select from accounts where id = $1 for update", erased)
        writing = group.create_task(store.write("w", 2, batch))
        await until(lambda: waits_for_lock(service))
        await database.execute("update accounts set disabled = true, email = '' where id = $1", erased)
        await transaction.commit()
        await writing
        assert await written() == {erased: 1, other: 2}
        # Usage that waited in the memory of workers comes later, also of a method that the account had not used.
        await keys.erase_account(erased)
        late = {((account, key, network, "new"), at): used for ((account, key, network, _), at), used in batch.items()}
        await store.write("w", 3, late)
        assert await written() == {erased: 1, other: 3}
        series = "select count(*) from usage_series where account_id = $1 and method = 'new'"
        assert [await database.fetchval(series, account) > 0 for account in (erased, other)] == [False, True]


def record_of(account: str) -> RequestRecord:
    return RequestRecord(
        id="req_1", at=time.time(), account=account, key="key_1", network="", surface="rest", method="list_requests",
        status=400, reason="failed",
    )  # fmt: skip


async def waits_for_lock(service: DashboardService) -> bool:
    async with connected(service.database) as database:
        query = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
        return bool(await database.fetchval(query))


async def test_operator_deletes_an_account_and_may_repeat_it(service: DashboardService) -> None:
    holder, _ = await furnished(service)
    operator, account = await service.operator(), holder.account["id"]
    for _ in range(2):
        assert (await operator.request("DELETE", f"/admin/accounts/{account}")).data == {"deleted": True}
        assert await remains(service, account) == GONE
    (await operator.request("DELETE", "/admin/accounts/acct_000000000000000000000000")).fault(404)
