"""Logs in pieces: each piece is charged at the list price before it is requested, and none is requested without."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from proxy.core.access import Limits
from proxy.services.accounts.metering import MOST_PIECES
from tests.http_client import Reply
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import Refused
from tests.service import holds, until
from tests.shipped_tables import TABLES
from tests.sockets import connected
from tests.web.worker import on_uvloop

# Old logs cost the archive price.
PRICE = max(TABLES.methods["evm"]["eth_getLogs"].price, TABLES.prices.archive_minimum)
FREE = Limits(10, 200, 100_000)
FIRST = 101


def query(blocks: int, first: int = FIRST) -> list[Any]:
    return [{"fromBlock": hex(first), "toBlock": hex(first + blocks - 1)}]


def expected(harness: RpcHarness, blocks: int) -> list[Any]:
    return [harness.chain.log(number) for number in range(FIRST, FIRST + blocks)]


def counted(harness: RpcHarness) -> int:
    """The units of all calls, as usage counts them."""
    harness.worker.app.usage.gather()
    return sum(policy.tally.units for policy in harness.route.policies.values())


def units(reply: Reply) -> int:
    return int(reply.headers["x-compute-units"])


@on_uvloop
async def test_each_piece_costs_the_list_price_and_shows_in_the_reply_and_in_usage() -> None:
    async with rpc_harness(1) as harness:
        harness.upstreams[0].max_range = 10
        reply = await harness.call("eth_getLogs", query(80))
        assert reply.json["result"] == expected(harness, 80)
        assert harness.count("eth_getLogs") == 1 + 8
        assert units(reply) == 9 * PRICE
        assert counted(harness) == 9 * PRICE


@on_uvloop
async def test_pieces_wait_for_the_refill_of_the_accounts_units() -> None:
    async with rpc_harness(1) as harness:
        harness.worker.add_key("free", limits=FREE)
        harness.upstreams[0].max_range = 10
        began = time.monotonic()
        reply = await harness.call("eth_getLogs", query(150), key="free")
        took_s = time.monotonic() - began
        assert reply.json["result"] == expected(harness, 150)
        assert units(reply) == 16 * PRICE
        assert FREE.units_per_second * (1 + took_s) >= 16 * PRICE
        # The bucket had the units of one second, so the call waited for the others: that is not a part of its own time.
        harness.worker.app.usage.gather()
        own_s = harness.route.policies["eth_getLogs"].tally.seconds
        assert 0.0 < own_s < took_s - 0.5 * (16 * PRICE / FREE.units_per_second - 1)


@on_uvloop
async def test_range_that_the_account_cannot_pay_for_in_time_is_refused_with_one_that_it_can() -> None:
    async with rpc_harness(1, rpc={"call_timeout_s": 1.0}) as harness:
        harness.worker.add_key("free", limits=FREE)
        upstream = harness.upstreams[0]
        upstream.max_range = 10
        reply = await harness.call("eth_getLogs", query(800), key="free")
        error = reply.json["error"]
        assert error["code"] == -32005
        assert f"this block range should work: [{error['data']['suggested_from']}" in error["message"]
        assert "compute units" in error["message"]
        assert upstream.count("eth_getLogs") == 1
        assert units(reply) == PRICE
        asked = [{"fromBlock": error["data"]["suggested_from"], "toBlock": error["data"]["suggested_to"]}]
        await asyncio.sleep(1.0)  # The bucket is full again.
        blocks = int(error["data"]["suggested_to"], 16) - FIRST + 1
        assert blocks >= 50
        assert (await harness.call("eth_getLogs", asked, key="free")).json["result"] == expected(harness, blocks)


@on_uvloop
async def test_account_whose_units_run_out_gets_an_error_that_says_how_far_it_came() -> None:
    async with rpc_harness(1, rpc={"call_timeout_s": 1.0}) as harness:
        key = harness.worker.add_key("free", limits=FREE)
        harness.upstreams[0].max_range = 10
        asking = asyncio.get_running_loop().create_task(harness.call("eth_getLogs", query(130), key="free"))
        await until(lambda: harness.count("eth_getLogs") > 4, every_s=0.001)
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:  # Other calls of the account take what is refilled.
            harness.worker.app.admission.charge(key, 0, 5, time.monotonic())
            await asyncio.sleep(0.001)
        reply = await asking
        error = reply.json["error"]
        assert error["code"] == -32005
        assert "of 130 blocks" in error["message"]
        assert units(reply) == harness.count("eth_getLogs") * PRICE
        assert counted(harness) == harness.count("eth_getLogs") * PRICE


@on_uvloop
async def test_flood_of_wide_ranges_makes_no_more_calls_than_its_account_pays_for() -> None:
    async with rpc_harness(1, rpc={"call_timeout_s": 2.0}) as harness:
        harness.chain.head = 20_000
        await harness.look()
        harness.worker.add_key("free", limits=FREE)
        harness.upstreams[0].max_range = 10
        began = time.monotonic()

        async def ask(blocks: int) -> Reply:
            return await harness.call("eth_getLogs", query(blocks), key="free")

        replies = await asyncio.gather(*(ask(200 + 10 * n) for n in range(10)), *(ask(9_000 + n) for n in range(10)))
        took_s = time.monotonic() - began
        assert harness.count("eth_getLogs") * PRICE <= FREE.units_per_second * (1 + took_s)
        assert {reply.status for reply in replies} <= {200, 429}


@on_uvloop
async def test_pieces_that_were_made_are_paid_for_although_the_call_fails() -> None:
    async with rpc_harness(1, faults=True) as harness:
        key = harness.worker.add_key("small", limits=Limits(1000, 400, 0))
        upstream = harness.upstreams[0]
        upstream.max_range, upstream.held = 10, {"eth_getLogs"}
        upstream.gate.set()
        asking = asyncio.get_running_loop().create_task(harness.call("eth_getLogs", query(100), key="small"))
        await until(lambda: harness.count("eth_getLogs") > 4, every_s=0.001)
        upstream.gate.clear()
        await harness.proxies[0].switch("dead")
        reply = await asking
        assert reply.status in (500, 503)
        made = harness.count("eth_getLogs") - 1
        assert counted(harness) >= made * PRICE
        refusal = harness.worker.app.admission.charge(key, 0, 400, time.monotonic())
        assert refusal is not None  # The bucket lacks what the pieces cost.


@on_uvloop
async def test_caller_of_another_account_does_not_depend_on_the_units_of_the_first() -> None:
    async with rpc_harness(1, rpc={"call_timeout_s": 2.0}) as harness:
        harness.worker.add_key("free", limits=Limits(10, 40, 0))
        upstream = harness.upstreams[0]
        upstream.max_range, upstream.held = 10, {"eth_getLogs"}
        first = asyncio.get_running_loop().create_task(harness.call("eth_getLogs", query(100), key="free"))
        await until(lambda: harness.count("eth_getLogs") == 1)
        second = asyncio.get_running_loop().create_task(harness.call("eth_getLogs", query(100)))
        await until(lambda: harness.count("eth_getLogs") == 2)
        upstream.gate.set()
        assert (await second).json["result"] == expected(harness, 100)
        assert units(await second) == 11 * PRICE
        assert (await first).json["error"]["code"] == -32005


@on_uvloop
async def test_pieces_of_one_account_under_way_are_bounded_over_all_of_its_calls() -> None:
    async with rpc_harness(1) as harness:
        upstream = harness.upstreams[0]
        upstream.max_range = 10
        asking = [
            asyncio.get_running_loop().create_task(harness.call("eth_getLogs", query(300 + n))) for n in range(12)
        ]
        await until(lambda: upstream.count("eth_getLogs") > 40, every_s=0.001)
        upstream.held, upstream.most_at_once = {"eth_getLogs"}, 0
        await until(lambda: upstream.most_at_once)
        await holds(lambda: upstream.most_at_once <= MOST_PIECES, for_s=0.2)
        upstream.gate.set()
        replies = await asyncio.gather(*asking)
        assert [len(reply.json["result"]) for reply in replies] == [300 + n for n in range(12)]
        assert upstream.most_at_once <= MOST_PIECES


def refuse(_: list[Any]) -> Any:
    raise Refused(-32000, "exceed maximum block range: 10")


@pytest.mark.parametrize("way", ["batch", "socket", "filter"])
@on_uvloop
async def test_pieces_are_charged_on_every_surface(way: str) -> None:
    async with rpc_harness(1) as harness:
        harness.upstreams[0].max_range = 10
        extra = 0
        if way == "batch":
            reply = await harness.batch(("eth_chainId", []), ("eth_getLogs", query(80)))
            assert reply.json[1]["result"] == expected(harness, 80)
            assert units(reply) == 9 * PRICE
        elif way == "socket":
            async with connected(harness.worker, network=harness.network) as socket:
                assert (await socket.call("eth_getLogs", *query(80)))["result"] == expected(harness, 80)
        else:
            harness.upstreams[0].answers["eth_getFilterLogs"] = refuse
            made = await harness.call("eth_newFilter", query(80))
            reply = await harness.call("eth_getFilterLogs", [made.json["result"]])
            assert reply.json["result"] == expected(harness, 80)
            extra = units(made) + TABLES.methods["evm"]["eth_getFilterLogs"].price
            assert units(reply) + units(made) == extra + 9 * PRICE
        await until(lambda: counted(harness) == 9 * PRICE + extra)
