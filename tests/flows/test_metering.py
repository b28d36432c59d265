"""Prices and counts of calls: exact to the unit, with a closed set of metric labels."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.core.access import Limits
from proxy.core.pricing import size_units
from proxy.telemetry import CallCollector
from tests.http_client import Reply, request, rpc
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import Refused
from tests.service import until
from tests.shipped_tables import TABLES
from tests.web.worker import on_uvloop

METHODS = {name: method for name, method in TABLES.methods["evm"].items() if not method.chains}
EVM = {name: method.price for name, method in METHODS.items()}
ADDRESS = "0x" + "ab" * 20
TX = "0x" + "cd" * 32
ARCHIVE = TABLES.prices.archive_minimum


def units(reply: Reply) -> int:
    return int(reply.headers["x-compute-units"])


def tally(harness: RpcHarness, method: str) -> Any:
    harness.worker.app.usage.gather()
    return harness.worker.app.tallies.of(harness.network, method)


def charged(harness: RpcHarness) -> int:
    """Return the units charged for all calls, from the metrics."""
    harness.worker.app.usage.gather()
    plans = (*harness.route.policies.values(), harness.route.unknown)
    return sum(plan.tally.units for plan in plans)


def params_of(method: str) -> list[Any]:
    at = METHODS[method].block_at
    if at is None or METHODS[method].span:
        return [{}] if at is not None else [TX]
    return [*[ADDRESS] * at, "latest"]


@pytest.mark.parametrize("alchemy_methods", [True, False])
@on_uvloop
async def test_every_method_costs_its_listed_price(alchemy_methods: bool) -> None:
    """The methods that the API spec of the service lists. Those that are switched off are not among them."""
    section = {"alchemy_methods": alchemy_methods}
    async with rpc_harness(1, rpc=section) as harness, await harness.worker.connect() as client:
        document = (await client.send(request("GET", "/v1/openapi.json"))).json
        listed = document["x-units"]["methods"]["evm"]
        assert ("alchemy_getAssetTransfers" in listed) == alchemy_methods
        for name, price in listed.items():
            if name not in METHODS:
                continue  # of other chains
            kind = METHODS[name].kind
            call = rpc(name, params_of(name))
            reply = await client.send(harness.worker.post(call, network=harness.network))
            assert reply.status == 200, (name, reply)
            assert units(reply) == (1 if kind == "subscription" else price), name


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(
    ("block", "is_old"),
    [
        (lambda head: hex(head - 128), True),
        (lambda head: hex(head - 127), False),
        (lambda head: hex(head), False),
        (lambda head: "0x0", True),
        (lambda head: "0x" + "0" * 20, True),
        (lambda head: "earliest", True),
        (lambda head: "latest", False),
        (lambda head: {"blockNumber": "0x1"}, True),
        (lambda head: {"BLOCKNUMBER": "0x1"}, True),
        (lambda head: {"blockHash": TX}, True),
        (lambda head: TX, True),
        (lambda head: {"blockHash": TX, "BLOCKHASH": TX}, True),
        (lambda head: {"blockHash": "0x1"}, True),
    ],
)
@on_uvloop
async def test_read_of_old_state_costs_the_archive_price(block: Any, is_old: bool, cached: bool) -> None:
    cache = {"enabled": cached, "coalesce": cached}
    async with rpc_harness(1, cache=cache) as harness:
        harness.upstreams[0].answers["eth_getBalance"] = lambda params: "0x1"
        params = [ADDRESS, block(harness.chain.head)]
        for _ in range(2):  # A cached reply costs the same.
            reply = await harness.call("eth_getBalance", params)
            assert units(reply) == (ARCHIVE if is_old else EVM["eth_getBalance"])
        reply = await harness.batch(("eth_getBalance", params))
        assert units(reply) == (ARCHIVE if is_old else EVM["eth_getBalance"])


@pytest.mark.parametrize(
    ("by_number", "by_hash", "more"),
    [
        ("eth_getBlockByNumber", "eth_getBlockByHash", [False]),
        ("eth_getHeaderByNumber", "eth_getHeaderByHash", []),
        ("eth_getBlockTransactionCountByNumber", "eth_getBlockTransactionCountByHash", []),
        ("eth_getUncleCountByBlockNumber", "eth_getUncleCountByBlockHash", []),
        ("eth_getUncleByBlockNumberAndIndex", "eth_getUncleByBlockHashAndIndex", ["0x0"]),
        ("eth_getTransactionByBlockNumberAndIndex", "eth_getTransactionByBlockHashAndIndex", ["0x0"]),
        ("eth_getRawTransactionByBlockNumberAndIndex", "eth_getRawTransactionByBlockHashAndIndex", ["0x0"]),
        ("eth_getBlockReceipts", "eth_getBlockReceipts", []),
    ],
)
@on_uvloop
async def test_old_block_costs_the_same_by_number_and_by_hash(by_number: str, by_hash: str, more: list[Any]) -> None:
    async with rpc_harness(1) as harness:
        for method in (by_number, by_hash):
            harness.upstreams[0].answers[method] = lambda params: "0x1"
        old = units(await harness.call(by_number, ["0x1", *more]))
        assert old == units(await harness.call(by_hash, [TX, *more])) == EVM[by_number]


@pytest.mark.parametrize("method", ["eth_getBalance", "eth_getLogs"])
@on_uvloop
async def test_block_costs_the_same_by_number_and_by_hash_whatever_its_age(method: str) -> None:
    async with rpc_harness(1) as harness:
        harness.upstreams[0].answers[method] = lambda params: "0x1" if method == "eth_getBalance" else []
        state = harness.worker.app.networks.routes[harness.network].state
        head, block_hash = harness.chain.head, harness.chain.hash_of(harness.chain.head)
        await until(lambda: state.hashes.number_of(block_hash) == head)

        async def price(name: str, value: str) -> int:
            if method == "eth_getBalance":
                return units(await harness.call(method, [ADDRESS, {name: value}]))
            filters = {"blockHash": value} if name == "blockHash" else {"fromBlock": value, "toBlock": value}
            return units(await harness.call(method, [filters]))

        assert await price("blockNumber", hex(head)) == await price("blockHash", block_hash) == EVM[method]
        assert await price("blockHash", block_hash.upper().replace("0X", "0x")) == EVM[method]
        assert await price("blockNumber", "0x1") == await price("blockHash", TX) == ARCHIVE


@on_uvloop
async def test_expensive_method_costs_no_archive_surcharge() -> None:
    async with rpc_harness(1) as harness:
        dear = next(name for name, price in EVM.items() if price > ARCHIVE and METHODS[name].block_at == 0)
        assert units(await harness.call(dear, ["0x1"])) == EVM[dear]


@on_uvloop
async def test_logs_are_priced_by_their_oldest_block() -> None:
    async with rpc_harness(1) as harness:
        recent, old = hex(harness.chain.head - 2), hex(harness.chain.head - 200)
        for params, price in (
            ({"fromBlock": recent}, EVM["eth_getLogs"]),
            ({"fromBlock": old, "toBlock": recent}, max(EVM["eth_getLogs"], ARCHIVE)),
        ):
            assert units(await harness.call("eth_getLogs", [params])) == price


@on_uvloop
async def test_batch_costs_the_sum_of_its_items() -> None:
    async with rpc_harness(1) as harness:
        harness.worker.add_key("reader", scopes=["rpc:read"])
        calls: list[Any] = [
            ("eth_getBalance", [ADDRESS, "latest"]),
            ("eth_getBalance", [ADDRESS, "0x1"]),
            ("eth_chainId", []),
            ("eth_noSuchThing", []),
            ("eth_getBalance", [ADDRESS, "latest"]),
        ]
        whole = EVM["eth_getBalance"] * 2 + ARCHIVE + EVM["eth_chainId"] + 1
        assert units(await harness.batch(*calls)) == whole
        # An item outside the key's scopes is refused, which is free.
        assert units(await harness.batch(*calls, ("eth_sendRawTransaction", ["0x01"]), key="reader")) == whole
        body = orjson.dumps([1, {"jsonrpc": "2.0", "id": 1, "method": "eth_gasPrice", "params": []}])
        assert units(await harness.worker.send(body, network=harness.network)) == 1 + EVM["eth_gasPrice"]
        notes = orjson.dumps([{"jsonrpc": "2.0", "method": "eth_gasPrice", "params": []}] * 3)
        reply = await harness.worker.send(notes, network=harness.network)
        assert (reply.status, units(reply)) == (204, 3 * EVM["eth_gasPrice"])


@on_uvloop
async def test_units_run_out_and_refusals_cost_nothing() -> None:
    async with rpc_harness(1) as harness:
        price = EVM["eth_getBalance"]
        harness.worker.add_key("poor", limits=Limits(1000, 10 * price, 0))
        replies = [await harness.call("eth_getBalance", [ADDRESS, hex(990)], key="poor") for _ in range(40)]
        given = [reply for reply in replies if reply.status == 200]
        refused = [reply for reply in replies if reply.status != 200]
        assert len(given) >= 10
        for reply in refused:
            reply.fault(429)
            assert "x-compute-units" not in reply.headers
        assert tally(harness, "eth_getBalance").units == len(given) * price
        assert tally(harness, "eth_getBalance").errors == len(refused)


@on_uvloop
async def test_unknown_method_costs_one_unit_and_is_counted_as_other() -> None:
    async with rpc_harness(1) as harness:
        harness.worker.add_key("poor", limits=Limits(1000, 3, 0))
        async with await harness.worker.connect() as client:
            request = harness.worker.post(rpc("eth_noSuchThing"), key="poor", network=harness.network)
            replies = [await client.send(request) for _ in range(12)]
            # If a request had got two replies, the last one would be a different one.
            last = await client.send(harness.worker.post(rpc("eth_chainId", id=77), network=harness.network))
            assert last.json["id"] == 77
        answered = [reply for reply in replies if reply.status == 200]
        assert {reply.status for reply in replies} == {200, 429}
        assert {reply.json["error"]["code"] for reply in answered} == {-32601}
        assert {units(reply) for reply in answered} == {1}
        assert (tally(harness, "other").errors, tally(harness, "other").units) == (len(replies), len(answered))


@on_uvloop
async def test_chain_error_costs_the_full_price_and_an_internal_failure_nothing() -> None:
    def revert(_: list[Any]) -> Any:
        raise Refused(3, "execution reverted", data="0x08c379a0")

    async with rpc_harness(2, faults=True) as harness:
        for upstream in harness.upstreams:
            upstream.answers["eth_call"] = revert
        reply = await harness.call("eth_call", [{}, "latest"])
        assert reply.json["error"] == {"code": 3, "message": "execution reverted", "data": "0x08c379a0"}
        assert units(reply) == EVM["eth_call"]
        for proxy in harness.proxies:
            await proxy.switch("dead")
        assert (await harness.call("eth_call", [{}, "latest"])).status in (500, 503)
        counts = tally(harness, "eth_call")
        assert (counts.errors, counts.faults, counts.units) == (1, 1, EVM["eth_call"])


@on_uvloop
async def test_interrupted_reply_costs_nothing() -> None:
    async with rpc_harness(1, faults=True, cache={"enabled": False, "coalesce": False}) as harness:
        harness.worker.add_key("poor", limits=Limits(1000, 100, 0))
        harness.upstreams[0].answers["eth_getCode"] = lambda _: "0x" + "ab" * 300_000
        await harness.proxies[0].switch("half")
        async with await harness.worker.connect() as client:
            await client.write(
                harness.worker.post(rpc("eth_getCode", [ADDRESS, "latest"]), key="poor", network=harness.network)
            )
            assert await client.is_closed()
        counts = tally(harness, "eth_getCode")
        assert (counts.results, counts.faults, counts.units) == (0, 1, 0)


@on_uvloop
async def test_charged_units_equal_the_units_in_the_replies() -> None:
    chance = random.Random(7)
    async with rpc_harness(3, faults=True) as harness:
        ways: list[tuple[str, list[Any]]] = [
            ("eth_getBalance", [ADDRESS, "latest"]),
            ("eth_getBalance", [ADDRESS, "0x5"]),
            ("eth_call", [{}, "latest"]),
            ("eth_chainId", []),
            ("eth_noSuchThing", []),
            ("eth_getTransactionReceipt", [TX]),
        ]
        total = 0

        async def one(n: int) -> None:
            nonlocal total
            if n % 60 == 20:
                await harness.proxies[n % 3].switch(chance.choice(["reset", "dead", "garbage"]))
            if n % 60 == 40:
                for proxy in harness.proxies:
                    await proxy.switch("pass")
            picked = [chance.choice(ways) for _ in range(chance.choice((1, 1, 5)))]
            fresh = {"Cache_Control": "no-cache"} if chance.random() < 0.3 else {}
            reply = await (harness.call(*picked[0], **fresh) if len(picked) == 1 else harness.batch(*picked, **fresh))
            total += int(reply.headers.get("x-compute-units", 0))

        for start in range(0, 400, 8):
            async with asyncio.TaskGroup() as group:
                for n in range(start, start + 8):
                    group.create_task(one(n))
        assert charged(harness) == total > 0


# Counts


@on_uvloop
async def test_calls_are_counted_by_outcome_cache_and_upstream() -> None:
    async with rpc_harness(2) as harness:
        call = ("eth_getBalance", [ADDRESS, "0x5"])
        await harness.call(*call)
        await harness.call(*call)
        await harness.batch(call, call, ("eth_gasPrice", []))
        counts = tally(harness, "eth_getBalance")
        assert (counts.results, counts.errors, counts.faults) == (4, 0, 0)
        assert (counts.hits, counts.joins) == (3, 0)
        assert sum(counts.buckets) == 4
        assert tally(harness, "eth_gasPrice").results == 1
        for upstream in harness.upstreams:
            upstream.held = {"eth_getStorageAt"}
        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(harness.call("eth_getStorageAt", [ADDRESS, "0x0", "latest"]))
            await until(lambda: harness.count("eth_getStorageAt") == 1)
            await until(lambda: len(next(iter(harness.route.state.flights.values())).waiters) == 5)
            for upstream in harness.upstreams:
                upstream.gate.set()
        assert (tally(harness, "eth_getStorageAt").joins, tally(harness, "eth_getStorageAt").results) == (4, 5)
        answered = sum(good for _, _, good, *_ in harness.worker.app.networks.counts())
        assert answered == sum(len(each.calls) for each in harness.upstreams) - looks(harness)


def looks(harness: RpcHarness) -> int:
    """Questions of our own, which are no calls."""
    return sum(harness.count(method) for method in ("eth_blockNumber", "eth_getBlockByNumber", "eth_chainId"))


@on_uvloop
async def test_metric_labels_are_closed_sets(tmp_path: Path) -> None:
    async with rpc_harness(2) as harness:
        chance = random.Random(3)
        await harness.call("eth_chainId")
        await harness.call("eth_noSuchThing")

        def series() -> set[tuple[str, ...]]:
            harness.worker.app.usage.gather()
            harness.worker.app.tallies.write(tmp_path / "calls-1.json", harness.worker.app.networks.counts())
            metrics = CallCollector(tmp_path).collect()
            return {(s.name, *s.labels.values()) for metric in metrics for s in metric.samples}

        before = series()
        for n in range(20):
            names = ["".join(chance.choices("abcXYZ_09", k=12)) for _ in range(100)]
            await harness.batch(*((name, [n]) for name in names))
        assert series() == before
        text = "".join(" ".join(each) for each in before)
        assert "127.0.0.1" not in text
        assert {each[-1] for each in before if each[0] == "penstock_calls_total"} == {"result", "error", "fault"}
        assert {each[-1] for each in before if each[0] == "penstock_cache_total"} == {"hit", "join"}
        upstreams = {each[1:] for each in before if each[0] == "penstock_upstream_calls_total"}
        labels = [f"{harness.network}#{n}" for n in (1, 2)]
        assert upstreams == {(label, outcome) for label in labels for outcome in ("answered", "failed", "refused")}


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("shown", [False, True])
@on_uvloop
async def test_upstream_header_is_sent_only_if_configured(shown: bool, short: bool) -> None:
    cache = {"enabled": not short, "coalesce": not short}
    async with rpc_harness(1 if short else 2, rpc={"show_upstream": shown}, cache=cache) as harness:
        # `Expect` takes the slow path through aiohttp, which sends the same header.
        for n, headers in enumerate(({}, {"Expect": "100-continue"})):
            params = [ADDRESS, "0x0", hex(990 + n)] if not short else [ADDRESS, "0x0", "latest"]
            before = [each.count("eth_getStorageAt") for each in harness.upstreams]
            reply = await harness.call("eth_getStorageAt", params, **headers)
            after = [each.count("eth_getStorageAt") for each in harness.upstreams]
            asked = next(index for index in range(len(after)) if after[index] > before[index])
            header = reply.headers.get("x-upstream")
            assert header == (f"{harness.network}#{asked + 1}" if shown else None)
            if not short:
                again = await harness.call("eth_getStorageAt", params, **headers)
                assert (again.headers["x-cache"], again.headers.get("x-upstream")) == ("hit", None)
        batch = await harness.batch(("eth_gasPrice", []), ("eth_chainId", []))
        unknown = await harness.call("eth_noSuchThing")
        assert "x-upstream" not in {**batch.headers, **unknown.headers}


@pytest.mark.parametrize("cache", [True, False])
@on_uvloop
async def test_rate_headers_are_current_when_the_reply_is_sent(cache: bool) -> None:
    """Requests admitted while a call is in progress reduce its remaining count."""

    async with rpc_harness(1, faults=True, cache={"enabled": cache, "coalesce": cache}) as harness:
        key = harness.worker.add_key("shared", limits=Limits(10, 1000, 0))
        harness.proxies[0].delay_s = 0.3
        await harness.call("eth_call", [{"data": "0x01"}, "latest"], key="shared")
        await harness.proxies[0].switch("slow", times=1)
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(harness.call("eth_call", [{"data": "0x02"}, "latest"], key="shared"))
            await until(lambda: harness.route.upstreams[0].health.inflight > 0, every_s=0.001)
            # Takes hours' worth, so that it cannot refill before the reply arrives on any machine.
            harness.worker.app.admission.buckets.give_back(key.rate.bucket_index, -3600.0, 0.0)
        reply = asking.result()
        assert reply.headers["x-ratelimit-remaining"] == "0"
        assert int(reply.headers["x-ratelimit-reset"]) > time.time()


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(
    ("method", "params", "is_old"),
    [
        ("eth_getBalance", [ADDRESS, "0x1", "latest"], True),
        ("eth_getBalance", [ADDRESS, "latest", "0x1"], False),
        ("eth_getBalance", [ADDRESS, "latest", "latest"], False),
        ("eth_getBalance", ["latest"], False),
        ("eth_getBalance", [[ADDRESS, ADDRESS], "latest"], False),
        ("eth_getStorageAt", [ADDRESS, "0x0", "latest"], False),
        ("eth_getStorageAt", [ADDRESS, "0x0", "0x1", "latest"], True),
        ("eth_getBlockTransactionCountByNumber", ["0x1", "latest"], False),
        ("eth_getBlockTransactionCountByNumber", ["latest"], False),
        ("eth_call", [{"to": ADDRESS, "data": "0x1,"}, "latest"], False),
        ("eth_call", [{"to": ADDRESS, "accessList": [{"address": ADDRESS}]}, "latest"], False),
        ("eth_call", [{"to": ADDRESS}, "0x1", "latest"], True),
        ("eth_call", [{"to": ADDRESS}, "0x1", {}, "latest"], True),
        ("eth_call", [None, {"blockNumber": "0x1"}, "latest"], True),
        ("eth_call", [{"to": "}"}, {"blockNumber": "0x1"}, "latest"], True),
    ],
)
@on_uvloop
async def test_surplus_params_do_not_make_an_old_block_cheap(
    method: str, params: list[Any], is_old: bool, cached: bool
) -> None:
    async with rpc_harness(1, cache={"enabled": cached, "coalesce": cached}) as harness:
        harness.upstreams[0].answers[method] = lambda params: "0x1"
        price = ARCHIVE if is_old else EVM[method]
        assert units(await harness.call(method, params)) == price
        assert units(await harness.batch((method, params))) == price


@on_uvloop
async def test_refused_items_of_a_batch_are_counted_as_errors_of_the_caller_and_cost_nothing() -> None:
    async with rpc_harness(1, rpc={"batch_wait_s": 0.0}) as harness:
        harness.worker.add_key("small", limits=Limits(10, 10_000, 0))
        items: list[Any] = [{"jsonrpc": "2.0", "id": 1, "method": "eth_nope"}, {"odd": 1}, 5]
        send = harness.worker.send
        assert (await send(orjson.dumps(items), key="small")).status == 200
        assert tally(harness, "other").errors == 3
        again = await send(orjson.dumps(items * 5), key="small")
        codes = [item["error"]["code"] for item in again.json]
        refused = codes.count(-32005)
        assert refused
        assert again.headers["x-compute-units"] == str(15 - refused)
        counts = tally(harness, "other")
        assert (counts.errors, counts.faults, counts.units) == (18, 0, 18 - refused)


# Size

LARGE = 1_000_000
SIZE_UNITS = size_units(LARGE)


def large_call(method: str = "eth_getBalance", size: int = LARGE) -> bytes:
    around = len(rpc(method, ["", "latest"]))
    return rpc(method, ["0x" + "a" * (size - around - 2), "latest"])


@pytest.mark.parametrize("headers", [{}, {"Origin": "https://app.example.com"}], ids=["front", "aiohttp"])
@pytest.mark.parametrize("size", [16_384, 17_000, 100_000, LARGE])
@on_uvloop
async def test_large_call_costs_its_size_too(size: int, headers: dict[str, str]) -> None:
    async with rpc_harness(1) as harness, await harness.worker.connect() as client:
        reply = await client.send(harness.worker.post(large_call(size=size), network=harness.network, **headers))
        batch = b"[" + large_call(size=size) + b"," + rpc("eth_getBalance", [ADDRESS, "latest"], id=2) + b"]"
        batched = await client.send(harness.worker.post(batch, network=harness.network, **headers))
        price = EVM["eth_getBalance"]
        assert abs(units(reply) - price - (size - 16_384) / 8_192) < 1
        assert units(batched) == units(reply) + price
        assert charged(harness) == units(reply) + units(batched)


@pytest.mark.parametrize("headers", [{}, {"Origin": "https://app.example.com"}], ids=["front", "aiohttp"])
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (large_call(), 200),
        (large_call()[:-1], 400),
        (b"[" + large_call()[:-1], 400),
        (large_call("eth_getFortune"), 200),
        (large_call("eth_sendRawTransaction"), 403),
    ],
    ids=["valid", "malformed", "malformed batch", "unknown method", "forbidden method"],
)
@on_uvloop
async def test_account_pays_for_large_calls_whatever_becomes_of_them(
    body: bytes, status: int, headers: dict[str, str]
) -> None:
    """And those that it cannot pay for are not parsed."""
    async with rpc_harness(1) as harness, await harness.worker.connect() as client:
        harness.worker.add_key("poor", limits=Limits(1000, 2 * SIZE_UNITS + 20, 0), scopes=("rpc:read",))
        request = harness.worker.post(body, key="poor", network=harness.network, **headers)
        began = time.monotonic()
        replies = [await client.send(request) for _ in range(12)]
        refilled = int((time.monotonic() - began) * (2 * SIZE_UNITS + 20) / SIZE_UNITS) + 1
        served = [reply for reply in replies if reply.status != 429]
        assert {reply.status for reply in served} == {status}
        assert 2 <= len(served) <= 2 + refilled


@on_uvloop
async def test_large_batch_waits_for_units_as_before() -> None:
    """It is long because it has many calls."""
    calls = b"[" + b",".join(rpc("eth_getBalance", [ADDRESS, "latest"], id=number) for number in range(300)) + b"]"
    async with rpc_harness(1) as harness, await harness.worker.connect() as client:
        harness.worker.add_key("poor", limits=Limits(1000, 200, 0))
        reply = await client.send(harness.worker.post(calls, key="poor", network=harness.network))
        assert (reply.status, len(orjson.loads(reply.body))) == (200, 300)
        assert units(reply) == 300 * EVM["eth_getBalance"]
        assert b'"error"' not in reply.body
