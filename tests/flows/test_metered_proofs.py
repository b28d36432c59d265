"""Verified calls pay for every upstream call that their verification takes."""

from __future__ import annotations

import time
from typing import Any

import pytest

from proxy.core.access import Limits
from tests.http_client import Reply
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.shipped_tables import TABLES
from tests.web.worker import on_uvloop

PRICES = {name: method.price for name, method in TABLES.methods["evm"].items()}


def made(harness: RpcHarness) -> int:
    """The list price of the calls that the upstreams got, without those about the head."""
    calls = [call for each in harness.upstreams for call in each.calls]
    return sum(PRICES[call.method] for call in calls if call.method not in ("eth_blockNumber", "net_version"))


async def verified(harness: RpcHarness, method: str, params: list[Any], how: str, key: str = "main") -> Reply:
    return await harness.call(method, params, key=key, X_Verify=how)


@on_uvloop
async def test_quorum_costs_as_many_calls_as_it_asks_upstreams() -> None:
    async with rpc_harness(3) as harness:
        before = made(harness)
        reply = await verified(harness, "eth_getBalance", ["0x" + "ab" * 20, "latest"], "quorum 2/3")
        assert reply.status == 200, reply
        assert int(reply.headers["x-compute-units"]) == 3 * PRICES["eth_getBalance"] >= made(harness) - before


@pytest.mark.parametrize("blocks", [20, 100])
@on_uvloop
async def test_proof_of_logs_is_paid_for_block_by_block(blocks: int) -> None:
    async with rpc_harness(2) as harness:
        key = harness.worker.add_key("rich", limits=Limits(1000, 100_000, 0))
        before = made(harness)
        asked = [{"fromBlock": hex(950 - blocks), "toBlock": hex(949)}]
        await verified(harness, "eth_getLogs", asked, "proof", "rich")
        cost = made(harness) - before
        assert key.tallies[harness.route.policies["eth_getLogs"].tally].units + 4 * 20 >= cost


@on_uvloop
async def test_pieces_of_verified_logs_are_paid_for() -> None:
    async with rpc_harness(3) as harness:
        harness.worker.add_key("free", limits=Limits(10, 200, 0))
        for upstream in harness.upstreams:
            upstream.max_range = 10
        began, before = time.monotonic(), harness.count("eth_getLogs")
        asked = [{"fromBlock": hex(101), "toBlock": hex(900)}]
        await harness.call("eth_getLogs", asked, key="free", X_Verify="quorum 2/3", X_Timeout_Ms="3000")
        calls = harness.count("eth_getLogs") - before
        assert calls * 20 <= 200 * (1 + time.monotonic() - began) + 3 * 20
