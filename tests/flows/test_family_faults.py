"""One of three upstreams is behind, hangs, is on a fork or of another chain: reads are right, and no write is sent twice.

The same holds for every chain family; their nodes are made from the specifications.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
import pytest

from tests.families_harness import CASES, FamilyHarness, Read, served
from tests.fault_stubs import LcdStub
from tests.node_stubs import NodeStub, TonStub
from tests.rest_stubs import AptosStub
from tests.service import until
from tests.web.worker import on_uvloop

ROUNDS = 12
# Within this time an upstream is chosen for some call.
ASKED_WITHIN_S = 30.0
# Reads about the newest block that may name another one.
NEWEST = {
    "starknet": Read("starknet_call", [{"contract_address": "0x1"}, "latest"]),
    "near": Read("query", {"request_type": "view_account", "account_id": "alice.near", "finality": "optimistic"}),
    "ton": Read("getAddressInformation", {"address": TonStub.ADDRESS}),
}


def trio(family: str, **fault: Any) -> list[NodeStub]:
    """Three nodes, the first of which has a fault."""
    stubs = [CASES[family].stub() for _ in range(3)]
    for name, value in fault.items():
        setattr(stubs[0], name, value)
    return stubs


async def check(harness: FamilyHarness, family: str, stubs: list[NodeStub]) -> None:
    """Every read is that of a good node, and each write arrives once at most, or once at each if it goes to all of them."""
    most = len(stubs) if CASES[family].to_all else 1
    for number in range(ROUNDS):
        for read in CASES[family].reads:
            found = harness.result_of(await harness.read(read))
            assert found == read.truth(stubs[-1]), (number, read)
        before = [len(each.writes) for each in stubs]
        await harness.read(CASES[family].write)
        added = [len(each.writes) - count for each, count in zip(stubs, before, strict=True)]
        assert max(added) <= 1
        assert sum(added) <= most
    assert any(each.writes for each in stubs)


@pytest.mark.parametrize("family", CASES)
@on_uvloop
async def test_upstream_that_is_behind(family: str) -> None:
    stubs = trio(family, head=400, final=390)
    async with served(*stubs, states={0: "lagging"}) as harness:
        await check(harness, family, stubs)


@pytest.mark.parametrize("family", CASES)
@on_uvloop
async def test_upstream_that_is_a_block_behind(family: str) -> None:
    stubs = trio(family, head=499)
    async with served(*stubs) as harness:
        await check(harness, family, stubs)


@pytest.mark.parametrize("family", CASES)
@on_uvloop
async def test_upstream_that_hangs(family: str) -> None:
    stubs = trio(family)
    async with served(*stubs) as harness:
        stubs[0].hangs = True
        case = CASES[family]
        for _ in range(3):
            for read in case.reads:
                assert harness.result_of(await harness.read(read)) == read.truth(stubs[-1]), read
        replies = await asyncio.gather(*[harness.read(case.write, X_Timeout_Ms="1000") for _ in range(6)])
        most = len(stubs) if case.to_all else 1
        assert sum(len(each.writes) for each in stubs) <= len(replies) * most


@pytest.mark.parametrize("family", [name for name, case in CASES.items() if case.forks])
@on_uvloop
async def test_upstream_on_a_fork(family: str) -> None:
    stubs = trio(family, fork=495)
    async with served(*stubs, states={0: "forked"}) as harness:
        await check(harness, family, stubs)


@pytest.mark.parametrize("family", CASES)
@on_uvloop
async def test_upstream_of_another_chain(family: str) -> None:
    stubs = trio(family, chain="2", head=9000)
    async with served(*stubs, states={0: "wrong_chain"}) as harness:
        asked = len(stubs[0].calls)
        await check(harness, family, stubs)
        # It is asked for its chain alone.
        assert not stubs[0].writes
        methods = {method for method, _ in stubs[0].calls[asked:]}
        assert len(methods) <= 1, methods


# Verified replies


@pytest.mark.parametrize("family", CASES)
@on_uvloop
async def test_quorum_ignores_what_differs_between_nodes_that_are_right(family: str) -> None:
    stubs = trio(family)
    async with served(*stubs) as harness:
        for read in CASES[family].reads:
            reply = await harness.read(read, X_Verify="quorum 3/3")
            assert reply.headers["x-verified"] == "quorum 3/3", reply
            assert harness.result_of(reply) == read.truth(stubs[-1])


@pytest.mark.parametrize("family", ["bitcoin", "cosmos", "lcd", "beacon", "starknet", "near", "ton", "tron", "aptos"])
@on_uvloop
async def test_quorum_outvotes_a_node_that_lies(family: str) -> None:
    stubs = trio(family)
    read = CASES[family].reads[1]
    async with served(*stubs) as harness:
        rest = harness.surface == "rest"
        stubs[0].lies_about = f"GET {read.method.partition('?')[0]}" if rest else read.method
        reply = await harness.read(read, X_Verify="quorum 2/3")
        assert reply.headers["x-verified"] == "quorum 2/3"
        assert harness.result_of(reply) == read.truth(stubs[-1])
        stubs[1].hangs = True
        assert (await harness.read(read, X_Verify="quorum 2/3", X_Timeout_Ms="500")).status in (503, 504)


@pytest.mark.parametrize("family", NEWEST)
@on_uvloop
async def test_quorum_reads_at_a_block_that_all_have(family: str) -> None:
    """Upstreams are rarely at the same block. The newest block that all have takes the place of the newest one."""
    stubs = trio(family, head=499)
    read = NEWEST[family]
    async with served(*stubs) as harness:
        reply = await harness.read(read, X_Verify="quorum 3/3")
        assert reply.headers["x-verified"] == "quorum 3/3", reply
        assert harness.result_of(reply) == read.truth(stubs[0])


@pytest.mark.parametrize("family", CASES)
@on_uvloop
async def test_read_needs_the_block_that_it_names(family: str) -> None:
    stubs = trio(family, head=498)
    async with served(*stubs) as harness:
        read = CASES[family].reads[0]
        for _ in range(5):
            assert harness.result_of(await harness.read(read, X_Min_Block="500")) == read.truth(stubs[-1])
        late = await harness.read(read, X_Min_Block="501")
        assert late.status in (200, 409, 503), late
        assert "501" in late.body.decode(), late


# Replies that are not JSON


@pytest.mark.parametrize("family", CASES)
@on_uvloop
async def test_reply_that_is_not_json_counts_against_the_upstream_and_is_retried(family: str) -> None:
    stubs = trio(family)
    async with served(*stubs) as harness:
        broken, case = stubs[0], CASES[family]
        bad = harness.route.upstreams[0].health.bad

        broken.is_broken = True
        # How often it is chosen depends on the latencies.
        end = time.monotonic() + ASKED_WITHIN_S
        while ("broken", None) not in broken.calls and time.monotonic() < end:
            for read in case.reads:
                assert harness.result_of(await harness.read(read)) == read.truth(stubs[-1]), read
        assert ("broken", None) in broken.calls
        assert harness.route.upstreams[0].health.bad > bad


@on_uvloop
async def test_upstream_that_has_pruned_state_is_not_asked_for_it_again_and_again() -> None:
    """Every wrong choice needs a retry, and retries are bounded."""
    whole, pruned = LcdStub(), LcdStub()
    pruned.kept = 5
    path = "/cosmos/bank/v1beta1/supply/by_denom?denom=uatom"
    async with served(whole, pruned) as harness:

        async def read(height: int) -> None:
            reply = await harness.request(path, X_Cosmos_Block_Height=str(height))
            assert (reply.status, reply.json["amount"]["amount"]) == (200, str(1_000_000 + height)), reply

        def asked() -> int:
            return pruned.count("GET /cosmos/bank/v1beta1/supply/by_denom")

        for height in range(1, 31):
            await read(height)
        assert asked() > 0
        harness.watch()
        harness.tracker.wake()
        await until(lambda: harness.route.upstreams[1].health.bounds.of("state") is not None)
        before = asked()
        for height in range(31, 151):
            await read(height)
        assert asked() == before
        for height in range(496, 501):
            await read(height)


@on_uvloop
async def test_transaction_of_aptos_is_sent_as_it_was_signed() -> None:
    stub = AptosStub()
    async with served(stub) as harness:
        write = CASES["aptos"].write
        reply = await harness.read(write)
        assert (reply.status, reply.json["hash"]) == (202, stub.HASH)
        assert stub.writes == [write.body.hex() if write.body else ""]
        # The form of JSON is passed on as well.
        wrong = await harness.read(Read("/v1/transactions", body=b"<", type="text/plain"))
        assert wrong.status == 415
        assert orjson.loads(wrong.body)["error"]["message"]
