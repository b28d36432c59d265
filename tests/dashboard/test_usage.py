"""Usage accounting, exact to the unit: after a flush, after a stop, and after a kill."""

from __future__ import annotations

import asyncio
import csv
import datetime
import io
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from proxy.store.postgres.usage import UsageStore
from tests.dashboard.service import NETWORK, Client, DashboardService, call, kill, start_service
from tests.database import connected, pooled
from tests.http_client import HttpClient, post, rpc
from tests.service import until

# Prices from config/pricing.toml.
UNITS = {"eth_gasPrice": 1, "eth_getBalance": 2, "eth_chainId": 0}


async def totals(holder: Client, query: str = "") -> dict[str, Any]:
    found: dict[str, Any] = (await holder.get(f"/account/usage?{query}")).data["totals"]
    return found


async def known_key(service: DashboardService, holder: Client, **members: Any) -> str:
    """Create a key and wait until both workers accept it, without counting usage."""
    key = str((await holder.new_key(**members))["key"])

    async def is_known() -> bool:
        request = post(rpc("eth_chainId"), key=key, network="ethereum/nowhere")
        for _ in range(8):
            async with await HttpClient.open(service.running.port) as client:
                if (await client.send(request)).status == 401:
                    return False
        return True

    await until(is_known)
    return key


async def test_usage_matches_the_calls_to_the_unit(service: DashboardService) -> None:
    holder = await service.holder()
    key = await known_key(service, holder)
    calls = {"eth_gasPrice": 31, "eth_getBalance": 17, "eth_chainId": 5}
    for method, times in calls.items():
        params = ["0x" + "11" * 20, "latest"] if method == "eth_getBalance" else []
        async with await HttpClient.open(service.running.port) as client:
            for _ in range(times):
                reply = await client.send(post(rpc(method, params), key=key, network=NETWORK))
                assert reply.headers["x-compute-units"] == str(UNITS[method])
    batch = orjson.dumps([{"jsonrpc": "2.0", "id": n, "method": "eth_gasPrice", "params": []} for n in range(7)])
    async with await HttpClient.open(service.running.port) as client:
        assert len((await client.send(post(batch, key=key, network=NETWORK))).json) == 7
        bad = await client.send(post(rpc("eth_noSuchThing"), key=key, network=NETWORK))
        assert "error" in bad.json
    requests = sum(calls.values()) + 7 + 1
    units = sum(UNITS[method] * times for method, times in calls.items()) + 7 * UNITS["eth_gasPrice"] + 1

    async def is_complete() -> bool:
        found = await totals(holder)
        assert found["requests"] <= requests, found
        return bool(found["requests"] == requests)

    await until(is_complete)
    found = await totals(holder)
    assert (found["units"], found["errors"], found["hits"]) == (units, 1, 0)
    assert 0 < found["p50_ms"] <= found["p99_ms"]
    chart = (await holder.get("/account/usage?by=method")).data
    by_method = {line["name"]: line["totals"]["requests"] for line in chart["series"]}
    assert by_method == {"eth_gasPrice": 38, "eth_getBalance": 17, "eth_chainId": 5, "other": 1}
    for line in chart["series"]:
        assert sum(line["requests"]) == line["totals"]["requests"]
        assert len(line["requests"]) == len(line["p99_ms"]) == len(chart["times"])


async def test_chart_groups_by_network_and_key_and_folds_the_rest_into_other(service: DashboardService) -> None:
    holder = await service.holder()
    first, second = await known_key(service, holder, name="first"), await known_key(service, holder, name="second")
    for key, times in ((first, 5), (second, 3)):
        for _ in range(times):
            assert (await call(service, key)).status == 200
    assert (await call(service, first, "eth_chainId")).status == 200

    async def is_complete() -> bool:
        return bool((await totals(holder))["requests"] == 9)

    await until(is_complete)
    by_key = (await holder.get("/account/usage?by=key")).data["series"]
    assert [(line["label"], line["totals"]["requests"]) for line in by_key] == [("first", 6), ("second", 3)]
    by_network = (await holder.get("/account/usage?by=network")).data["series"]
    assert [(line["name"], line["totals"]["requests"]) for line in by_network] == [(NETWORK, 9)]
    folded = (await holder.get("/account/usage?by=key&top=1")).data
    found = [(line["name"] == "other", line["totals"]["requests"]) for line in folded["series"]]
    assert found == [(False, 6), (True, 3)]
    whole = (await holder.get("/account/usage?by=total")).data
    assert folded["total"] == whole["total"] == {name: whole["series"][0][name] for name in whole["total"]}
    assert folded["totals"] == whole["totals"]
    assert (await totals(holder, "method=eth_chainId"))["requests"] == 1
    assert (await totals(holder, f"key={by_key[1]['name']}"))["requests"] == 3
    assert (await totals(holder, "network=ethereum/mainnet"))["requests"] == 0


async def test_every_entry_point_is_counted(service: DashboardService) -> None:
    """Calls that aiohttp handles, REST operations, and sockets."""
    holder = await service.holder()
    key = await known_key(service, holder)
    async with aiohttp.ClientSession() as session:
        async with session.ws_connect(f"{service.base.replace('http', 'ws')}/ws/{NETWORK}?apiKey={key}") as socket:
            for number in range(4):
                await socket.send_json({"jsonrpc": "2.0", "id": number, "method": "eth_gasPrice", "params": []})
                await socket.receive_json(timeout=30)
        headers = {"X-API-Key": key}
        async with session.get(f"{service.base}/wallets", headers=headers) as reply:
            assert reply.status == 200
            units = int(reply.headers["X-Compute-Units"])
        async with session.get(f"{service.base}/wallets?page=none", headers=headers) as reply:
            assert reply.status == 400
        chunks = {**headers, "Content-Type": "application/json"}
        body = rpc("eth_gasPrice")

        async def parts() -> Any:
            yield body

        async with session.post(f"{service.base}/rpc/{NETWORK}", data=parts(), headers=chunks) as reply:
            assert reply.status == 200

    async def is_complete() -> bool:
        return bool((await totals(holder))["requests"] == 7)

    await until(is_complete)
    lines = (await holder.get("/account/usage?by=method")).data["series"]
    found = {line["name"]: (line["totals"]["requests"], line["totals"]["errors"]) for line in lines}
    assert found == {"eth_gasPrice": (5, 0), "list_wallets": (2, 1)}
    assert (await totals(holder))["units"] == 5 + units + 1


async def test_csv_has_a_row_per_method_and_no_formulas(service: DashboardService) -> None:
    holder = await service.holder()
    key = await known_key(service, holder, name="=cmd()")
    assert (await call(service, key)).status == 200
    assert (await call(service, key, "eth_chainId")).status == 200

    async def is_complete() -> bool:
        return bool((await totals(holder))["requests"] == 2)

    await until(is_complete)
    reply = await holder.get("/account/usage/csv?step=minute")
    assert reply.status == 400  # a day has more minutes than a chart may have points
    now = datetime.datetime.now(datetime.UTC)
    first = (now - datetime.timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    reply = await holder.get(f"/account/usage/csv?step=minute&from={first}")
    assert reply.headers["Content-Type"].startswith("text/csv")
    assert "attachment" in reply.headers["Content-Disposition"]
    rows = list(csv.DictReader(io.StringIO(reply.body.decode())))
    only = await holder.get(f"/account/usage/csv?step=minute&from={first}&method=eth_chainId&network={NETWORK}")
    assert [row["method"] for row in csv.DictReader(io.StringIO(only.body.decode()))] == ["eth_chainId"]
    assert {(row["method"], row["requests"], row["key_name"]) for row in rows} == {
        ("eth_gasPrice", "1", "'=cmd()"),
        ("eth_chainId", "1", "'=cmd()"),
    }


async def test_csv_network_is_empty_for_a_request_without_one(service: DashboardService) -> None:
    holder = await service.holder()
    key = await known_key(service, holder)
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{service.base}/wallets", headers={"X-API-Key": key}) as reply,
    ):
        assert reply.status == 200

    async def is_there() -> bool:
        return bool((await totals(holder))["requests"] == 1)

    await until(is_there)
    (row,) = csv.DictReader(io.StringIO((await holder.get("/account/usage/csv?step=hour")).body.decode()))
    assert (row["method"], row["network"], row["requests"]) == ("list_wallets", "", "1")


async def test_error_names_the_invalid_usage_parameter(service: DashboardService) -> None:
    holder = await service.holder()
    for query, named in (
        ("from=yesterday", "from"),
        ("from=2026-01-02T00:00:00Z&to=2026-01-01T00:00:00Z", "to"),
        ("step=week", "step"),
        ("step=minute", "step"),
        ("top=0", "top"),
        ("by=colour", "by"),
        ("from=0001-01-01&to=9999-12-31&step=day", "step"),
        ("to=0001-01-01", "to"),
        ("to=9999-12-31T23:59:59-12:00", "to"),
        ("method=%00", "method"),
    ):
        assert named in (await holder.get(f"/account/usage?{query}")).fault(400), query


async def test_overview_includes_the_remaining_daily_quota(service: DashboardService) -> None:
    holder = await service.holder(await service.account(plan="free"))
    key = await known_key(service, holder)
    for _ in range(3):
        assert (await call(service, key)).status == 200

    async def is_counted() -> bool:
        return bool((await holder.get("/account")).data["today"]["used"] >= 3)

    await until(is_counted)
    found = (await holder.get("/account")).data
    assert found["today"]["left"] == 100_000 - found["today"]["used"]
    assert found["limits"] == {"requests_per_second": 10, "units_per_second": 200, "requests_per_day": 100_000}
    assert found["plan"]["webhook_deliveries_per_day"] == 1000

    async def is_live() -> bool:
        live = (await holder.get("/account/live")).data
        assert len(live["times"]) == len(live["minutes"]["requests"])
        return bool(sum(live["minutes"]["requests"]) == 3)

    await until(is_live)
    rich = await service.holder()
    assert (await rich.get("/account")).data["today"]["left"] is None


async def written(database: str) -> set[int]:
    """The requests of all accounts in the database, by each step and aggregate: one number if all of them agree."""
    async with pooled(database, size=1) as pool:
        await UsageStore(pool).sum_up(0.0)
    async with connected(database) as connection:
        query = """select coalesce(sum(requests), 0)::bigint from usage u join usage_series s on s.id = u.series
            where u.step = $1 and (s.key_id <> '') = $2 and (s.network <> '') = $3 and (s.method <> '') = $4"""
        # One snapshot: a flush may happen between two queries.
        async with connection.transaction(isolation="repeatable_read"):
            return {
                await connection.fetchval(query, step, *(face >> bit & 1 == 1 for bit in range(3)))
                for step in ("minute", "hour", "day")
                for face in (0b000, 0b001, 0b010, 0b100, 0b111)
            }


async def test_stopped_worker_writes_everything_and_killed_worker_keeps_what_it_flushed(
    database: str, tmp_path: Path
) -> None:
    async with start_service(database, tmp_path) as service:
        holder = await service.holder()
        key = await known_key(service, holder)
        clients = [await HttpClient.open(service.running.port) for _ in range(8)]
        request = post(rpc("eth_gasPrice"), key=key, network=NETWORK)

        async def call_often(client: HttpClient, times: int) -> int:
            done = 0
            for _ in range(times):
                done += (await client.send(request)).status == 200
            return done

        calls = sum(await asyncio.gather(*(call_often(client, 50) for client in clients)))
        assert calls == 400

        async def is_written() -> bool:
            return await written(database) == {calls}

        await until(is_written)
        # A kill does not lose what is already flushed.
        victim = service.running.worker_pids()[0]
        kill(victim)
        await until(lambda: len(pids := service.running.worker_pids()) == 2 and victim not in pids)
        assert await written(database) == {calls}
        for client in clients:
            await client.close()
        for _ in range(20):
            assert (await call(service, key)).status == 200
    assert await written(database) == {calls + 20}
