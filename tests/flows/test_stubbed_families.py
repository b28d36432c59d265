"""Families whose nodes no registry has: their own clients, unmodified, against nodes made from the specifications.

The programs on the pages of the guide run here as well.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from tests.client_scripts import run_script, run_source
from tests.families_harness import FamilyHarness, served
from tests.guide_pages import PAGES, blocks_of
from tests.node_stubs import NearStub, NodeStub, PolkadotStub, StarknetStub, TonStub
from tests.rest_stubs import AptosStub, TronStub
from tests.web.worker import on_uvloop


async def run(harness: FamilyHarness, script: str, **more: Any) -> Any:
    url = f"http://127.0.0.1:{harness.worker.port}/v1/{harness.surface}/{harness.network}"
    return await asyncio.to_thread(
        run_script, script, {"url": url, "key": harness.worker.keys["main"], **more}, within_s=90
    )


async def rest_caches(harness: FamilyHarness, path: str, body: bytes | None = None) -> list[str]:
    """The header X-Cache of the same request, twice."""
    sent = [await harness.request(path, body) for _ in range(2)]
    assert [each.status for each in sent] == [200, 200], sent
    return [each.headers.get("x-cache", "") for each in sent]


async def caches(harness: FamilyHarness, method: str, params: Any) -> list[str]:
    """The header X-Cache of the same call, twice."""
    body = orjson.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
    sent = [await harness.worker.send(body, network=harness.network) for _ in range(2)]
    assert [each.status for each in sent] == [200, 200]
    return [each.headers.get("x-cache", "") for each in sent]


# The guide


STUBS: dict[str, type[NodeStub]] = {
    "aptos": AptosStub,
    "near": NearStub,
    "polkadot": PolkadotStub,
    "starknet": StarknetStub,
    "ton": TonStub,
    "tron": TronStub,
}


@pytest.mark.parametrize("page", STUBS)
@on_uvloop
async def test_programs_of_the_guide_run(page: str) -> None:
    async with served(STUBS[page]()) as harness:
        programs = [block.text for block in blocks_of(PAGES / f"{page}.md") if block.language == "js"]
        assert programs
        for text in programs:
            assert "https://rpc.example.com" in text, text
            named = text.replace("https://rpc.example.com", f"http://127.0.0.1:{harness.worker.port}")
            filled = named.replace("svc_live_…", harness.worker.keys["main"])
            assert await asyncio.to_thread(run_source, filled, within_s=90)


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
async def test_starknet_py_works_with_only_a_url() -> None:
    stub = StarknetStub()
    async with served(stub) as harness:
        harness.worker.add_key("open", allow_in_url=True)
        url = f"http://127.0.0.1:{harness.worker.port}/v1/rpc/{harness.network}/{harness.worker.keys['open']}"
        seen = await asyncio.to_thread(
            run_script, "starknet_py_url.py", {"url": url}, within_s=90, package="starknet-py"
        )
        assert (seen["chain"], seen["number"], seen["missing"]) == ("0x534e5f4d41494e", stub.head, 24)
        assert seen["latest"] == hex(int(stub.hash_of(stub.head), 16))
        assert (seen["nonce"], seen["storage"], seen["called"]) == (stub.head, 407, [1, stub.head])


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


# Aptos


@on_uvloop
async def test_aptos_sdk_works() -> None:
    stub = AptosStub()
    async with served(stub) as harness:
        seen = await run(harness, "aptos_sdk.mjs")
        assert (seen["chain"], seen["ledger"]["block_height"]) == (1, "500")
        assert seen["block"]["block_hash"] == stub.hash_of(200)
        assert seen["account"]["sequence_number"] == "3"
        # The client shows the member `coin` of the resource.
        assert seen["then"]["coin"]["value"] == "2000"
        assert seen["now"]["coin"]["value"] == seen["view"][0] == str(seen["balance"]) == str(stub.version)
        assert (seen["sent"], seen["done"]["success"]) == (stub.HASH, True)
        assert len(stub.writes) == 1
        assert seen["absent"] == {"status": 404, "code": "account_not_found"}
        assert seen["missing"] == {"status": 404, "code": "block_not_found"}


@on_uvloop
async def test_aptos_is_cached_by_version_height_and_hash() -> None:
    stub = AptosStub()
    stub.take("")
    stub.head = 501
    async with served(stub) as harness:
        resource = "/v1/accounts/0x1/resource/0x1::coin::CoinStore%3C0x1::aptos_coin::AptosCoin%3E"
        fixed = [
            "/v1/blocks/by_height/200",
            "/v1/blocks/by_height/501",
            "/v1/blocks/by_version/2000",
            f"{resource}?ledger_version=2000",
            f"/v1/transactions/by_hash/{stub.HASH}",
        ]
        for path in [*fixed, resource, "/v1/estimate_gas_price"]:
            assert await rest_caches(harness, path) == ["miss", "hit"], path
        assert await rest_caches(harness, "/v1/view", b'{"function":"0x1::a::b"}') == ["miss", "hit"]
        for path in ("/v1", "/v1/accounts/0x1"):
            assert await rest_caches(harness, path) == ["miss", "miss"], path
        stub.head += 1
        await harness.look()
        for path in fixed:
            assert await rest_caches(harness, path) == ["hit", "hit"], path
        assert await rest_caches(harness, resource) == ["miss", "hit"]


@on_uvloop
async def test_aptos_shows_headers_of_the_chain_alone() -> None:
    async with served(AptosStub()) as harness:
        reply = await harness.request("/v1")
        assert reply.headers["x-aptos-block-height"] == "500"
        assert "x-private" not in reply.headers
        batch = await harness.request("/v1/transactions/batch", b"[]")
        assert batch.status == 404
        assert "one by one" in batch.json["error"]["message"]


@on_uvloop
async def test_aptos_data_that_one_upstream_lacks_comes_from_another() -> None:
    ahead, pruned = AptosStub(), AptosStub()
    ahead.head, pruned.oldest = 505, 300
    async with served(ahead, pruned) as harness:
        for height in (504, 505, 100, 299):
            for _ in range(3):
                reply = await harness.request(f"/v1/blocks/by_height/{height}?with_transactions=false")
                assert reply.json["block_height"] == str(height), reply
        for version in range(1000, 1010):
            assert (await harness.request(f"/v1/accounts/0x1/balance/0x1?ledger_version={version}")).json == version


# Tron


@on_uvloop
async def test_tronweb_works() -> None:
    stub = TronStub()
    async with served(stub) as harness:
        seen = await run(harness, "tronweb.mjs", transaction=stub.TRANSACTION)
        assert seen["now"]["blockID"] == stub.hash_of(stub.head)
        assert seen["confirmed"]["blockID"] == stub.hash_of(stub.final)
        assert seen["old"]["blockID"] == stub.hash_of(200)
        assert seen["range"] == [stub.hash_of(number) for number in (10, 11, 12)]
        assert seen["balance"] == 1_000_000 + stub.head
        assert (seen["info"]["blockNumber"], seen["called"]) == (400, [f"{stub.head:064x}"])
        assert seen["parameters"][0]["value"] == 21_600_000
        assert seen["sent"]["txid"] == seen["id"] == stub.writes[0]["txID"]
        assert len(stub.writes) == 1
        assert seen["missing"] == {"message": "Block not found"}
        assert "404" in seen["nodes"]["message"]


@on_uvloop
async def test_tron_is_cached_by_the_block_in_the_reply() -> None:
    stub = TronStub()
    async with served(stub) as harness:
        fixed: list[tuple[str, bytes | None]] = [
            ("/wallet/getblockbynum", b'{"num":200}'),
            ("/wallet/getblockbynum?num=201", None),
            ("/wallet/getblockbyid", orjson.dumps({"value": stub.hash_of(202)})),
            ("/wallet/gettransactioninfobyid", orjson.dumps({"value": stub.TRANSACTION})),
            ("/wallet/getblockbylimitnext", b'{"startNum":10,"endNum":12}'),
            ("/wallet/getblock?id_or_num=203&detail=true", None),
        ]
        moving: list[tuple[str, bytes | None]] = [
            ("/wallet/getnowblock", b"{}"),
            ("/wallet/getblockbynum", b'{"num":499}'),
            ("/wallet/getblock?detail=true", None),
            ("/wallet/getaccount", b'{"address":"41"}'),
            ("/wallet/getblockbylimitnext", b'{"startNum":490,"endNum":600}'),
        ]
        for path, body in [*fixed, *moving]:
            assert await rest_caches(harness, path, body) == ["miss", "hit"], (path, body)
        for path, body in (
            ("/wallet/getblockbynum", b'{"num":9999}'),
            ("/wallet/createtransaction", b"{}"),
            ("/wallet/getpendingsize", b"{}"),
        ):
            assert "hit" not in await rest_caches(harness, path, body), path
        stub.head += 1
        await harness.look()
        for path, body in fixed:
            assert await rest_caches(harness, path, body) == ["hit", "hit"], (path, body)
        for path, body in moving:
            assert await rest_caches(harness, path, body) == ["miss", "hit"], (path, body)


@on_uvloop
async def test_tron_upstream_that_is_behind_or_busy_is_not_believed() -> None:
    ahead, behind = TronStub(), TronStub()
    ahead.head = 502
    async with served(ahead, behind) as harness:
        for number in (501, 502):
            for _ in range(3):
                reply = await harness.request("/wallet/getblockbynum", orjson.dumps({"num": number}))
                assert reply.json["blockID"] == ahead.hash_of(number)
        behind.head = 502
        await harness.look()
        behind.fails_with = "class java.lang.IllegalAccessException : lack of computing resources"
        for serial in range(10):
            reply = await harness.request(f"/wallet/getaccount?address={serial}")
            assert reply.json["balance"] == 1_000_502, reply
        assert behind.count("GET /wallet/getaccount") > 0
        # Other errors are about the request, and are passed on as they are.
        wrong = await harness.request("/wallet/getcontract", b"{}")
        assert (wrong.status, wrong.json) == (200, {"Error": "class java.lang.NullPointerException : null"})


@on_uvloop
async def test_tron_refuses_to_make_keys_on_a_node() -> None:
    stub = TronStub()
    async with served(stub) as harness:
        reply = await harness.request("/wallet/generateaddress")
        assert reply.status == 404
        assert "client library" in reply.json["error"]["message"]
        assert not stub.count("GET /wallet/generateaddress")


# TON


@pytest.mark.parametrize("echoes", [True, False])
@on_uvloop
async def test_ton_client_works(echoes: bool) -> None:
    stub = TonStub(echoes=echoes)
    async with served(stub) as harness:
        seen = await run(harness, "ton.mjs", address=stub.ADDRESS)
        assert seen["info"]["latestSeqno"] == stub.head
        assert [each["seqno"] for each in seen["shards"]] == [207]
        assert (seen["balance"], seen["state"], seen["called"]) == (10**12 + stub.head, "active", stub.head)
        assert seen["deployed"] is True
        assert stub.writes == ["te6cckEBAQEAAgAAAEysuc0="]
        assert "seqno not in db" in seen["missing"]["message"]


@on_uvloop
async def test_ton_is_cached_by_the_block_of_the_masterchain() -> None:
    stub = TonStub()
    async with served(stub) as harness:
        address = {"address": stub.ADDRESS}
        fixed: list[tuple[str, Any]] = [
            ("shards", {"seqno": 200}),
            ("getAddressInformation", {**address, "seqno": 200}),
            ("getBlockTransactions", {"workchain": 0, "shard": "-9223372036854775808", "seqno": 9000}),
        ]
        for method, params in [*fixed, ("getMasterchainInfo", {})]:
            assert await caches(harness, method, params) == ["miss", "hit"], method
        assert await caches(harness, "getAddressInformation", address) == ["miss", "miss"]
        stub.head += 1
        await harness.look()
        for method, params in fixed:
            assert await caches(harness, method, params) == ["hit", "hit"], method
        assert await caches(harness, "getMasterchainInfo", {}) == ["miss", "hit"]


@on_uvloop
async def test_ton_replies_say_ok_and_errors_keep_their_code() -> None:
    async with served(TonStub()) as harness:

        async def reply(**call: Any) -> Any:
            return (await harness.worker.send(orjson.dumps({"jsonrpc": "2.0", **call}), network=harness.network)).json

        good = await reply(id="a", method="getMasterchainInfo")
        assert (good["id"], good["ok"], good["result"]["last"]["seqno"]) == ("a", True, 500)
        bad = await reply(id=2, method="shards", params={"seqno": 999_999})
        assert (bad["id"], bad["ok"], bad["error"]["code"]) == (2, False, 500)
        unknown = await reply(id=3, method="nothing", params={})
        assert (unknown["ok"], unknown["error"]["code"]) == (False, -32601)


@on_uvloop
async def test_ton_server_without_the_block_is_not_believed() -> None:
    ahead, behind = TonStub(), TonStub(echoes=False)
    ahead.head = 505
    async with served(ahead, behind) as harness:
        for seqno in (501, 504, 505):
            body = orjson.dumps({"jsonrpc": "2.0", "id": 1, "method": "shards", "params": {"seqno": seqno}})
            for _ in range(3):
                reply = await harness.worker.send(body, network=harness.network)
                assert reply.json["result"]["shards"][0]["seqno"] == seqno + 7


@pytest.mark.parametrize("named", [True, False])
@on_uvloop
async def test_starknet_pages_come_from_the_upstream_of_the_first(named: bool) -> None:
    stubs = [StarknetStub() for _ in range(3)]
    async with served(*stubs) as harness:

        async def page(token: str = "", key: str = "main") -> Any:
            wanted = {"chunk_size": 1, **({"continuation_token": token} if token else {})}
            params: Any = {"filter": wanted} if named else [wanted]
            body = {"jsonrpc": "2.0", "id": 1, "method": "starknet_getEvents", "params": params}
            return (await harness.worker.send(orjson.dumps(body), network=harness.network, key=key)).json

        for _ in range(6):
            found = [(await page())["result"]]
            while "continuation_token" in found[-1]:
                found.append((await page(found[-1]["continuation_token"]))["result"])
            assert [each["events"][0]["keys"] for each in found] == [["0x1"], ["0x2"], ["0x3"]]
        token = (await page())["result"]["continuation_token"]
        for wrong in (token[:-1] + "9", "0" * 16 + token[16:], "x", token.partition(".")[2], "é.a"):
            assert (await page(wrong))["error"]["code"] == 33, wrong
        harness.worker.add_key("other")
        assert (await page(token, key="other"))["error"]["code"] == 33


@on_uvloop
async def test_starknet_upstream_of_another_version_gets_no_calls() -> None:
    first, newer, third = StarknetStub(), StarknetStub(), StarknetStub()
    newer.version = "0.10.0"
    async with served(first, newer, third, states={1: "wrong_version"}) as harness:
        asked = len(newer.calls)
        for number in range(20):
            reply = await harness.worker.send(
                orjson.dumps(
                    {"jsonrpc": "2.0", "id": 1, "method": "starknet_getNonce", "params": ["latest", hex(number)]}
                ),
                network=harness.network,
            )
            assert reply.json["result"] == hex(first.head)
        assert {method for method, _ in newer.calls[asked:]} <= {"starknet_chainId", "starknet_specVersion"}
        newer.version = first.version
        await harness.shows("up", "up", "up")
