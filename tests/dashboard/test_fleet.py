"""The operator's API: upstreams, accounts, usage, followers and deliveries over all workers."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any
from urllib.parse import quote

import orjson
import pytest

from tests.dashboard.service import NETWORK, Client, DashboardService, Reply, call
from tests.dashboard.test_account_isolation import WEBHOOK
from tests.dashboard.test_usage import known_key
from tests.database import connected
from tests.http_client import HttpClient, post, rpc
from tests.service import until


async def _equals(found: Awaitable[int], expected: int) -> bool:
    return await found == expected


async def upstreams(operator: Client) -> list[dict[str, Any]]:
    networks = (await operator.get("/admin/networks")).data["networks"]
    found: list[dict[str, Any]] = next(each for each in networks if each["network"] == NETWORK)["upstreams"]
    return found


async def test_upstream_health_is_aggregated_over_all_workers(service: DashboardService) -> None:
    operator, holder = await service.operator(), await service.holder()
    key = await known_key(service, holder)

    async def is_complete() -> bool:
        found = (await operator.get("/admin/networks")).data
        return bool(found["workers"] == 2 and all(each["workers"] == 2 for each in await upstreams(operator)))

    await until(is_complete)
    before = sum(each["answered"] for each in await upstreams(operator))
    for _ in range(12):
        assert (await call(service, key)).status == 200

    async def is_counted() -> bool:
        return bool(sum(each["answered"] for each in await upstreams(operator)) >= before + 12)

    await until(is_counted)

    async def are_up() -> bool:
        return all(each["state"] == "up" for each in await upstreams(operator))

    await until(are_up)
    for each in await upstreams(operator):
        assert (each["breaker"], each["cordoned"], each["cordon"]) == ("closed", False, None)
        assert each["label"].startswith(f"{NETWORK}#")
        assert each["head"] == 16
        assert each["lag_blocks"] == 0
    text = (await operator.get("/admin/live")).body.decode()
    assert "127.0.0.1:" not in text, "the reply must not reveal an upstream's address"
    live = (await operator.get("/admin/live")).data
    assert len(live["workers"]) == 2
    assert {each["pid"] for each in live["workers"]} == set(service.running.worker_pids())


async def test_cordon_redirects_the_calls_of_all_workers_until_uncordon(service: DashboardService) -> None:
    operator, holder = await service.operator(), await service.holder()
    key = await known_key(service, holder)
    await until(lambda: upstreams(operator))
    first = next(each for each in await upstreams(operator) if each["label"].endswith("#1"))
    request = post(rpc("eth_gasPrice"), key=key, network=NETWORK)
    clients = [await HttpClient.open(service.running.port) for _ in range(12)]  # enough that both workers have some

    async def calls() -> tuple[int, int]:
        """Make a call on each connection and return how many each upstream got."""
        before = [upstream.calls for upstream in service.upstreams]
        for client in clients:
            assert (await client.send(request)).status == 200
        one, other = (upstream.calls - was for upstream, was in zip(service.upstreams, before, strict=True))
        return one, other

    async def has_moved() -> bool:
        return (await calls())[0] == 0

    async def is_back() -> bool:
        return (await calls())[0] > 0

    await until(is_back)
    reply = await operator.post(f"/admin/upstreams/{first['id']}/cordon", {"reason": "maintenance"})
    assert reply.data == {"id": first["id"], "label": first["label"], "cordoned": True}
    try:
        await until(has_moved)
        assert await calls() == (0, len(clients))

        async def is_shown() -> bool:
            found = next(each for each in await upstreams(operator) if each["id"] == first["id"])
            return bool(found["state"] == "cordoned" and found["cordon"]["reason"] == "maintenance")

        await until(is_shown)
    finally:
        reply = await operator.post(f"/admin/upstreams/{first['id']}/uncordon")
        assert reply.data["cordoned"] is False
    await until(is_back)
    for client in clients:
        await client.close()


async def test_last_upstream_is_cordoned_only_on_request(service: DashboardService) -> None:
    operator = await service.operator()
    one, other = await upstreams(operator)
    assert (await operator.post(f"/admin/upstreams/{one['id']}/cordon", {})).status == 200

    async def is_alone() -> bool:
        return [each["cordoned"] for each in await upstreams(operator)] == [True, False]

    await until(is_alone)
    refused = await operator.post(f"/admin/upstreams/{other['id']}/cordon", {})
    assert (refused.status, refused.data["error"]["param"]) == (400, "last")
    assert (await operator.post(f"/admin/upstreams/{other['id']}/cordon", {"last": True})).status == 200
    for each in (one, other):
        assert (await operator.post(f"/admin/upstreams/{each['id']}/uncordon", {})).status == 200

    async def are_back() -> bool:
        return all(each["state"] == "up" for each in await upstreams(operator))

    await until(are_back)


async def test_operator_sees_whose_request_failed_and_filters_by_it(service: DashboardService) -> None:
    operator, holder = await service.operator(), await service.holder()
    key = await known_key(service, holder, name="backend")
    account = holder.account["id"]
    async with await HttpClient.open(service.running.port) as client:
        sent = post(rpc("eth_gasPrice"), key=key, network=NETWORK, X_Explain="1")
        assert (await client.send(sent)).status == 200

    async def listed(query: str = "") -> dict[str, Any]:
        path = f"/admin/requests?account={account}&method=eth_gasPrice{query}"
        return dict((await operator.get(path)).data)

    async def is_recorded() -> bool:
        return bool((await listed())["total"])

    await until(is_recorded)
    found = await listed("&choices=true")
    (record,) = found["requests"]
    assert (record["account_name"], record["key_name"]) == ("Holder", "backend")
    choices = {name: [each["name"] for each in values] for name, values in found["choices"].items()}
    asked = record["attempts"][0]["upstream"]
    assert (choices["account"], choices["key"], choices["upstream"]) == (["Holder"], ["backend"], [asked])
    assert (await listed(f"&upstream={quote(asked)}"))["total"] == 1
    assert (await listed(f"&upstream={quote(asked[:-1])}"))["total"] == 0
    own = (await holder.get("/account/requests?choices=true")).data
    assert {*own["choices"]} == {"network", "method", "status", "key"}


async def test_unknown_upstream_cannot_be_cordoned(service: DashboardService) -> None:
    operator, holder = await service.operator(), await service.holder()
    (await operator.post("/admin/upstreams/0000000000000000/cordon", {})).fault(404)
    (await holder.post("/admin/upstreams/0000000000000000/cordon", {})).fault(401)


async def test_accounts_are_created_found_and_changed(service: DashboardService) -> None:
    operator = await service.operator()
    body = {"name": "Zebra", "email": "zebra@example.com", "plan": "growth", "requests_per_day": 7}
    made = await operator.post("/admin/accounts", body)
    assert made.status == 201
    account = made.data
    assert account["limits"] == {"requests_per_second": None, "units_per_second": None, "requests_per_day": 7}
    found = (await operator.get("/admin/accounts?search=ZEBRA")).data
    assert [each["id"] for each in found["accounts"]] == [account["id"]]
    assert found["total"] == 1
    path = f"/admin/accounts/{account['id']}"
    changed = (await operator.request("PATCH", path, {"plan": "free", "requests_per_day": None})).data
    assert (changed["plan"], changed["limits"]["requests_per_day"]) == ("free", None)
    assert (await operator.get(path)).data["used_today"] == 0
    assert (await operator.get(f"{path}/keys")).data == {"keys": []}
    assert "plan" in (await operator.request("PATCH", path, {"plan": "golden"})).fault(400)
    (await operator.get("/admin/accounts/acct_0")).fault(404)
    (await operator.request("PATCH", "/admin/accounts/acct_0", {"name": "x"})).fault(404)
    plans = (await operator.get("/admin/plans")).data["plans"]
    assert [plan["name"] for plan in plans] == ["free", "growth", "enterprise"]


async def test_changed_account_limit_applies_to_its_keys(service: DashboardService) -> None:
    operator = await service.operator()
    holder = await service.holder(await service.account(plan="growth"))
    key = await known_key(service, holder)
    assert (await call(service, key)).headers["X-RateLimit-Limit"] == "100"
    await operator.request("PATCH", f"/admin/accounts/{holder.account['id']}", {"requests_per_second": 33})

    async def is_everywhere() -> bool:
        return {(await call(service, key)).headers["X-RateLimit-Limit"] for _ in range(8)} == {"33"}

    await until(is_everywhere)


async def test_lowered_account_limit_applies_to_keys_with_custom_limits(service: DashboardService) -> None:
    operator = await service.operator()
    holder = await service.holder(await service.account(plan="growth"))
    key = await known_key(service, holder, requests_per_second=50)
    assert (await call(service, key)).headers["X-RateLimit-Limit"] == "50"

    for change, limit in (({"requests_per_second": 7}, "7"), ({"requests_per_second": None, "plan": "free"}, "10")):
        await operator.request("PATCH", f"/admin/accounts/{holder.account['id']}", change)

        async def is_everywhere(limit: str = limit) -> bool:
            return {(await call(service, key)).headers["X-RateLimit-Limit"] for _ in range(8)} == {limit}

        await until(is_everywhere)


async def test_account_list_includes_the_requests_of_today(service: DashboardService) -> None:
    operator = await service.operator()
    # Workers lease a large part of a daily quota at once. An account without a limit has no lease.
    for plan in ("free", "enterprise"):
        holder = await service.holder(await service.account(plan=plan))
        key = await known_key(service, holder)
        for _ in range(3):
            assert (await call(service, key)).status == 200

        async def used(account: str = holder.account["id"]) -> int:
            (found,) = (await operator.get(f"/admin/accounts?search={account}")).data["accounts"]
            assert found["used_today"] <= 3, found
            return int(found["used_today"])

        await until(lambda used=used: _equals(used(), 3))
        assert (await operator.get(f"/admin/accounts/{holder.account['id']}")).data["used_today"] == 3


async def test_account_is_found_by_key_member_and_request(service: DashboardService) -> None:
    holder, operator = await service.holder(), await service.operator()
    created = await holder.new_key()

    async def known() -> Reply | None:
        """A worker that does not know the key yet records nothing."""
        reply = await call(service, created["key"], "eth_sendTransaction")
        return None if reply.status == 401 else reply

    failed = await until(known)

    async def found(text: str) -> bool:
        rows = (await operator.get(f"/admin/accounts?search={text}")).data["accounts"]
        return [each["id"] for each in rows] == [holder.account["id"]]

    for text in (holder.account["email"], created["id"], created["key"][-4:]):
        assert await found(text), text
    await until(lambda: found(failed.headers["X-Request-Id"]))


async def test_page_beyond_the_last_includes_the_total(service: DashboardService) -> None:
    operator = await service.operator()
    found = (await operator.get("/admin/accounts?page=999")).data
    assert found["accounts"] == []
    assert found["total"] > 0


async def test_two_accounts_cannot_share_an_email(service: DashboardService) -> None:
    operator, holder, other = await service.operator(), await service.account(), await service.account()
    again = {"name": "Again", "email": holder["email"].upper()}
    assert "another account" in (await operator.post("/admin/accounts", again)).fault(400)
    path = f"/admin/accounts/{other['id']}"
    assert "another account" in (await operator.request("PATCH", path, {"email": holder["email"]})).fault(400)
    assert (await operator.request("PATCH", path, {"email": other["email"], "name": "Same"})).data["name"] == "Same"


async def test_operator_sees_the_usage_of_all_accounts(service: DashboardService) -> None:
    operator, holder = await service.operator(), await service.holder()
    key = await known_key(service, holder)
    for _ in range(3):
        assert (await call(service, key)).status == 200
    account = holder.account["id"]

    async def is_counted() -> bool:
        lines = (await operator.get("/admin/usage?by=account&top=100")).data["series"]
        return {line["name"]: line["totals"]["requests"] for line in lines}.get(account) == 3

    await until(is_counted)
    chart = (await operator.get(f"/admin/usage?account={account}&by=method")).data
    assert [(line["name"], line["totals"]["requests"]) for line in chart["series"]] == [("eth_gasPrice", 3)]


async def test_followers_and_deliveries_are_shown(service: DashboardService) -> None:
    operator = await service.operator()
    async with connected(service.database) as connection:
        await connection.execute(
            """insert into followed_networks (network, first_block, block, block_hash, block_time)
            values ($1, 3, 10, 'x', now()) on conflict do nothing""",
            NETWORK,
        )

    async def is_shown() -> bool:
        found = (await operator.get("/admin/followers")).data["followers"]
        return [(each["network"], each["block"], each["lag_blocks"], each["state"]) for each in found] == [
            (NETWORK, 10, 6, "following")
        ]

    await until(is_shown)
    # Other tests leave webhooks in this service, and no process delivers.
    before = (await operator.get("/admin/deliveries")).data
    holder = await service.holder()
    webhook = (await holder.post("/account/webhooks", WEBHOOK)).data["id"]
    await holder.post(f"/account/webhooks/{webhook}/test", {})
    queue = (await operator.get("/admin/deliveries")).data
    assert (queue["due"], queue["parked"]) == (before["due"] + 1, before["parked"])
    assert queue["oldest_due_at"] is not None
    assert queue["webhooks"] == {**before["webhooks"], "active": before["webhooks"].get("active", 0) + 1}
    assert (await holder.request("DELETE", f"/account/webhooks/{webhook}")).status == 200
    assert (await operator.get("/admin/deliveries")).data["webhooks"] == before["webhooks"]


async def test_processes_of_all_hosts_are_shown(service: DashboardService) -> None:
    operator = await service.operator()
    report = {
        "host": "index-1",
        "instance": "i1",
        "pid": 7,
        "version": "1.0.0",
        "role": "follower",
        "valkey": None,
        "started_at": 1_800_000_000.5,
        "follows": {NETWORK: {"block": 5, "head": 7}},
    }
    async with connected(service.database) as connection:
        await connection.execute(
            "insert into processes (id, report) values ('other', $1) on conflict (id) do update set seen_at = now()",
            orjson.dumps(report).decode(),
        )

    async def is_shown() -> bool:
        found = (await operator.get("/admin/processes")).data["processes"]
        follower = next(each for each in found if each["role"] == "follower" and each["host"] == "index-1")
        assert (follower["instance"], follower["valkey"], follower["started_at"]) == (
            "i1",
            None,
            "2027-01-15T08:00:00Z",
        )
        assert follower["follows"] == [{"network": NETWORK, "block": 5, "head": 7, "lag_blocks": 2}]
        return "gateway" in {each["role"] for each in found}

    await until(is_shown)


@pytest.mark.parametrize("path", ["/admin/accounts", "/admin/networks", "/admin/live", "/admin/usage", "/admin/plans"])
async def test_operator_api_requires_sign_in(service: DashboardService, path: str) -> None:
    (await Client(service).get(path)).fault(401)
