"""Solana RPC on a real virtual machine: commitments, sends that happen once, and errors passed on unchanged."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.faults import Mode
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import Refused
from tests.shipped_tables import TABLES
from tests.svm_upstreams import PAYEE, PAYER, SvmChain, SvmUpstream, signed_transfer
from tests.web.worker import on_uvloop

NETWORK = "solana/mainnet"
SVM = {name: method.price for name, method in TABLES.methods["svm"].items()}
SEND = "sendTransaction"
BASE64 = {"encoding": "base64"}


@asynccontextmanager
async def solana(count: int = 2, **options: Any) -> AsyncIterator[RpcHarness]:
    async with rpc_harness(count, chain=SvmChain(), kind=SvmUpstream, network=NETWORK, **options) as harness:
        yield harness


async def transaction(harness: RpcHarness, lamports: int = 1_000_000) -> str:
    latest = await harness.result("getLatestBlockhash", [])
    return signed_transfer(latest["value"]["blockhash"], lamports)


def sent(harness: RpcHarness) -> list[int]:
    return [each.methods[SEND] for each in harness.proxies] or [each.count(SEND) for each in harness.upstreams]


async def cache_status(harness: RpcHarness, method: str, params: list[Any]) -> str:
    reply = await harness.call(method, params)
    assert reply.status == 200, reply
    return reply.headers.get("x-cache", "")


@on_uvloop
async def test_transfer_is_sent_and_shows_in_balances_accounts_and_statuses() -> None:
    async with solana() as harness:
        assert await harness.result("getHealth") == "ok"
        assert await harness.result("getSlot") == harness.chain.head
        before = (await harness.result("getBalance", [str(PAYER.pubkey())]))["value"]
        signature = await harness.result(SEND, [await transaction(harness), BASE64])
        assert (await harness.result("getBalance", [str(PAYER.pubkey())]))["value"] == before - 1_000_000 - 5000
        account = await harness.result("getAccountInfo", [str(PAYEE), BASE64])
        assert account["value"]["lamports"] == 1_000_000
        statuses = await harness.result("getSignatureStatuses", [[signature]])
        assert [(each["slot"], each["err"]) for each in statuses["value"]] == [(harness.chain.head, None)]
        assert (await harness.result("getTransaction", [signature, {"encoding": "base64"}]))[
            "slot"
        ] == harness.chain.head


@on_uvloop
async def test_calls_cost_the_units_of_the_price_table() -> None:
    async with solana() as harness:
        for method, params in (("getBalance", [str(PAYEE)]), ("getSlot", []), ("getMultipleAccounts", [[str(PAYEE)]])):
            assert (await harness.call(method, params)).headers["x-compute-units"] == str(SVM[method])


# Commitments


@pytest.mark.parametrize(
    ("config", "again", "moved"),
    [
        ([], "hit", "miss"),
        ([{"commitment": "finalized"}], "hit", "miss"),
        ([{"commitment": "confirmed"}], "hit", "miss"),
        ([{"commitment": "processed"}], "miss", "miss"),
        ([{"encoding": "base64", "commitment": "processed"}], "miss", "miss"),
    ],
)
@on_uvloop
async def test_reply_is_cached_as_long_as_its_commitment_allows(config: list[Any], again: str, moved: str) -> None:
    async with solana() as harness:
        params = [str(PAYER.pubkey()), *config]
        assert [await cache_status(harness, "getBalance", params) for _ in range(2)] == ["miss", again]
        harness.chain.head += 1
        await harness.look()
        assert await cache_status(harness, "getBalance", params) == moved


@on_uvloop
async def test_replies_of_different_commitments_are_separate() -> None:
    async with solana() as harness:
        slots = [
            (await harness.result("getBalance", [str(PAYEE), {"commitment": each}]))["context"]["slot"]
            for each in ("finalized", "confirmed", "finalized", "processed")
        ]
        head = harness.chain.head
        assert slots == [head, head + 32, head, head + 32]


@on_uvloop
async def test_transaction_is_cached_permanently_once_its_slot_is_final() -> None:
    async with solana() as harness:
        signature = await harness.result(SEND, [await transaction(harness), BASE64])
        assert [await cache_status(harness, "getTransaction", [signature]) for _ in range(2)] == ["miss", "hit"]
        harness.chain.head += 40
        await harness.look()
        assert [await cache_status(harness, "getTransaction", [signature]) for _ in range(2)] == ["miss", "hit"]
        harness.chain.head += 1
        await harness.look()
        assert await cache_status(harness, "getTransaction", [signature]) == "hit"


@on_uvloop
async def test_missing_accounts_and_statuses_are_not_cached() -> None:
    async with solana(1) as harness:
        for method, params in (("getAccountInfo", [str(PAYEE)]), ("getSignatureStatuses", [["x"]])):
            assert "hit" not in [await cache_status(harness, method, params) for _ in range(3)]
            assert harness.count(method) == 3


@on_uvloop
async def test_account_missing_at_a_lagging_upstream_is_read_elsewhere() -> None:
    async with solana() as harness:
        harness.upstreams[0].behind = 1
        harness.upstreams[0].answers["getAccountInfo"] = lambda _: {"context": {"slot": 1}, "value": None}
        await harness.look()
        await harness.result(SEND, [await transaction(harness), BASE64])
        for _ in range(8):
            account = await harness.result("getAccountInfo", [str(PAYEE), BASE64], Cache_Control="no-cache")
            assert account["value"] is not None


# Sends


@pytest.mark.parametrize("broadcast", [1, 3])
@on_uvloop
async def test_send_goes_to_one_upstream_once_even_if_evm_sends_are_broadcast(broadcast: int) -> None:
    async with solana(3, rpc={"broadcast": broadcast}) as harness:
        await harness.result(SEND, [await transaction(harness), BASE64])
        assert sorted(sent(harness)) == [0, 0, 1]


@pytest.mark.parametrize("mode", ["reset", "half", "garbage", "black_hole", "slow"])
@on_uvloop
async def test_send_that_may_have_landed_is_neither_retried_nor_hedged(mode: Mode) -> None:
    async with solana(3, faults=True, rpc={"call_timeout_s": 0.5}) as harness:
        for _ in range(60):
            await harness.result("getHealth")
        raw = await transaction(harness)
        for proxy in harness.proxies:
            proxy.delay_s = 0.2
            await proxy.switch(mode)
        reply = await harness.call(SEND, [raw, BASE64])
        assert reply.status == (200 if mode == "slow" else 504 if mode == "black_hole" else 500)
        assert sorted(sent(harness)) == [0, 0, 1]


@on_uvloop
async def test_send_that_was_never_written_goes_to_another_upstream() -> None:
    async with solana(2, faults=True) as harness:
        raw = await transaction(harness)
        await harness.proxies[0].switch("dead")
        await harness.result(SEND, [raw, BASE64])
        assert sent(harness) == [0, 1]


# Errors


@on_uvloop
async def test_error_of_a_send_is_passed_on_unchanged() -> None:
    async with solana() as harness:
        raw = await transaction(harness)
        await harness.result(SEND, [raw, BASE64])
        reply = await harness.call(SEND, [raw, BASE64])
        assert reply.json["error"] == {
            "code": -32002,
            "message": "Transaction simulation failed: AlreadyProcessed",
            "data": {"accounts": None, "err": "AlreadyProcessed", "logs": [], "unitsConsumed": 0},
        }
        poor = await harness.call(SEND, [await transaction(harness, 10**15), BASE64])
        assert poor.json["error"]["code"] == -32002
        assert any("insufficient lamports" in line for line in poor.json["error"]["data"]["logs"])


@pytest.mark.parametrize(
    ("code", "message", "data"),
    [
        (-32005, "Node is behind by 42 slots", {"numSlotsBehind": 42}),
        (-32007, "Slot 5 was skipped, or missing due to ledger jump to recent snapshot", None),
        (-32009, "Slot 5 was skipped, or missing in long-term storage", None),
        (-32004, "Block not available for slot 5", None),
        (-32015, "Transaction version (0) is not supported by the requesting client", None),
        (-32602, "Invalid param: WrongSize", None),
        (-32016, "Minimum context slot has not been reached", {"contextSlot": 3}),
    ],
)
@on_uvloop
async def test_native_error_is_passed_on_unchanged(code: int, message: str, data: Any) -> None:
    given = {"code": code, "message": message, **({"data": data} if data else {})}

    def refuse(_: list[Any]) -> Any:
        raise Refused(**given)

    async with solana() as harness:
        for each in harness.upstreams:
            each.answers["getBlock"] = refuse
        reply = await harness.call("getBlock", [5, {"maxSupportedTransactionVersion": 0}])
        assert (reply.status, reply.json["error"]) == (200, given)


@on_uvloop
async def test_upstream_that_reports_being_behind_is_not_used() -> None:
    def behind(_: list[Any]) -> Any:
        raise Refused(-32005, "Node is behind by 42 slots", data={"numSlotsBehind": 42})

    async with solana() as harness:
        harness.upstreams[0].answers["getBalance"] = behind
        for n in range(20):
            params = [str(PAYEE), {"commitment": "processed", "minContextSlot": n}]
            assert "value" in await harness.result("getBalance", params)


@pytest.mark.parametrize(
    "method", ["eth_blockNumber", "getbalance", "GETBALANCE", "getConfirmedBlock", "validatorExit"]
)
@on_uvloop
async def test_unknown_method_is_not_found(method: str) -> None:
    async with solana(1) as harness:
        reply = await harness.call(method, [])
        assert (reply.status, reply.json["error"]["code"]) == (200, -32601)
        assert harness.count(method) == 0


@on_uvloop
async def test_subscription_needs_a_socket() -> None:
    async with solana(1) as harness:
        reply = await harness.call("slotSubscribe", [])
        assert reply.json["error"]["code"] == -32601
        assert "WebSocket" in reply.json["error"]["message"]
