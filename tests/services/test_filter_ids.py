"""Ids of filters: their size is checked before their params are packed, which would stall the worker."""

from __future__ import annotations

import random
import time

import pytest

from proxy.services.rpc.filter_ids import FilterIds
from tests.isolation.loop_steps import LONGEST_STEP_S, slowness
from tests.rpc_harness import rpc_harness
from tests.web.worker import on_uvloop

ROUNDS = 3


@on_uvloop
async def test_large_params_are_not_packed_into_the_id() -> None:
    junk = b'["%b"]' % random.Random(7).randbytes(500_000).hex().encode()
    async with rpc_harness(1) as harness:
        key, (upstream,) = harness.worker.add_key("other"), harness.route.upstreams
        took, name = [], b""
        for _ in range(ROUNDS):
            began_s = time.thread_time()
            name = FilterIds("pepper").tagged(b'"0x1"', key, upstream, junk)
            took.append((time.thread_time() - began_s) / slowness())
        assert len(name) < 100
        assert min(took) < LONGEST_STEP_S


@on_uvloop
async def test_filter_larger_than_any_node_accepts_is_refused() -> None:
    async with rpc_harness(1) as harness:
        topics = [["0x" + f"{number:064x}" for number in range(1000)]] * 4
        largest = {"address": ["0x" + f"{number:040x}" for number in range(1000)], "topics": topics}
        assert await harness.result("eth_newFilter", [largest])
        reply = await harness.call("eth_newFilter", [{**largest, "junk": "x" * 100_000}])
        assert reply.json["error"]["code"] == -32602
        assert harness.upstreams[0].count("eth_newFilter") == 1


@pytest.mark.parametrize("params", [["0x" + "1" * 5000], ["0x1"] * 2000, [""] * 20_000])
@on_uvloop
async def test_poll_with_large_params_finds_no_filter(params: list[str]) -> None:
    async with rpc_harness(1) as harness:
        reply = await harness.call("eth_getFilterChanges", params)
        assert reply.json["error"]["message"] == "filter not found"
