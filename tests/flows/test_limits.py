"""Both buckets of a key over all workers: admitted and refused requests, and the rate headers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
import pytest

from tests.flows.load import Tally, saturate
from tests.flows.upstream import Upstream
from tests.http_client import HttpClient, Reply, close_all, post, request, rpc, send_once, to_every_worker
from tests.service import Service

SATURATION_S = 4.2
# 50 units each: the most expensive call.
DEAR = "trace_replayTransaction"
SEPOLIA = "ethereum/sepolia"


async def a_key(service: Service, plan: str = "free", *words: str) -> str:
    """The only key of a new account."""
    account = await service.new_account(plan)
    return str((await service.new_key(account["id"], *words))["key"])


def batch(method: str, items: int) -> bytes:
    return b"[" + b",".join(rpc(method, id=index) for index in range(items)) + b"]"


def check_headers(reply: Reply, limit: int) -> None:
    assert reply.headers["x-ratelimit-limit"] == str(limit)
    assert 0 <= int(reply.headers["x-ratelimit-remaining"]) <= limit
    assert -1 <= int(reply.headers["x-ratelimit-reset"]) - reply.at <= 2.5


def check_refusals(tally: Tally, limit: int) -> None:
    assert not tally.others
    assert tally.refused
    for reply in tally.refused:
        reply.fault(429)
        assert int(reply.headers["retry-after"]) >= 1
        check_headers(reply, limit)


async def test_buckets_are_exact_over_four_workers(service: Service, upstream: Upstream, record_property: Any) -> None:
    """Saturate Free and Growth by requests, and Growth by units, at once and on every worker."""
    assert len(service.worker_pids()) == 4
    cases: dict[str, tuple[str, bytes, float, int]] = {
        # name: plan, body, admitted per second, the plan's requests per second
        "free requests": ("free", rpc("eth_blockNumber"), 10, 10),
        "growth requests": ("growth", rpc("eth_blockNumber"), 100, 100),
        "growth units": ("growth", rpc(DEAR), 2000 / 50, 100),
    }
    keys = [await a_key(service, plan) for plan, _, _, _ in cases.values()]
    held = [await to_every_worker(service, at_least=2) for _ in cases]
    async with asyncio.TaskGroup() as group:
        runs = [
            group.create_task(
                saturate(
                    [client for clients in held[index].values() for client in clients],
                    post(body, key=keys[index], network=SEPOLIA),
                    for_s=SATURATION_S,
                )
            )
            for index, (_, body, _, _) in enumerate(cases.values())
        ]
    for run, (name, (_, _, rate, limit)) in zip(runs, cases.items(), strict=True):
        tally = run.result()
        least, most = tally.bounds(rate, rate)
        record_property(name, f"{tally}, allowed {least} to {most}")
        print(name, tally, f"allowed {least} to {most}")
        assert least <= tally.admitted <= most, (name, tally, least, most)
        check_refusals(tally, limit)
    for clients in held:
        await close_all(clients)


async def test_free_key_gets_ten_requests_at_once_over_all_workers(service: Service) -> None:
    key = await a_key(service)
    held = await to_every_worker(service, at_least=6)
    clients = [client for clients in held.values() for client in clients]
    sent = time.monotonic()
    replies = await asyncio.gather(*(client.call(key=key) for client in clients))
    took = time.monotonic() - sent
    admitted = sum(reply.status == 200 for reply in replies)
    assert 10 <= admitted <= 10 + 10 * took
    assert {reply.status for reply in replies} == {200, 429}
    await close_all(held)


async def test_keys_of_an_account_share_its_rate_over_all_workers(service: Service) -> None:
    """Ten keys, used on every worker at once, get what one key gets: a tenth each is not a right, but no more in all."""
    account = await service.new_account("free")
    keys = [str((await service.new_key(account["id"]))["key"]) for _ in range(10)]
    held = await to_every_worker(service, at_least=6)
    clients = [client for clients in held.values() for client in clients]
    sent = time.monotonic()
    replies = await asyncio.gather(*(client.call(key=keys[index % 10]) for index, client in enumerate(clients)))
    took = time.monotonic() - sent
    assert 10 <= sum(reply.status == 200 for reply in replies) <= 10 + 10 * took
    refused = [reply for reply in replies if reply.status == 429]
    assert "for the account" in refused[0].fault(429)["message"]
    for reply in refused:
        check_headers(reply, 10)
    await close_all(held)


async def test_headers_describe_the_tighter_of_the_account_and_the_key(service: Service) -> None:
    account = await service.new_account("free", "--requests-per-second", "1000")
    own = (await service.new_key(account["id"], "--requests-per-second", "2"))["key"]
    other = (await service.new_key(account["id"]))["key"]
    async with await HttpClient.open(service.port) as client:
        assert (await client.call(key=other)).headers["x-ratelimit-limit"] == "1000"
        assert (await client.call(key=own)).headers["x-ratelimit-limit"] == "2"
        while (reply := await client.call(key=own)).status == 200:
            check_headers(reply, 2)
        assert "2 and 200 for this key" in reply.fault(429)["message"]
        assert (await client.call(key=other)).status == 200
        await service.cli_json("accounts", "set", account["id"], "--requests-per-second", "2")
        await every_worker_reports(service, other, "2")


async def test_key_above_the_plan_is_refused(service: Service) -> None:
    account = await service.new_account("free")
    words = ("keys", "create", "--account", account["id"])
    made = [await service.cli_json(*words) for _ in range(10)]
    failed = await service.cli(*words)
    assert failed.returncode == 1
    assert "plan allows 10 API keys: revoke one first" in failed.stderr
    await service.cli_json("keys", "rotate", made[0]["id"])
    await service.cli_json("keys", "revoke", made[1]["id"])
    assert await service.cli_json(*words)


@pytest.mark.parametrize(
    ("body", "path", "status"),
    [
        (rpc("eth_chainId"), "dev/mainnet", 200),
        (rpc("eth_nope"), "dev/mainnet", 200),
        (b"{", "dev/mainnet", 400),
        (rpc("eth_sendRawTransaction", ["0x00"]), "dev/mainnet", 403),
        (rpc("eth_chainId"), "dev/nowhere", 404),
        (rpc("eth_chainId"), "polygon/mainnet", 404),
    ],
)
async def test_every_reply_to_a_key_has_the_rate_headers(
    service: Service, reading_key: str, body: bytes, path: str, status: int
) -> None:
    reply = await send_once(service, post(body, key=reading_key, network=path))
    assert reply.status == status
    check_headers(reply, 1000)


@pytest.mark.parametrize(("target", "status"), [("/v1/nope", 404), ("/v1/rpc/dev/mainnet", 405)])
async def test_reply_of_the_router_has_the_rate_headers(
    service: Service, reading_key: str, target: str, status: int
) -> None:
    reply = await send_once(service, request("GET", target, key=reading_key))
    assert reply.status == status
    check_headers(reply, 1000)


@pytest.mark.parametrize(("target", "status"), [("/healthz", 200), ("/v1/openapi.json", 200), ("/docs/nope.js", 404)])
async def test_public_page_has_the_rate_headers_for_a_key(
    service: Service, reading_key: str, target: str, status: int
) -> None:
    reply = await send_once(service, request("GET", target, key=reading_key))
    assert reply.status == status
    check_headers(reply, 1000)


async def test_reply_to_a_too_large_head_has_the_rate_headers(service: Service, reading_key: str) -> None:
    wide = {f"X-{index}": "a" * 4000 for index in range(5)}
    reply = await send_once(service, post(rpc("eth_chainId"), key=reading_key, **wide))
    assert "head" in reply.fault(431)["message"]
    check_headers(reply, 1000)


async def test_key_refused_for_its_origin_gets_the_rate_headers(service: Service) -> None:
    account = await service.new_account("free", "--requests-per-second", "1000")
    restricted = await service.new_key(account["id"], "--allow-ip", "203.0.113.0/24")
    reply = await send_once(service, post(rpc("eth_chainId"), key=str(restricted["key"])))
    assert "address" in reply.fault(403)["message"]
    check_headers(reply, 1000)


@pytest.fixture(scope="module")
async def reading_key(service: Service) -> str:
    account = await service.new_account("free", "--requests-per-second", "1000")
    return str((await service.new_key(account["id"], "--scope", "rpc:read"))["key"])


async def test_refused_requests_cost_nothing(service: Service) -> None:
    """Wrong scope, wrong network, malformed, wrong type: the bucket stays full."""
    key = await a_key(service, "free", "--scope", "rpc:read")
    refusals = [
        post(rpc("eth_sendRawTransaction", ["0x00"]), key=key),
        post(rpc("eth_chainId"), key=key, network="dev/nowhere"),
        post(b"[]", key=key),
        post(b"x", key=key, Content_Type="text/plain"),
    ]
    async with await HttpClient.open(service.port) as client:
        for data in refusals * 5:
            reply = await client.send(data)
            assert reply.status in (400, 403, 404, 415)
            assert reply.headers["x-ratelimit-remaining"] == "10"
        reply = await client.call(key=key)
    assert reply.status == 200
    assert reply.headers["x-ratelimit-remaining"] == "9"


async def test_call_of_an_unknown_method_costs_a_request(service: Service) -> None:
    """It gets a reply; otherwise a flood of unknown methods would be free."""
    key = await a_key(service)
    async with await HttpClient.open(service.port) as client:
        remaining = [int((await client.call("eth_nope", key=key)).headers["x-ratelimit-remaining"]) for _ in range(3)]
    assert remaining == [9, 8, 7]


async def test_batch_larger_than_the_plan_is_answered_as_the_buckets_refill(
    service: Service, upstream: Upstream
) -> None:
    key = await a_key(service)
    by_requests = await send_once(service, post(batch("eth_blockNumber", 15), key=key, network=SEPOLIA))
    assert [item["id"] for item in by_requests.json] == list(range(15))
    assert all("result" in item for item in by_requests.json)
    assert by_requests.headers["x-compute-units"] == "15"
    by_units = await send_once(service, post(batch(DEAR, 5), key=key, network=SEPOLIA))
    assert all("result" in item for item in by_units.json)
    assert by_units.headers["x-compute-units"] == "250"


async def test_batch_items_are_answered_individually_in_order(service: Service, upstream: Upstream) -> None:
    key = await a_key(service, "growth", "--scope", "rpc:read")
    items = [
        orjson.loads(rpc("eth_blockNumber", id="a")),
        orjson.loads(rpc("eth_sendRawTransaction", ["0x00"], id=2)),
        orjson.loads(rpc("eth_nope", id=3)),
        {"jsonrpc": "2.0", "method": "eth_blockNumber", "params": []},
        7,
        orjson.loads(rpc("eth_gasPrice", id=5)),
    ]
    reply = await send_once(service, post(orjson.dumps(items), key=key, network=SEPOLIA))
    assert reply.status == 200
    assert [item.get("id") for item in reply.json] == ["a", 2, 3, None, 5]
    assert [item.get("error", {}).get("code") for item in reply.json] == [None, -32016, -32601, -32600, None]
    assert 94 <= int(reply.headers["x-ratelimit-remaining"]) < 100


async def test_limit_changes_apply_while_the_service_runs(service: Service) -> None:
    account = await service.new_account("free", "--requests-per-second", "7")
    made = await service.new_key(account["id"])
    assert (await send_once(service, post(rpc("eth_chainId"), key=made["key"]))).headers["x-ratelimit-limit"] == "7"
    await service.cli_json("keys", "set", made["id"], "--requests-per-second", "3")
    await every_worker_reports(service, made["key"], "3")
    await service.cli_json("keys", "set", made["id"], "--requests-per-second", "-1")
    await every_worker_reports(service, made["key"], "7")
    await service.cli_json("accounts", "set", account["id"], "--requests-per-second", "-1", "--plan", "growth")
    await every_worker_reports(service, made["key"], "100")


async def every_worker_reports(service: Service, key: str, limit: str) -> None:
    held = await to_every_worker(service)
    deadline = time.monotonic() + 1.5
    for clients in held.values():
        while (said := (await clients[0].call("eth_chainId", key=key)).headers["x-ratelimit-limit"]) != limit:
            assert time.monotonic() < deadline, said
    await close_all(held)
