"""Back-tests: they pay for the blocks that they read, and take the loop's time in short steps."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
import pytest

from proxy.core.access import Limits
from proxy.core.pricing import reading_units
from proxy.services.webhooks.backtest import MOST_OF_ACCOUNT, READ_AT_ONCE
from tests.http_client import Reply, request
from tests.isolation.loop_steps import LONGEST_STEP_S, LoopSteps, send_apart
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import value_of
from tests.service import until
from tests.shipped_tables import TABLES
from tests.web.worker import on_uvloop

PRICES = {name: method.price for name, method in TABLES.methods["evm"].items()}
ADDRESS = "0x" + "ab" * 20
FREE = Limits(10, 200, 100_000)
TRANSACTIONS = 300


def block(number: int) -> dict[str, Any]:
    transactions = [
        {
            "hash": value_of(number, index),
            "from": "0x" + f"{index:040x}",
            "to": ADDRESS if index % 100 == 0 else "0x" + "cd" * 20,
            "value": "0x1",
            "nonce": "0x1",
            "transactionIndex": hex(index),
            "input": "0x" + "ef" * 200,
        }
        for index in range(TRANSACTIONS)
    ]
    return {"number": hex(number), "hash": value_of(number), "transactions": transactions}


CALL = {"type": "CALL", "from": ADDRESS, "to": "0x" + "cd" * 20, "value": "0x5"}
TRACE = [{"txHash": value_of(n), "result": {**CALL, "calls": [CALL] * 20}} for n in range(TRANSACTIONS)]


def serve_blocks(harness: RpcHarness) -> None:
    blocks = {number: block(number) for number in range(900, 1001)}
    for upstream in harness.upstreams:
        upstream.answers["eth_getBlockByNumber"] = lambda params: blocks[int(params[0], 16)]
        upstream.answers["eth_getLogs"] = lambda _: []
        upstream.answers["debug_traceBlockByHash"] = lambda _: TRACE
        upstream.answers["eth_getTransactionReceipt"] = lambda _: {"status": "0x1"}


def body(event_type: str, first: int, last: int) -> bytes:
    config = {"addresses": [ADDRESS]}
    return orjson.dumps(
        {"chain": "ethereum", "event_type": event_type, "config": config, "from_block": first, "to_block": last}
    )


def backtest(harness: RpcHarness, event_type: str, blocks: int, key: str = "main") -> bytes:
    path, text = "/v1/webhooks/backtest", body(event_type, 951, 950 + blocks)
    return request("POST", path, text, key=harness.worker.keys[key])


async def send(harness: RpcHarness, event_type: str, blocks: int, key: str = "main") -> Reply:
    async with await harness.worker.connect() as client:
        return await client.send(backtest(harness, event_type, blocks, key))


@pytest.mark.parametrize("event_type", ["ADDRESS_ACTIVITY", "INTERNAL_TRANSFER"])
@on_uvloop
async def test_backtest_is_charged_for_the_calls_that_it_makes(event_type: str) -> None:
    async with rpc_harness(1) as harness:
        serve_blocks(harness)
        before = len(harness.upstreams[0].calls)
        reply = await send(harness, event_type, 20)
        assert reply.status == 200, reply
        assert reply.json["blocks_with_events"] == 20
        made = harness.upstreams[0].calls[before:]
        listed = sum(PRICES[call.method] for call in made)
        assert listed > TABLES.prices.rest["backtest_webhook"]
        units = int(reply.headers["x-compute-units"])
        size = {"ADDRESS_ACTIVITY": block(951), "INTERNAL_TRANSFER": TRACE}[event_type]
        assert units >= listed + 20 * reading_units(len(orjson.dumps(size)))
        again = await send(harness, event_type, 20)
        assert int(again.headers["x-compute-units"]) >= units - PRICES["eth_blockNumber"], "cached calls take our time"


@on_uvloop
async def test_traces_for_backtests_stop_with_the_units_of_the_account() -> None:
    async with rpc_harness(1) as harness:
        serve_blocks(harness)
        harness.worker.add_key("free", limits=Limits(10, 200, 0))
        began = time.monotonic()
        asking = [
            asyncio.get_running_loop().create_task(send(harness, "INTERNAL_TRANSFER", 40 + n, "free"))
            for n in range(MOST_OF_ACCOUNT)
        ]
        await asyncio.sleep(2.0)
        made = harness.count("debug_traceBlockByHash")
        assert made * PRICES["debug_traceBlockByHash"] <= FREE.units_per_second * (1 + time.monotonic() - began)
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


@on_uvloop
async def test_backtest_without_a_first_block_tests_what_the_account_can_pay_for() -> None:
    """It is not refused after it has used up all units."""
    async with rpc_harness(1) as harness:
        serve_blocks(harness)
        harness.worker.add_key("free", limits=Limits(10, 200, 0))
        text = orjson.loads(body("ADDRESS_ACTIVITY", 951, 1000))
        del text["from_block"]
        raw = request("POST", "/v1/webhooks/backtest", orjson.dumps(text), key=harness.worker.keys["free"])
        async with await harness.worker.connect() as client:
            reply = await client.send(raw, within_s=30.0)
        assert reply.status == 200, reply
        assert 20 <= reply.json["blocks_with_events"] <= 100


@on_uvloop
async def test_account_runs_few_backtests_at_a_time() -> None:
    async with rpc_harness(1) as harness:
        serve_blocks(harness)
        harness.worker.add_key("other")
        upstream = harness.upstreams[0]
        upstream.held = {"eth_getLogs"}
        loop = asyncio.get_running_loop()
        asking = [loop.create_task(send(harness, "ADDRESS_ACTIVITY", 2)) for _ in range(MOST_OF_ACCOUNT)]
        await until(lambda: f"{MOST_OF_ACCOUNT} running" in repr(harness.worker.app.webhooks.web))
        (await send(harness, "ADDRESS_ACTIVITY", 2)).fault(429)
        other = loop.create_task(send(harness, "ADDRESS_ACTIVITY", 2, "other"))
        await until(lambda: f"{MOST_OF_ACCOUNT + 1} running" in repr(harness.worker.app.webhooks.web))
        upstream.gate.set()
        assert {(await each).status for each in (*asking, other)} == {200}
        assert harness.worker.held_bytes == 0


@on_uvloop
async def test_backtest_ends_when_its_client_leaves() -> None:
    """It would go on for its account's money, and take our time, for a result that nobody sees."""
    async with rpc_harness(1) as harness:
        serve_blocks(harness)
        harness.upstreams[0].held = {"eth_getLogs"}
        async with await harness.worker.connect() as client:
            await client.write(backtest(harness, "ADDRESS_ACTIVITY", 20))
            await until(lambda: "1 running" in repr(harness.worker.app.webhooks.web))
        await until(lambda: "0 running" in repr(harness.worker.app.webhooks.web))
        harness.upstreams[0].gate.set()
        assert (await send(harness, "ADDRESS_ACTIVITY", 2)).status == 200
        assert harness.worker.held_bytes == 0


async def _until_a_block_is_read(harness: RpcHarness, *, within_s: float) -> None:
    before, end = harness.count("eth_getBlockByNumber"), time.monotonic() + within_s
    await until(lambda: harness.count("eth_getBlockByNumber") > before or time.monotonic() > end)


@on_uvloop
async def test_leaving_does_not_escape_what_was_read() -> None:
    """A client that leaves as soon as its first blocks were read owes what reading them costs: it pays before it reads more."""
    async with rpc_harness(1) as harness:
        serve_blocks(harness)
        harness.worker.add_key("free", limits=FREE)
        began, path = time.monotonic(), "/v1/webhooks/backtest"
        for last in range(1000, 1000 - 12 * READ_AT_ONCE, -READ_AT_ONCE):
            asking = request("POST", path, body("ADDRESS_ACTIVITY", 901, last), key=harness.worker.keys["free"])
            async with await harness.worker.connect() as client:
                await client.write(asking)
                await _until_a_block_is_read(harness, within_s=0.5)
                await asyncio.sleep(0.05)
        each = PRICES["eth_getBlockByNumber"] + reading_units(len(orjson.dumps(block(951))))
        at_once = READ_AT_ONCE * each
        earned = FREE.units_per_second * (1 + time.monotonic() - began)
        assert harness.count("eth_getBlockByNumber") * each <= earned + at_once


@pytest.mark.parametrize("event_type", ["ADDRESS_ACTIVITY", "INTERNAL_TRANSFER"])
@on_uvloop
async def test_backtest_takes_short_steps(event_type: str) -> None:
    async with rpc_harness(1) as harness:
        serve_blocks(harness)
        measured = []
        for blocks in (20, 19, 18):
            with LoopSteps.measured() as steps:
                reply = await send_apart(harness.worker.port, backtest(harness, event_type, blocks))
            assert reply.status == 200, reply
            measured.append(steps.longest_s)
        assert min(measured) < LONGEST_STEP_S


@on_uvloop
async def test_large_body_counts_as_memory_until_the_request_ends() -> None:
    async with rpc_harness(1) as harness:
        serve_blocks(harness)
        upstream = harness.upstreams[0]
        upstream.held = {"eth_getLogs"}
        text = orjson.loads(body("ADDRESS_ACTIVITY", 951, 952))
        text["config"]["addresses"] = [f"0x{number:040x}" for number in range(5000)]
        sent = orjson.dumps(text)
        raw = request("POST", "/v1/webhooks/backtest", sent, key=harness.worker.keys["main"])
        async with await harness.worker.connect() as client:
            asking = asyncio.get_running_loop().create_task(client.send(raw))
            await until(lambda: "1 running" in repr(harness.worker.app.webhooks.web))
            assert harness.worker.held_bytes >= 3 * len(sent)
            upstream.gate.set()
            assert (await asking).status == 200
        assert harness.worker.held_bytes == 0
