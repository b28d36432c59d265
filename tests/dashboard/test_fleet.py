"""What operators see of all workers, and what they tell them."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import pytest

from tests.dashboard.service import NETWORK, Desk, Person, call
from tests.dashboard.test_usage import known_key
from tests.database import connected
from tests.flows.talk import Talk, post, rpc
from tests.service import until


async def _is(found: Awaitable[int], wanted: int) -> bool:
    return await found == wanted


async def upstreams(operator: Person) -> list[dict[str, Any]]:
    networks = (await operator.get("/admin/networks")).data["networks"]
    found: list[dict[str, Any]] = next(each for each in networks if each["network"] == NETWORK)["upstreams"]
    return found


async def test_health_of_upstreams_is_gathered_over_all_workers(desk: Desk) -> None:
    operator, holder = await desk.operator(), await desk.holder()
    key = await known_key(desk, holder)

    async def is_whole() -> bool:
        found = (await operator.get("/admin/networks")).data
        return bool(found["workers"] == 2 and all(each["workers"] == 2 for each in await upstreams(operator)))

    await until(is_whole)
    before = sum(each["answered"] for each in await upstreams(operator))
    for _ in range(12):
        assert (await call(desk, key)).status == 200

    async def is_counted() -> bool:
        return sum(each["answered"] for each in await upstreams(operator)) >= before + 12

    await until(is_counted)
    for each in await upstreams(operator):
        assert (each["state"], each["breaker"], each["cordoned"], each["cordon"]) == ("up", "closed", False, None)
        assert each["label"].startswith(f"{NETWORK}#")
        assert each["head"] == 16
        assert each["lag_blocks"] == 0
    text = (await operator.get("/admin/live")).body.decode()
    assert "127.0.0.1:" not in text, "an upstream's address is nobody's business"
    live = (await operator.get("/admin/live")).data
    assert len(live["workers"]) == 2
    assert {each["pid"] for each in live["workers"]} == set(desk.running.worker_pids())


async def test_cordon_moves_the_traffic_of_all_workers_and_uncordon_brings_it_back(desk: Desk) -> None:
    operator, holder = await desk.operator(), await desk.holder()
    key = await known_key(desk, holder)
    await until(lambda: upstreams(operator))
    first = next(each for each in await upstreams(operator) if each["label"].endswith("#1"))
    request = post(rpc("eth_gasPrice"), key=key, network=NETWORK)
    talks = [await Talk.open(desk.running.port) for _ in range(12)]  # enough that both workers have some

    async def asked_of() -> tuple[int, int]:
        """How many of a round of calls each upstream was asked."""
        before = [upstream.calls for upstream in desk.upstreams]
        for talk in talks:
            assert (await talk.ask(request)).status == 200
        one, other = (upstream.calls - was for upstream, was in zip(desk.upstreams, before, strict=True))
        return one, other

    async def has_moved() -> bool:
        return (await asked_of())[0] == 0

    async def is_back() -> bool:
        return (await asked_of())[0] > 0

    await until(is_back)
    reply = await operator.post(f"/admin/upstreams/{first['id']}/cordon", {"reason": "maintenance"})
    assert reply.data == {"id": first["id"], "label": first["label"], "cordoned": True}
    try:
        await until(has_moved)
        assert await asked_of() == (0, len(talks))

        async def is_shown() -> bool:
            found = next(each for each in await upstreams(operator) if each["id"] == first["id"])
            return bool(found["state"] == "cordoned" and found["cordon"]["reason"] == "maintenance")

        await until(is_shown)
    finally:
        reply = await operator.post(f"/admin/upstreams/{first['id']}/uncordon")
        assert reply.data["cordoned"] is False
    await until(is_back)
    for talk in talks:
        await talk.close()


async def test_upstream_that_is_not_there_cannot_be_cordoned(desk: Desk) -> None:
    operator, holder = await desk.operator(), await desk.holder()
    (await operator.post("/admin/upstreams/0000000000000000/cordon", {})).fault(404)
    (await holder.post("/admin/upstreams/0000000000000000/cordon", {})).fault(401)


async def test_accounts_are_made_found_changed_and_given_other_limits(desk: Desk) -> None:
    operator = await desk.operator()
    body = {"name": "Zebra", "email": "zebra@example.com", "plan": "growth", "requests_per_day": 7}
    made = await operator.post("/admin/accounts", body)
    assert made.status == 201
    account = made.data
    assert account["limits"] == {"requests_per_second": None, "units_per_second": None, "requests_per_day": 7}
    found = (await operator.get("/admin/accounts?search=ZEBRA")).data
    assert [each["id"] for each in found["accounts"]] == [account["id"]]
    assert found["total"] == 1
    path = f"/admin/accounts/{account['id']}"
    changed = (await operator.ask("PATCH", path, {"plan": "free", "requests_per_day": None})).data
    assert (changed["plan"], changed["limits"]["requests_per_day"]) == ("free", None)
    assert (await operator.get(path)).data["used_today"] == 0
    assert (await operator.get(f"{path}/keys")).data == {"keys": []}
    assert "plan" in (await operator.ask("PATCH", path, {"plan": "golden"})).fault(400)
    (await operator.get("/admin/accounts/acct_0")).fault(404)
    (await operator.ask("PATCH", "/admin/accounts/acct_0", {"name": "x"})).fault(404)
    plans = (await operator.get("/admin/plans")).data["plans"]
    assert [plan["name"] for plan in plans] == ["free", "growth", "enterprise"]


async def test_changed_plan_reaches_the_keys_of_the_account(desk: Desk) -> None:
    operator = await desk.operator()
    holder = await desk.holder(await desk.account(plan="growth"))
    key = await known_key(desk, holder)
    assert (await call(desk, key)).headers["X-RateLimit-Limit"] == "100"
    await operator.ask("PATCH", f"/admin/accounts/{holder.account['id']}", {"requests_per_second": 33})

    async def is_everywhere() -> bool:
        return {(await call(desk, key)).headers["X-RateLimit-Limit"] for _ in range(8)} == {"33"}

    await until(is_everywhere)


async def test_lowered_limit_of_an_account_holds_for_keys_with_their_own(desk: Desk) -> None:
    operator = await desk.operator()
    holder = await desk.holder(await desk.account(plan="growth"))
    key = await known_key(desk, holder, requests_per_second=50)
    assert (await call(desk, key)).headers["X-RateLimit-Limit"] == "50"

    for change, limit in (({"requests_per_second": 7}, "7"), ({"requests_per_second": None, "plan": "free"}, "10")):
        await operator.ask("PATCH", f"/admin/accounts/{holder.account['id']}", change)

        async def is_everywhere(limit: str = limit) -> bool:
            return {(await call(desk, key)).headers["X-RateLimit-Limit"] for _ in range(8)} == {limit}

        await until(is_everywhere)


async def test_list_of_accounts_tells_what_each_used_today(desk: Desk) -> None:
    operator = await desk.operator()
    for plan in (
        "free",
        "enterprise",
    ):  # a worker leases much of a day at once; where there is no limit it leases nothing
        holder = await desk.holder(await desk.account(plan=plan))
        key = await known_key(desk, holder)
        for _ in range(3):
            assert (await call(desk, key)).status == 200

        async def used(account: str = holder.account["id"]) -> int:
            (found,) = (await operator.get(f"/admin/accounts?search={account}")).data["accounts"]
            assert found["used_today"] <= 3, found
            return int(found["used_today"])

        await until(lambda used=used: _is(used(), 3))
        assert (await operator.get(f"/admin/accounts/{holder.account['id']}")).data["used_today"] == 3


async def test_page_beyond_the_last_still_says_how_many_accounts_there_are(desk: Desk) -> None:
    operator = await desk.operator()
    found = (await operator.get("/admin/accounts?page=999")).data
    assert found["accounts"] == []
    assert found["total"] > 0


async def test_two_accounts_cannot_have_one_email(desk: Desk) -> None:
    operator, holder, other = await desk.operator(), await desk.account(), await desk.account()
    again = {"name": "Again", "email": holder["email"].upper()}
    assert "another account" in (await operator.post("/admin/accounts", again)).fault(400)
    path = f"/admin/accounts/{other['id']}"
    assert "another account" in (await operator.ask("PATCH", path, {"email": holder["email"]})).fault(400)
    assert (await operator.ask("PATCH", path, {"email": other["email"], "name": "Same"})).data["name"] == "Same"


async def test_operator_sees_the_usage_of_all_accounts(desk: Desk) -> None:
    operator, holder = await desk.operator(), await desk.holder()
    key = await known_key(desk, holder)
    for _ in range(3):
        assert (await call(desk, key)).status == 200
    account = holder.account["id"]

    async def is_counted() -> bool:
        lines = (await operator.get("/admin/usage?by=account&top=100")).data["series"]
        return {line["name"]: line["totals"]["requests"] for line in lines}.get(account) == 3

    await until(is_counted)
    chart = (await operator.get(f"/admin/usage?account={account}&by=method")).data
    assert [(line["name"], line["totals"]["requests"]) for line in chart["series"]] == [("eth_gasPrice", 3)]


async def test_followers_and_deliveries_are_shown(desk: Desk) -> None:
    operator = await desk.operator()
    async with connected(desk.database) as connection:
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
    queue = (await operator.get("/admin/deliveries")).data
    assert (queue["due"], queue["late"], queue["parked"], queue["webhooks"]) == (0, 0, 0, {})


@pytest.mark.parametrize("path", ["/admin/accounts", "/admin/networks", "/admin/live", "/admin/usage", "/admin/plans"])
async def test_nobody_but_operators_gets_in(desk: Desk, path: str) -> None:
    (await Person(desk).get(path)).fault(401)
