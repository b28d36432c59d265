"""The figures of all pages agree: after a scripted load, Overview, Methods, Upstreams, Usage, Accounts, Requests, Errors, Costs
and the metrics show the same."""

from __future__ import annotations

import csv
import datetime
import io
from collections import Counter
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from proxy.store.postgres.spending import SpendingStore
from tests.beacon_stub import beacon_stub
from tests.dashboard.service import NETWORK, Client, DashboardService, call, start_service
from tests.dashboard.test_usage import known_key
from tests.database import MIGRATED, Server
from tests.flows.upstream import reply
from tests.http_client import HttpClient, post, rpc
from tests.service import until

Figures = dict[str, int]
RESULTS, REVERTS, UNKNOWN, FAILED, BATCH, SOCKET, REST, WRONG, BEACON = 23, 7, 3, 4, 6, 5, 2, 3, 9
# A network with a REST API, whose provider bills each call.
BEACON_NETWORK, ROUTE, CREDITS = "ethereum-beacon/mainnet", "GET /eth/v1/beacon/blocks/{id}/root", 7


async def act(asked: dict[str, object]) -> web.StreamResponse:
    match asked["method"]:
        case "eth_call":
            return reply(asked, error={"code": 3, "message": "execution reverted"})
        case "eth_getCode":
            return web.Response(status=500)
        case method:
            return reply(asked, result=method)


async def load(service: DashboardService, key: str) -> None:
    """Calls of every kind: with results, with errors of the caller, and with failures of the upstreams."""
    call_params = [{"to": "0x" + "11" * 20}, "latest"]
    async with await HttpClient.open(service.running.port) as client:
        for _ in range(RESULTS):
            assert "result" in (await client.send(post(rpc("eth_gasPrice"), key=key, network=NETWORK))).json
        for _ in range(REVERTS):
            sent = post(rpc("eth_call", call_params), key=key, network=NETWORK)
            assert (await client.send(sent)).json["error"]["code"] == 3
        for _ in range(UNKNOWN):
            assert "error" in (await client.send(post(rpc("eth_noSuchThing"), key=key, network=NETWORK))).json
        for _ in range(FAILED):
            sent = post(rpc("eth_getCode", ["0x" + "11" * 20, "latest"]), key=key, network=NETWORK)
            failed = await client.send(sent)
            assert failed.status >= 500
            assert failed.json["error"]["reason"] == "upstream"
        batch = [{"jsonrpc": "2.0", "id": n, "method": "net_version", "params": []} for n in range(BATCH)]
        assert len((await client.send(post(orjson.dumps(batch), key=key, network=NETWORK))).json) == BATCH
    async with aiohttp.ClientSession(headers={"X-API-Key": key}) as session:
        async with session.ws_connect(f"{service.base.replace('http', 'ws')}/ws/{NETWORK}") as socket:
            for number in range(SOCKET):
                await socket.send_json({"jsonrpc": "2.0", "id": number, "method": "web3_clientVersion", "params": []})
                assert "result" in await socket.receive_json(timeout=30)
        root = f"/rest/{BEACON_NETWORK}{ROUTE.removeprefix('GET ').format(id='head')}"
        transfers = f"/transfers/ethereum-sepolia/0x{'11' * 20}?limit=0"
        wanted = [
            (root, 200, BEACON),
            ("/wallets", 200, REST),
            ("/wallets?limit=0", 400, WRONG),
            (transfers, 400, WRONG),
        ]
        for path, status, times in wanted:
            for _ in range(times):
                async with session.get(service.base + path) as found:
                    assert found.status == status


CALLS = RESULTS + REVERTS + UNKNOWN + FAILED + BATCH + SOCKET + BEACON
EXPECTED: Figures = {
    "requests": CALLS + REST + 2 * WRONG,
    "caller_errors": REVERTS + UNKNOWN + 2 * WRONG,
    "failures": FAILED,
    "upstream_failures": FAILED,
}


def picked(totals: dict[str, Any]) -> Figures:
    return {name: totals[name] for name in EXPECTED}


def summed(series: list[dict[str, Any]]) -> Figures:
    return dict(sum((Counter(picked(line["totals"])) for line in series), Counter()))


async def usage(client: Client, path: str, by: str) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get(f"{path}?by={by}")).data
    return found


async def metrics(service: DashboardService) -> dict[str, dict[tuple[str, ...], float]]:
    url = f"http://127.0.0.1:{service.running.metrics_port}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as found:
        text = await found.text()
    wanted = {
        "penstock_calls": ("method", "outcome"),
        "penstock_upstream_calls": ("upstream", "outcome"),
        "penstock_upstream_credits": ("upstream", "method"),
    }
    return {
        family.name: {
            tuple(sample.labels[label] for label in wanted[family.name]): sample.value
            for sample in family.samples
            if sample.name.endswith("_total")
        }
        for family in text_string_to_metric_families(text)
        if family.name in wanted
    }


@pytest.fixture
async def own_service(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A service that nothing else uses: its figures are those of this load alone."""
    name = await server.create(MIGRATED)
    async with beacon_stub() as stub:
        more = f'[[upstreams]]\nnetwork = "{BEACON_NETWORK}"\nurl = "{stub.url}"\ncredits = {{ "*" = {CREDITS} }}\n'
        async with start_service(server.url(name), tmp_path_factory.mktemp("tallies"), more=more) as found:
            yield found
    await server.drop(name)


async def test_pages_agree_after_a_scripted_load(own_service: DashboardService) -> None:
    service = own_service
    for upstream in service.upstreams:
        upstream.act = act
    holder, operator = await service.holder(), await service.operator()
    account = holder.account["id"]
    key = await known_key(service, holder, mode="live")
    await load(service, key)

    async def is_complete() -> bool:
        total = (await usage(operator, "/admin/usage", "total"))["totals"]
        assert total["requests"] <= EXPECTED["requests"], total
        return bool(total["requests"] == EXPECTED["requests"])

    await until(is_complete)
    # Overview and Usage of operators, by each group, and the overview of the account.
    for client, path, groups in (
        (operator, "/admin/usage", ("account", "network", "method")),
        (holder, "/account/usage", ("key", "network", "method")),
    ):
        for by in ("total", *groups):
            found = await usage(client, path, by)
            assert picked(found["totals"]) == EXPECTED, (path, by)
            assert summed(found["series"]) == EXPECTED, (path, by)
            assert sum(found["total"]["requests"]) == EXPECTED["requests"]
            assert sum(found["total"]["errors"]) == EXPECTED["caller_errors"] + EXPECTED["failures"]
    (largest,) = (await usage(operator, "/admin/usage", "account"))["series"]
    assert (largest["name"], picked(largest["totals"])) == (account, EXPECTED)
    live = (await operator.get("/admin/live")).data["minutes"]
    assert sum(live["requests"]) == EXPECTED["requests"]
    assert sum(live["errors"]) == EXPECTED["caller_errors"] + EXPECTED["failures"]
    for path in (f"/admin/accounts/{account}", "/admin/accounts"):
        shown = (await operator.get(path)).data
        assert shown.get("accounts", [shown])[0]["used_today"] == EXPECTED["requests"], path
    table = csv.DictReader(io.StringIO((await holder.get("/account/usage/csv")).body.decode()))
    assert sum(int(row["requests"]) for row in table) == EXPECTED["requests"]
    assert (await holder.get("/account")).data["today"]["used"] == EXPECTED["requests"]

    # The records of failed requests blame those whose failures usage counts. Usage does not count a 404.
    async def blamed() -> Counter[str] | None:
        found = (await holder.get("/account/requests?reason=failed&limit=50")).data["requests"]
        causes = Counter(each["blame"] for each in found if each["status"] != 404)
        return causes if causes.total() == EXPECTED["caller_errors"] + EXPECTED["failures"] else None

    causes = await until(blamed)
    assert causes["upstream"] == EXPECTED["upstream_failures"]
    assert causes["service"] == EXPECTED["failures"] - EXPECTED["upstream_failures"]
    assert causes["client"] + causes["chain"] + causes["limit"] == EXPECTED["caller_errors"]

    # Errors are grouped records.
    for client, path in ((holder, "/account/errors"), (operator, "/admin/errors")):
        alike = [each for each in (await client.get(path)).data["errors"] if each["status"] != 404]
        assert sum(each["count"] for each in alike) == causes.total(), path
        assert sum(each["count"] for each in alike if each["status"] >= 500) == EXPECTED["failures"], path

    # Methods: all calls on the network, by method as in Usage.
    async def has_hours() -> bool:
        found = (await operator.get("/admin/methods?span=day")).data["networks"]
        return bool(sum(row["calls"] for network in found for row in network["methods"]) == CALLS)

    await until(has_hours)
    by_method = {line["name"]: line["totals"] for line in (await usage(operator, "/admin/usage", "method"))["series"]}
    for span in ("hour", "day"):
        networks = (await operator.get(f"/admin/methods?span={span}")).data["networks"]
        rows = [row for network in networks for row in network["methods"]]
        assert sum(row["calls"] for row in rows) == CALLS
        for row in rows:
            totals = by_method[row["method"]]
            names = ("caller_errors", "failures", "upstream_failures")
            assert [row["calls"], *(row[name] for name in names)] == [
                totals["requests"],
                *(totals[name] for name in names),
            ]
            assert (row["p50_ms"], row["p99_ms"]) == (totals["p50_ms"], totals["p99_ms"])

    # Metrics: calls by method and outcome, and calls of each upstream as on its page.
    async def are_written() -> bool:
        return sum((await metrics(service))["penstock_calls"].values()) == CALLS

    await until(are_written)
    calls = (await metrics(service))["penstock_calls"]
    for (method, outcome), count in calls.items():
        totals = by_method[method]
        errors = {"error": totals["caller_errors"], "fault": totals["failures"]}
        assert count == errors.get(outcome, totals["requests"] - sum(errors.values())), (method, outcome)

    async def upstreams_agree() -> bool:
        networks = (await operator.get("/admin/networks")).data["networks"]
        counted = (await metrics(service))["penstock_upstream_calls"]
        upstreams = [each for network in networks for each in network["upstreams"]]
        shown = {(each["label"], name): each[name] for each in upstreams for name in ("answered", "failed")}
        return all(counted[place] == count for place, count in shown.items())

    await until(upstreams_agree)

    # Costs: the account has the credits of its own calls, and the sums with those of polls are the metrics'.
    today, spending = datetime.datetime.now(datetime.UTC).date(), SpendingStore(service.pool)

    async def credits_by_method(of: str | None = None) -> Figures:
        rows = await spending.read(today - datetime.timedelta(days=1), today, "method", of)
        return {row["name"]: row["credits"] for row in rows}

    async def costs_agree() -> bool:
        counted = (await metrics(service))["penstock_upstream_credits"]
        return {method: int(count) for (_, method), count in counted.items()} == await credits_by_method()

    await until(costs_agree)
    assert await credits_by_method(account) == {ROUTE: BEACON * CREDITS}

    async def costs_page_agrees() -> bool:
        page = (await operator.get("/admin/costs?days=2")).data
        counted = sum((await metrics(service))["penstock_upstream_credits"].values())
        sums = [
            page["total"],
            *({"credits": sum(row["credits"] for row in page[by])} for by in ("methods", "upstreams")),
        ]
        (row,) = page["accounts"]
        assert [row[name] for name in ("account_id", "credits")] == [account, BEACON * CREDITS]
        assert row["requests"] == EXPECTED["requests"]
        assert row["units"] == sum(live["units"])
        assert page["total"]["credits"] == page["own"]["credits"] + row["credits"]
        return {each["credits"] for each in sums} == {counted}

    await until(costs_page_agrees)
    assert (await call(service, key)).status == 200
