"""What keys use, counted to the unit: after a flush, after a stop, and after a kill."""

from __future__ import annotations

import asyncio
import csv
import datetime
import io
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from tests.dashboard.service import NETWORK, Desk, Person, call, desk_on, kill
from tests.database import connected
from tests.flows.talk import Talk, post, rpc
from tests.service import until

# What these cost (config/pricing.toml).
UNITS = {"eth_gasPrice": 1, "eth_getBalance": 2, "eth_chainId": 0}


async def totals(holder: Person, query: str = "") -> dict[str, Any]:
    found: dict[str, Any] = (await holder.get(f"/account/usage?{query}")).data["totals"]
    return found


async def known_key(desk: Desk, holder: Person, **members: Any) -> str:
    """A key that both workers know; asking for it has counted nothing."""
    key = str((await holder.new_key(**members))["key"])

    async def is_known() -> bool:
        request = post(rpc("eth_chainId"), key=key, network="ethereum/nowhere")
        for _ in range(8):
            async with await Talk.open(desk.running.port) as talk:
                if (await talk.ask(request)).status == 401:
                    return False
        return True

    await until(is_known)
    return key


async def test_usage_equals_what_was_asked_to_the_unit(desk: Desk) -> None:
    holder = await desk.holder()
    key = await known_key(desk, holder)
    asked = {"eth_gasPrice": 31, "eth_getBalance": 17, "eth_chainId": 5}
    for method, times in asked.items():
        params = ["0x" + "11" * 20, "latest"] if method == "eth_getBalance" else []
        async with await Talk.open(desk.running.port) as talk:
            for _ in range(times):
                reply = await talk.ask(post(rpc(method, params), key=key, network=NETWORK))
                assert reply.headers["x-compute-units"] == str(UNITS[method])
    batch = orjson.dumps([{"jsonrpc": "2.0", "id": n, "method": "eth_gasPrice", "params": []} for n in range(7)])
    async with await Talk.open(desk.running.port) as talk:
        assert len((await talk.ask(post(batch, key=key, network=NETWORK))).json) == 7
        bad = await talk.ask(post(rpc("eth_noSuchThing"), key=key, network=NETWORK))
        assert "error" in bad.json
    requests = sum(asked.values()) + 7 + 1
    units = sum(UNITS[method] * times for method, times in asked.items()) + 7 * UNITS["eth_gasPrice"] + 1

    async def is_all() -> bool:
        found = await totals(holder)
        assert found["requests"] <= requests, found
        return bool(found["requests"] == requests)

    await until(is_all)
    found = await totals(holder)
    assert (found["units"], found["errors"], found["hits"]) == (units, 1, 0)
    assert 0 < found["p50_ms"] <= found["p99_ms"]
    chart = (await holder.get("/account/usage?by=method")).data
    by_method = {line["name"]: line["totals"]["requests"] for line in chart["series"]}
    assert by_method == {"eth_gasPrice": 38, "eth_getBalance": 17, "eth_chainId": 5, "other": 1}
    for line in chart["series"]:
        assert sum(line["requests"]) == line["totals"]["requests"]
        assert len(line["requests"]) == len(line["p99_ms"]) == len(chart["times"])


async def test_chart_is_apart_by_network_and_key_and_what_is_beyond_the_top_is_one_line(desk: Desk) -> None:
    holder = await desk.holder()
    first, second = await known_key(desk, holder, name="first"), await known_key(desk, holder, name="second")
    for key, times in ((first, 5), (second, 3)):
        for _ in range(times):
            assert (await call(desk, key)).status == 200
    assert (await call(desk, first, "eth_chainId")).status == 200

    async def is_all() -> bool:
        return bool((await totals(holder))["requests"] == 9)

    await until(is_all)
    by_key = (await holder.get("/account/usage?by=key")).data["series"]
    assert [(line["label"], line["totals"]["requests"]) for line in by_key] == [("first", 6), ("second", 3)]
    by_network = (await holder.get("/account/usage?by=network")).data["series"]
    assert [(line["name"], line["totals"]["requests"]) for line in by_network] == [(NETWORK, 9)]
    folded = (await holder.get("/account/usage?by=key&top=1")).data["series"]
    assert [(line["name"] == "other", line["totals"]["requests"]) for line in folded] == [(False, 6), (True, 3)]
    assert (await totals(holder, "method=eth_chainId"))["requests"] == 1
    assert (await totals(holder, f"key={by_key[1]['name']}"))["requests"] == 3
    assert (await totals(holder, "network=ethereum/mainnet"))["requests"] == 0


async def test_every_way_in_is_counted(desk: Desk) -> None:
    """What aiohttp answers, REST operations, and sockets."""
    holder = await desk.holder()
    key = await known_key(desk, holder)
    async with aiohttp.ClientSession() as session:
        async with session.ws_connect(f"{desk.base.replace('http', 'ws')}/ws/{NETWORK}?apiKey={key}") as socket:
            for number in range(4):
                await socket.send_json({"jsonrpc": "2.0", "id": number, "method": "eth_gasPrice", "params": []})
                await socket.receive_json(timeout=30)
        headers = {"X-API-Key": key}
        async with session.get(f"{desk.base}/wallets", headers=headers) as reply:
            assert reply.status == 200
            units = int(reply.headers["X-Compute-Units"])
        async with session.get(f"{desk.base}/wallets?page=none", headers=headers) as reply:
            assert reply.status == 400
        chunks = {**headers, "Content-Type": "application/json"}
        body = rpc("eth_gasPrice")

        async def parts() -> Any:
            yield body

        async with session.post(f"{desk.base}/rpc/{NETWORK}", data=parts(), headers=chunks) as reply:
            assert reply.status == 200

    async def is_all() -> bool:
        return bool((await totals(holder))["requests"] == 7)

    await until(is_all)
    lines = (await holder.get("/account/usage?by=method")).data["series"]
    found = {line["name"]: (line["totals"]["requests"], line["totals"]["errors"]) for line in lines}
    assert found == {"eth_gasPrice": (5, 0), "list_wallets": (2, 1)}
    assert (await totals(holder))["units"] == 5 + units + 1


async def test_table_to_take_along_has_a_row_for_each_method_and_no_formula_in_it(desk: Desk) -> None:
    holder = await desk.holder()
    key = await known_key(desk, holder, name="=cmd()")
    assert (await call(desk, key)).status == 200
    assert (await call(desk, key, "eth_chainId")).status == 200

    async def is_all() -> bool:
        return bool((await totals(holder))["requests"] == 2)

    await until(is_all)
    reply = await holder.get("/account/usage/csv?step=minute")
    assert reply.status == 400  # a day has more minutes than one chart
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


async def test_request_of_no_network_has_none_in_the_table(desk: Desk) -> None:
    holder = await desk.holder()
    key = await known_key(desk, holder)
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{desk.base}/wallets", headers={"X-API-Key": key}) as reply,
    ):
        assert reply.status == 200

    async def is_there() -> bool:
        return bool((await totals(holder))["requests"] == 1)

    await until(is_there)
    (row,) = csv.DictReader(io.StringIO((await holder.get("/account/usage/csv?step=hour")).body.decode()))
    assert (row["method"], row["network"], row["requests"]) == ("list_wallets", "", "1")


async def test_wrong_span_is_named(desk: Desk) -> None:
    holder = await desk.holder()
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


async def test_overview_tells_what_is_left_of_the_day(desk: Desk) -> None:
    holder = await desk.holder(await desk.account(plan="free"))
    key = await known_key(desk, holder)
    for _ in range(3):
        assert (await call(desk, key)).status == 200

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
        return sum(live["minutes"]["requests"]) == 3

    await until(is_live)
    rich = await desk.holder()
    assert (await rich.get("/account")).data["today"]["left"] is None


async def written(database: str) -> int:
    """What is in the store of all accounts, by the day."""
    async with connected(database) as connection:
        query = """select coalesce(sum(requests), 0)::bigint from usage u join usage_series s on s.id = u.series
            where u.step = $1 and (s.key_id <> '') = $2 and (s.network <> '') = $3 and (s.method <> '') = $4"""
        # Of one moment: a flush may come between two questions.
        async with connection.transaction(isolation="repeatable_read"):
            found = {
                await connection.fetchval(query, step, *(face >> bit & 1 == 1 for bit in range(3)))
                for step in ("minute", "hour", "day")
                for face in (0b000, 0b001, 0b010, 0b100, 0b111)
            }
    assert len(found) == 1, "minutes, hours and days, and all sums, say the same"
    return int(found.pop())


async def test_worker_that_stops_writes_all_and_one_that_is_killed_loses_what_it_had_not_flushed(
    database: str, tmp_path: Path
) -> None:
    async with desk_on(database, tmp_path) as desk:
        holder = await desk.holder()
        key = await known_key(desk, holder)
        talks = [await Talk.open(desk.running.port) for _ in range(8)]
        request = post(rpc("eth_gasPrice"), key=key, network=NETWORK)

        async def ask(talk: Talk, times: int) -> int:
            done = 0
            for _ in range(times):
                done += (await talk.ask(request)).status == 200
            return done

        asked = sum(await asyncio.gather(*(ask(talk, 50) for talk in talks)))
        assert asked == 400

        async def is_written() -> bool:
            return await written(database) == asked

        await until(is_written)
        # All that was asked longer ago than a flush takes is written: a kill does not touch it.
        victim = desk.running.worker_pids()[0]
        kill(victim)
        await until(lambda: len(pids := desk.running.worker_pids()) == 2 and victim not in pids)
        assert await written(database) == asked
        for talk in talks:
            await talk.close()
        for _ in range(20):
            assert (await call(desk, key)).status == 200
    assert await written(database) == asked + 20
