"""Lookup of operations that a bundler does not have: in another bundler, or on the chain."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from proxy.chains.evm import operations
from proxy.services.bundler.lookup import WIDE_SEARCHES
from proxy.services.rpc.tracker import Tracker
from tests.bundler_harness import (
    BY_HASH,
    ENTRY_POINTS,
    EP07,
    HASH,
    OPERATION,
    RECEIPT,
    SENDER,
    BundlerHarness,
    bundler_harness,
)
from tests.database import connected
from tests.http_client import rpc
from tests.rpc_upstreams import Refused
from tests.service import until
from tests.web.worker import LIVE, on_uvloop

TX = "0x" + "dd" * 32
OTHER = "0x" + "ee" * 32
KNOWN = {"userOpHash": HASH, "success": True}
PAYMASTER = "0x13947328D52E7d9751e93FD0274A2bFae5CbCb12"
CALLED = "0xA0b86991c6218b36c1d19D4a2e9Eb0cE3606eB48"


def word(value: int | str) -> str:
    return f"{value:064x}" if isinstance(value, int) else value.removeprefix("0x").lower().rjust(64, "0")


def log(index: int, address: str, topics: list[str], data: str = "0x", *, block: int = 990) -> dict[str, Any]:
    return {
        "address": address.lower(),
        "topics": topics,
        "data": data,
        "blockNumber": hex(block),
        "blockHash": "0x" + f"{block:064x}",
        "transactionHash": TX,
        "transactionIndex": "0x0",
        "logIndex": hex(index),
        "removed": False,
    }


def event(index: int, name: str = HASH, *, success: bool = True, paymaster: str = PAYMASTER) -> dict[str, Any]:
    topics = [operations.INCLUDED, name, "0x" + word(SENDER), "0x" + word(paymaster)]
    return log(index, EP07, topics, "0x" + word(3) + word(int(success)) + word(0x71AFD498D000) + word(0x1E848))


BEFORE = log(1, EP07, [operations.BEFORE_EXECUTION])
FIRST_OWN = log(2, CALLED, ["0x" + "01" * 32])
FIRST = event(3, OTHER)
OWN = log(4, CALLED, ["0x" + "02" * 32])
REASON = log(
    5,
    EP07,
    [operations.REVERTED, HASH, "0x" + word(SENDER)],
    "0x" + word(3) + word(64) + word(4) + "deadbeef".ljust(64, "0"),
)


def mined(harness: BundlerHarness, *, success: bool = True, paymaster: str = PAYMASTER) -> dict[str, Any]:
    """Put the operation on the chain, behind another in the same transaction; the transaction's receipt."""
    own = [OWN] if success else [OWN, REASON]
    last = event(6, success=success, paymaster=paymaster)
    logs = [log(0, EP07, ["0x" + "03" * 32]), BEFORE, FIRST_OWN, FIRST, *own, last]
    receipt = {"transactionHash": TX, "blockNumber": "0x3de", "blockHash": last["blockHash"], "logs": logs}

    def get_logs(params: list[Any]) -> list[Any]:
        asked = params[0]
        if asked["topics"] != [operations.INCLUDED, HASH]:
            return []
        upto = harness.chain.head if asked["toBlock"] == "latest" else int(asked["toBlock"], 16)
        return [last] if int(asked["fromBlock"], 16) <= 990 <= upto else []

    harness.chain.answers["eth_getLogs"] = get_logs
    harness.chain.answers["eth_getTransactionReceipt"] = lambda params: receipt if params == [TX] else None
    return receipt


@on_uvloop
async def test_receipt_that_the_bundler_has_forgotten_comes_from_the_chain(database: str) -> None:
    async with bundler_harness(database) as harness:
        receipt = mined(harness)
        reply = await harness.call(RECEIPT, HASH)
        assert reply.json["result"] == {
            "userOpHash": HASH,
            "entryPoint": EP07,
            "sender": SENDER,
            "nonce": "0x3",
            "paymaster": PAYMASTER,
            "actualGasCost": "0x71afd498d000",
            "actualGasUsed": "0x1e848",
            "success": True,
            "logs": [OWN],
            "receipt": receipt,
        }
        asked = next(call.params[0] for call in harness.chain.calls if call.method == "eth_getLogs")
        assert asked["address"] == [*ENTRY_POINTS.values()]
        assert (asked["toBlock"], int(asked["fromBlock"], 16)) == ("latest", 0)


@on_uvloop
async def test_receipt_of_a_call_that_failed_gives_its_reason(database: str) -> None:
    async with bundler_harness(database) as harness:
        mined(harness, success=False, paymaster="0x" + "00" * 20)
        result = (await harness.call(RECEIPT, HASH)).json["result"]
        assert (result["success"], result["reason"]) == (False, "0xdeadbeef")
        assert result["logs"] == [OWN, REASON]
        assert "paymaster" not in result


@on_uvloop
async def test_operation_by_its_hash_comes_from_the_record_and_the_chain(database: str) -> None:
    async with bundler_harness(database) as harness:
        mined(harness)
        assert (await harness.call(BY_HASH, HASH)).json["result"] is None  # no record of it yet
        await harness.send()
        assert (await harness.call(BY_HASH, HASH)).json["result"] == {
            "userOperation": OPERATION,
            "entryPoint": EP07,
            "blockNumber": "0x3de",
            "blockHash": "0x" + f"{990:064x}",
            "transactionHash": TX,
        }


@on_uvloop
async def test_recorded_block_is_looked_at_first_however_old_it_is(database: str) -> None:
    async with bundler_harness(database, bundler={"search_blocks": 2}) as harness:
        mined(harness)
        assert (await harness.call(RECEIPT, HASH)).json["result"] is None
        await harness.send()
        async with connected(database) as connection:
            await connection.execute("update operations set status = 'included', block = 990")
        assert (await harness.call(RECEIPT, HASH)).json["result"]["userOpHash"] == HASH


@on_uvloop
async def test_pending_operation_is_null(database: str) -> None:
    async with bundler_harness(database) as harness:
        harness.chain.answers["eth_getLogs"] = lambda params: []
        await harness.send()
        for method in (RECEIPT, BY_HASH):
            reply = await harness.call(method, HASH)
            assert reply.json == {"jsonrpc": "2.0", "id": 1, "result": None}
            assert reply.headers["x-compute-units"] == "2"


@on_uvloop
async def test_receipt_is_returned_if_any_bundler_has_it(database: str) -> None:
    async with bundler_harness(database, 3) as harness:
        harness.chain.answers["eth_getLogs"] = lambda params: []
        harness.bundlers[2].answers[RECEIPT] = lambda params: KNOWN
        for _ in range(6):
            assert (await harness.call(RECEIPT, HASH)).json["result"] == KNOWN


@on_uvloop
async def test_receipt_comes_from_the_chain_when_a_bundler_fails(database: str) -> None:
    async with bundler_harness(database, 2, faults=True) as harness:
        mined(harness)
        await harness.proxies[1].switch("dead")
        for _ in range(4):
            assert (await harness.call(RECEIPT, HASH)).json["result"]["userOpHash"] == HASH


@on_uvloop
async def test_receipt_comes_from_the_chain_without_a_database(database: str) -> None:
    async with bundler_harness(database) as harness:
        mined(harness)
        await harness.worker.app.pool.close()
        assert (await harness.call(RECEIPT, HASH)).json["result"]["userOpHash"] == HASH


@pytest.mark.parametrize("answer", ["refused", "nonsense", "another operation's"])
@on_uvloop
async def test_chain_that_does_not_answer_leaves_the_bundlers_null(database: str, answer: str) -> None:
    def get_logs(params: list[Any]) -> Any:
        if answer == "refused":
            raise Refused(-32000, "no logs today")
        return [{"address": 1}] if answer == "nonsense" else [FIRST]

    async with bundler_harness(database) as harness:
        harness.chain.answers["eth_getLogs"] = get_logs
        assert (await harness.call(RECEIPT, HASH)).json["result"] is None


@pytest.mark.parametrize("failure", ["error", "dead"])
@on_uvloop
async def test_bundler_that_fails_late_does_not_end_the_search(database: str, failure: str) -> None:
    """One bundler is late and the other does not have the operation: the late error changes nothing."""

    def refuse(params: list[Any]) -> Any:
        raise Refused(-32500, "no receipts today")

    async with bundler_harness(database, 2, faults=True) as harness, asyncio.TaskGroup() as group:
        receipt = mined(harness)
        harness.chain.held = {"eth_getLogs"}
        route = harness.worker.app.smart_wallets.bundlers.routes[LIVE]
        for upstream in route.upstreams:
            for _ in range(30):
                upstream.health.succeeded(0.001)
        for bundler in harness.bundlers:
            bundler.held = {RECEIPT}
        asked = group.create_task(harness.call(RECEIPT, HASH))
        await until(lambda: any(each.count(RECEIPT) for each in harness.bundlers))
        late = 0 if harness.bundlers[0].count(RECEIPT) else 1
        harness.bundlers[1 - late].held = set()
        harness.bundlers[1 - late].gate.set()
        await until(lambda: harness.chain.count("eth_getLogs") == 1)
        while route.dispatcher.budget.spend():
            pass
        bad = route.upstreams[late].health.bad
        harness.bundlers[late].answers[RECEIPT] = refuse
        if failure == "dead":
            await harness.proxies[late].switch("dead")
            await until(lambda: route.upstreams[late].health.bad > bad)
        else:
            good = route.upstreams[late].health.good
            harness.bundlers[late].gate.set()
            await until(lambda: route.upstreams[late].health.good > good)
        harness.chain.gate.set()
        assert (await asked).json["result"]["receipt"] == receipt


@on_uvloop
async def test_chain_is_searched_once_per_head_from_the_block_at_which_the_operation_was_sent(database: str) -> None:
    async with bundler_harness(database) as harness:
        chain = harness.worker.app.networks.routes[LIVE]
        harness.chain.chain.head = 100_000
        harness.chain.answers["eth_getLogs"] = lambda params: []

        async def searched() -> list[int]:
            harness.chain.calls.clear()
            await Tracker(chain.state).look()
            for method in (RECEIPT, RECEIPT, BY_HASH):
                assert (await harness.call(method, HASH)).json["result"] is None
            asked = [call.params[0] for call in harness.chain.calls if call.method == "eth_getLogs"]
            return [int(each["fromBlock"], 16) for each in asked]

        depth = chain.network.facts.finality_blocks
        assert await searched() == [95_001]  # without a record, the full range is searched
        assert await searched() == []
        await harness.send({**OPERATION, "nonce": "0x4"})
        await harness.send()
        harness.chain.chain.head = 100_007
        assert await searched() == [100_000 - depth]
        harness.chain.chain.head = 100_009
        assert await searched() == [100_007 - depth]
        mined(harness)
        async with connected(database) as connection:
            await connection.execute("update operations set block = 990, status = 'included'")
        assert (await harness.call(RECEIPT, HASH)).json["result"]["userOpHash"] == HASH


@on_uvloop
async def test_operation_that_was_sent_is_looked_for_from_then_on(database: str) -> None:
    async with bundler_harness(database) as harness:
        chain = harness.worker.app.networks.routes[LIVE]
        harness.chain.chain.head = 100_000
        harness.chain.answers["eth_getLogs"] = lambda params: []
        await Tracker(chain.state).look()
        await harness.send()
        harness.chain.chain.head = 100_100
        await Tracker(chain.state).look()
        await harness.call(RECEIPT, HASH)
        (asked,) = [call.params[0] for call in harness.chain.calls if call.method == "eth_getLogs"]
        assert int(asked["fromBlock"], 16) == 100_000 - chain.network.facts.finality_blocks


@on_uvloop
async def test_few_search_the_chain_far_back_at_once(database: str) -> None:
    async with bundler_harness(database) as harness, asyncio.TaskGroup() as group:
        harness.chain.answers["eth_getLogs"] = lambda params: []
        harness.chain.held = {"eth_getLogs"}
        asked = [group.create_task(harness.call(RECEIPT, "0x" + f"{index:064x}")) for index in range(12)]
        await until(lambda: harness.bundlers[0].count(RECEIPT) == 12)
        await until(lambda: harness.chain.count("eth_getLogs") == WIDE_SEARCHES // 2)
        harness.chain.gate.set()
        assert [(await each).json["result"] for each in asked] == [None] * 12
        assert harness.chain.count("eth_getLogs") == 12
        assert harness.chain.most_at_once <= WIDE_SEARCHES + 1


@on_uvloop
async def test_searches_of_one_account_leave_places_to_others(database: str) -> None:
    """An account that asks for operations which do not exist must not make another's operation look unknown."""
    async with bundler_harness(database) as harness, asyncio.TaskGroup() as group:
        harness.worker.add_key("other")
        harness.chain.answers["eth_getLogs"] = lambda params: []
        harness.chain.held = {"eth_getLogs"}

        def searched() -> set[str]:
            return {call.params[0]["topics"][1] for call in harness.chain.calls if call.method == "eth_getLogs"}

        asked = [group.create_task(harness.call(RECEIPT, "0x" + f"{index:064x}")) for index in range(12)]
        await until(lambda: harness.bundlers[0].count(RECEIPT) == 12 and len(searched()) >= WIDE_SEARCHES // 2)
        other = group.create_task(harness.call(RECEIPT, HASH, key="other"))
        await until(lambda: HASH in searched())
        harness.chain.gate.set()
        assert [(await each).json["result"] for each in (*asked, other)] == [None] * 13


@pytest.mark.parametrize("params", [[], ["0x12"], [HASH, HASH], [5], ["0x" + "g" * 64]])
@on_uvloop
async def test_params_that_are_not_a_hash_are_left_to_the_bundler(database: str, params: list[Any]) -> None:
    async with bundler_harness(database) as harness:
        assert (await harness.call(RECEIPT, *params)).json["result"] is None
        assert harness.chain.count("eth_getLogs") == 0


@on_uvloop
async def test_items_of_a_batch_are_looked_for_each_on_its_own(database: str) -> None:
    async with bundler_harness(database) as harness:
        mined(harness)
        reply = await harness.batch((RECEIPT, [HASH]), (RECEIPT, [OTHER]), (BY_HASH, [OTHER]))
        assert [item["result"] and item["result"]["userOpHash"] for item in reply.json] == [HASH, None, None]


@on_uvloop
async def test_lookup_works_after_an_earlier_caller_disconnected(database: str) -> None:
    async with bundler_harness(database) as harness:
        mined(harness)
        harness.chain.held = {"eth_getLogs"}
        client = await harness.worker.connect()
        body = {"jsonrpc": "2.0", "id": 1, "method": RECEIPT, "params": [HASH]}
        await client.write(harness.request(orjson.dumps(body)))
        await client.close()
        harness.chain.gate.set()
        assert (await harness.call(RECEIPT, HASH)).json["result"]["userOpHash"] == HASH


@pytest.mark.parametrize("bundlers", [1, 2])
@on_uvloop
async def test_cached_reads_are_refreshed_after_a_receipt_from_a_newer_block(database: str, bundlers: int) -> None:
    """A bundler may see a block before the next head poll: a cached nonce is then read again."""
    async with bundler_harness(database, bundlers) as harness:
        await Tracker(harness.worker.app.networks.routes[LIVE].state).look()
        call = rpc("eth_call", [{"to": EP07, "data": "0x35567e1a"}, "latest"])
        nonces = iter(["0x1", "0x2"])
        harness.chain.answers["eth_call"] = lambda params: next(nonces)
        assert [(await harness.worker.send(call)).json["result"] for _ in range(2)] == ["0x1", "0x1"]
        for bundler in harness.bundlers:
            bundler.answers[RECEIPT] = lambda params: {"receipt": {"blockNumber": hex(harness.chain.chain.head)}}
        await harness.call(RECEIPT, HASH)
        assert (await harness.worker.send(call)).json["result"] == "0x1"
        for bundler in harness.bundlers:
            bundler.answers[RECEIPT] = lambda params: {"receipt": {"blockNumber": hex(harness.chain.chain.head + 1)}}
        await harness.call(RECEIPT, HASH)
        assert (await harness.worker.send(call)).json["result"] == "0x2"
