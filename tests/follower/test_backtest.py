"""Back-tests of a webhook config on past blocks: the counts and the refusals."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.errors import InvalidRequest, Unavailable
from proxy.memory_budget import MemoryBudget
from proxy.services.webhooks import backtest
from proxy.services.webhooks.backtest import Backtest, BacktestResult
from proxy.turn_queue import TurnQueue
from tests.follower.event_harness import A, B, EventHarness, with_transaction
from tests.rpc_upstreams import Refused
from tests.shipped_tables import TABLES

CONFIG = {"addresses": ["0x" + B.hex()]}


def backtest_of(harness: EventHarness) -> tuple[Backtest, Any]:
    memory = MemoryBudget(64 << 20).of("backtests")
    turns = TurnQueue(asyncio.get_running_loop())
    return Backtest(harness.inner.running.internal_calls, turns, memory), harness.inner.route.network


async def test_internal_transfers_are_counted_from_traces(harness: EventHarness) -> None:
    harness.inner.chain.mine([], [], [])
    busy = harness.inner.chain.blocks[2].hash
    call = {"type": "CALL", "from": "0x" + A.hex(), "to": "0x" + B.hex(), "value": "0x5"}
    tree = {"txHash": "0x" + "79" * 32, "result": {**call, "calls": [call, call, {**call, "error": "reverted"}]}}
    answers = harness.inner.upstream.answers
    answers["debug_traceBlockByHash"] = lambda params: [tree] if params[0] == busy else []
    tested, network = backtest_of(harness)
    assert await tested.run(network, "INTERNAL_TRANSFER", CONFIG, first=1, last=3) == BacktestResult(1, 3, 2, 1)
    with pytest.raises(InvalidRequest, match="50 blocks"):
        await tested.run(network, "INTERNAL_TRANSFER", CONFIG, first=0, last=50)


async def test_network_without_traces_is_unavailable(harness: EventHarness) -> None:
    def refuse(_: list[Any]) -> Any:
        raise Refused(-32000, "missing trie node")

    harness.inner.upstream.answers["debug_traceBlockByHash"] = refuse
    harness.inner.chain.mine([])
    tested, network = backtest_of(harness)
    with pytest.raises(Unavailable, match="has traces of block"):
        await tested.run(network, "INTERNAL_TRANSFER", CONFIG, first=1, last=1)


async def test_backtest_that_needs_too_many_receipts_is_refused(
    harness: EventHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backtest, "MAX_RECEIPTS", 3)
    with_transaction(harness, "0x" + "77" * 32)
    harness.inner.chain.mine([], [], [], [])
    requested: list[str] = []

    def receipt(params: list[Any]) -> dict[str, str]:
        requested.append(params[0])
        return {"status": "0x1"}

    harness.inner.upstream.answers["eth_getTransactionReceipt"] = receipt
    tested, network = backtest_of(harness)
    assert (await tested.run(network, "ADDRESS_ACTIVITY", CONFIG, first=1, last=3)).events == 3
    requested.clear()
    with pytest.raises(InvalidRequest, match="to_block: more than 3 transactions match"):
        await tested.run(network, "ADDRESS_ACTIVITY", CONFIG, first=1, last=4)
    assert requested == []


async def test_chain_of_another_family_is_refused_without_a_call(harness: EventHarness) -> None:
    tested, _ = backtest_of(harness)
    other = next(network for network in TABLES.chains.networks() if network.family != "evm")
    with pytest.raises(InvalidRequest, match="chain: webhooks are not available"):
        await tested.run(other, "token_transfer", CONFIG, first=0, last=0)
