"""Starknet, NEAR and Polkadot: their own clients, unmodified, against nodes made from the specifications."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import orjson

from tests.client_scripts import run_script
from tests.node_stubs import NearStub, NodeStub, PolkadotStub, StarknetStub, running_stub
from tests.rpc_harness import NetworkHarness
from tests.web.worker import on_uvloop, running_worker


@asynccontextmanager
async def served(*stubs: NodeStub) -> AsyncIterator[NetworkHarness]:
    async with AsyncExitStack() as stack:
        for each in stubs:
            await stack.enter_async_context(running_stub(each))
        upstreams = {stubs[0].network: [each.url for each in stubs]}
        harness = NetworkHarness(await stack.enter_async_context(running_worker(upstreams)), stubs[0].network)
        await harness.look()
        await harness.shows(*["up"] * len(stubs))
        yield harness


async def run(harness: NetworkHarness, script: str, **more: Any) -> Any:
    worker = harness.worker
    task = {"url": f"http://127.0.0.1:{worker.port}/v1/rpc/{harness.network}", "key": worker.keys["main"], **more}
    return await asyncio.to_thread(run_script, script, task, within_s=90)


async def caches(harness: NetworkHarness, method: str, params: Any) -> list[str]:
    """The header X-Cache of the same call, twice."""
    body = orjson.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
    sent = [await harness.worker.send(body, network=harness.network) for _ in range(2)]
    assert [each.status for each in sent] == [200, 200]
    return [each.headers.get("x-cache", "") for each in sent]


# Starknet


@on_uvloop
async def test_starknet_js_works() -> None:
    stub = StarknetStub()
    async with served(stub) as harness:
        seen = await run(harness, "starknet_js.mjs", transaction=stub.TRANSACTION)
        assert (seen["chain"], seen["number"]) == ("0x534e5f4d41494e", stub.head)
        assert seen["latest"]["block_hash"] == stub.hash_of(stub.head)
        assert seen["old"]["status"] == "ACCEPTED_ON_L1"
        assert (seen["nonce"], seen["storage"]["value"]) == (hex(stub.head), hex(407))
        assert seen["called"] == ["0x1", hex(stub.head)]
        assert seen["receipt"]["finality_status"] == "ACCEPTED_ON_L1"
        assert seen["missing"]["code"] == 24


@on_uvloop
async def test_starknet_is_cached_by_the_block_wherever_it_stands() -> None:
    stub = StarknetStub()
    async with served(stub) as harness:
        cases: list[tuple[str, Any]] = [
            ("starknet_getBlockWithTxs", [{"block_number": 100}]),
            ("starknet_getStorageAt", ["0x1", "0x2", {"block_number": 100}]),
            ("starknet_call", {"request": {"contract_address": "0x1"}, "block_id": {"block_number": 100}}),
            ("starknet_getTransactionReceipt", [stub.TRANSACTION]),
            ("starknet_getNonce", [{"block_hash": stub.hash_of(90)}, "0x1"]),
        ]
        for method, params in cases:
            assert await caches(harness, method, params) == ["miss", "hit"], method
        assert await caches(harness, "starknet_getBlockWithTxs", ["latest"]) == ["miss", "hit"]
        assert await caches(harness, "starknet_getNonce", ["latest", "0x1"]) == ["miss", "miss"]
        assert await caches(harness, "starknet_getStorageAt", ["0x1", "0x2", "pre_confirmed"]) == ["miss", "miss"]
        stub.head += 1
        await harness.look()
        assert await caches(harness, "starknet_getBlockWithTxs", [{"block_number": 100}]) == ["hit", "hit"]
        assert await caches(harness, "starknet_getBlockWithTxs", ["latest"]) == ["miss", "hit"]


# NEAR


@on_uvloop
async def test_near_api_js_works() -> None:
    stub = NearStub()
    async with served(stub) as harness:
        seen = await run(harness, "near_api.mjs")
        assert seen["network"] == "mainnet"
        assert seen["final"]["height"] == stub.final
        assert seen["old"]["hash"] == stub.hash_of(200)
        assert seen["account"]["amount"] == str(2**128 - 1)
        assert seen["called"] == "hello"
        # The client reads `cause`, which it needs for its own errors.
        assert "bob.near" in seen["absent"]["message"], seen["absent"]
        assert "203" in seen["missing"]["message"] or "block" in seen["missing"]["message"].lower(), seen["missing"]


@on_uvloop
async def test_near_gets_no_batches_and_its_errors_keep_their_cause() -> None:
    stub = NearStub()
    async with served(stub) as harness:
        calls = [{"jsonrpc": "2.0", "id": at, "method": "block", "params": {"block_id": 200 + at}} for at in range(6)]
        reply = await harness.worker.send(orjson.dumps(calls), network=harness.network)
        found = {each["id"]: each for each in reply.json}
        assert found[1]["result"]["header"]["height"] == 201
        assert found[3]["error"]["cause"]["name"] == "UNKNOWN_BLOCK"
        assert found[3]["error"]["name"] == "HANDLER_ERROR"
        assert await caches(harness, "block", {"block_id": 300}) == ["miss", "hit"]
        assert await caches(harness, "block", {"finality": "final"}) == ["miss", "hit"]
        account = {"request_type": "view_account", "account_id": "alice.near", "finality": "optimistic"}
        assert await caches(harness, "query", account) == ["miss", "miss"]


@on_uvloop
async def test_near_node_that_is_behind_is_not_believed() -> None:
    ahead, behind = NearStub(), NearStub()
    ahead.head = 505
    async with served(ahead, behind) as harness:
        body = orjson.dumps({"jsonrpc": "2.0", "id": 1, "method": "block", "params": {"block_id": 504}})
        for _ in range(5):
            reply = await harness.worker.send(body, network=harness.network)
            assert reply.json["result"]["header"]["height"] == 504


# Polkadot


@on_uvloop
async def test_polkadot_api_works() -> None:
    stub = PolkadotStub()
    async with served(stub) as harness:
        seen = await run(harness, "polkadot_api.mjs")
        assert (seen["chain"], seen["genesis"], seen["runtime"]) == ("Polkadot", stub.GENESIS, "polkadot")
        assert (seen["number"], seen["old"]) == (stub.head, stub.hash_of(100))
        assert (seen["then"], seen["now"]) == (100, stub.head)
        assert seen["finalized"] == stub.hash_of(stub.final)
        assert seen["pallets"] > 30


@on_uvloop
async def test_polkadot_is_cached_by_hash() -> None:
    stub = PolkadotStub()
    async with served(stub) as harness:
        fixed: list[tuple[str, Any]] = [
            ("state_getStorage", ["0x26aa", stub.hash_of(90)]),
            ("chain_getBlock", [stub.hash_of(90)]),
            ("chain_getBlockHash", [90]),
        ]
        for method, params in [*fixed, ("state_getStorage", ["0x26aa"])]:
            assert await caches(harness, method, params) == ["miss", "hit"], method
        stub.head += 1
        await harness.look()
        for method, params in fixed:
            assert await caches(harness, method, params) == ["hit", "hit"], method
        assert await caches(harness, "state_getStorage", ["0x26aa"]) == ["miss", "hit"]
