"""The consistency token: X-Block-Number on replies, and X-Min-Block, with which no answer is older."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from proxy.core.directives import Directives
from proxy.errors import BehindBlock
from proxy.services.rpc.block_waits import MOST_POLLS, BlockWaits
from proxy.web.network_resolver import NetworkResolver
from proxy.web.rest.endpoint import RestRequest, _at_block
from tests.http_client import Reply, rpc
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import Chain, value_of
from tests.service import until
from tests.shipped_tables import TABLES
from tests.sockets import bare, refused
from tests.web.worker import NO_CACHE, on_uvloop

ADDRESS = "0x" + "ab" * 20
BALANCE = ("eth_getBalance", [ADDRESS, "latest"])
# aiohttp serves requests of web pages, the front all others.
SERVED_BY = [{}, {"Origin": "https://app.example.com"}]
TRANSFERS = 200


def balance_at(chain: Chain, number: int) -> str:
    return value_of("balance", ADDRESS, chain.hash_of(number))


def block_of(reply: Reply) -> int:
    return int(reply.headers["x-block-number"])


@pytest.mark.parametrize("more", SERVED_BY)
@pytest.mark.parametrize("count", [1, 3])
@on_uvloop
async def test_reply_has_the_block_that_its_state_has_reached(count: int, more: dict[str, str]) -> None:
    async with rpc_harness(count) as harness:
        head = harness.chain.head
        for method, params in (BALANCE, BALANCE, ("eth_chainId", []), ("eth_blockNumber", []), ("eth_nothing", [])):
            reply = await harness.call(method, params, **more)
            assert reply.headers.get("x-block-number") == (str(head) if method != "eth_nothing" else None), reply
        assert block_of(await harness.batch(BALANCE, ("eth_gasPrice", []), **more)) == head
        harness.chain.head += 1
        await harness.look()
        assert block_of(await harness.call(*BALANCE, **more)) == head + 1


@on_uvloop
async def test_block_of_a_reply_is_never_later_than_its_state() -> None:
    """The head moves while the call is under way: its reply is from before that."""
    async with rpc_harness(1, **NO_CACHE) as harness, asyncio.TaskGroup() as group:
        first = harness.upstreams[0]
        before = first.head
        first.answers["eth_getBalance"] = lambda params: balance_at(harness.chain, before)
        first.held.add("eth_getBalance")
        call = group.create_task(harness.call(*BALANCE))
        await until(lambda: first.count("eth_getBalance") == 1)
        harness.chain.head += 1
        await harness.look()
        first.gate.set()
        assert block_of(await call) == before


@on_uvloop
async def test_block_of_a_reply_from_a_lagging_upstream_is_its_own() -> None:
    async with rpc_harness(2, **NO_CACHE) as harness:
        first, second = harness.upstreams
        second.behind = 2
        await harness.look()
        await first.close()
        reply = await harness.call(*BALANCE)
        assert reply.json["result"] == balance_at(harness.chain, second.head)
        assert block_of(reply) == second.head


@pytest.mark.parametrize("more", SERVED_BY)
@on_uvloop
async def test_call_goes_to_an_upstream_that_has_the_block(more: dict[str, str]) -> None:
    async with rpc_harness(3, **NO_CACHE) as harness:
        for each in harness.upstreams[:2]:
            each.behind = 1
        await harness.look()
        head = harness.chain.head
        for block in (str(head), hex(head)):
            reply = await harness.call(*BALANCE, X_Min_Block=block, **more)
            assert reply.json["result"] == balance_at(harness.chain, head)
            assert block_of(reply) == head
        batch = await harness.batch(BALANCE, ("eth_gasPrice", []), X_Min_Block=str(head), **more)
        assert batch.json[0]["result"] == balance_at(harness.chain, head)
        assert block_of(batch) == head


@pytest.mark.parametrize("more", SERVED_BY)
@pytest.mark.parametrize("count", [1, 3])
@on_uvloop
async def test_call_waits_for_the_block(count: int, more: dict[str, str]) -> None:
    async with rpc_harness(count) as harness, asyncio.TaskGroup() as group:
        await harness.call(*BALANCE, **more)
        target = harness.chain.head + 1
        wait: dict[str, Any] = {"X_Min_Block": str(target), "X_Min_Block_Wait": "10"}
        call = group.create_task(harness.call(BALANCE[0], BALANCE[1], **{**wait, **more}))
        asked = harness.count("eth_getBlockByNumber")
        await until(lambda: harness.count("eth_getBlockByNumber") > asked + count)
        assert not call.done()
        harness.chain.head = target
        reply = await call
        assert reply.json["result"] == balance_at(harness.chain, target)
        assert block_of(reply) == target


@pytest.mark.parametrize("more", SERVED_BY)
@on_uvloop
async def test_block_that_does_not_come_is_a_503_with_the_newest_one(more: dict[str, str]) -> None:
    async with rpc_harness(2) as harness:
        head = harness.chain.head
        target: dict[str, Any] = {"X_Min_Block": str(head + 5), "X_Min_Block_Wait": "0.05"}
        reply = await harness.call(BALANCE[0], BALANCE[1], **{**target, **more})
        assert str(head + 5) in reply.fault(503)["message"]
        assert (reply.headers["retry-after"], block_of(reply)) == ("1", head)
        assert reply.json["error"]["details"] == {"block": head}
        batch = await harness.batch(BALANCE, ("eth_gasPrice", []), **target, **more)
        errors = [each["error"] for each in batch.json]
        assert [(each["code"], each["data"]["block"]) for each in errors] == [(-32002, head)] * 2
        assert not harness.count("eth_getBalance")


@on_uvloop
async def test_block_that_only_another_host_has_seen_is_not_there_yet() -> None:
    async with rpc_harness(2) as harness:
        head = harness.chain.head
        harness.route.state.follow(head + 1, 0, is_lower=False)
        reply = await harness.call(*BALANCE, X_Min_Block=str(head + 1), X_Min_Block_Wait="0.05")
        assert str(head + 1) in reply.fault(503)["message"]
        assert block_of(reply) == head


@on_uvloop
async def test_cached_reply_from_before_the_block_does_not_follow_it() -> None:
    """Only one upstream has the block, so the network's head is still the one before it."""
    async with rpc_harness(3) as harness:
        for each in harness.upstreams[:2]:
            each.behind = 1
        await harness.look()
        head = harness.chain.head
        await harness.call(*BALANCE)
        assert block_of(await harness.call(*BALANCE, X_Min_Block=str(head))) == head
        reply = await harness.call(*BALANCE)
        assert reply.json["result"] == balance_at(harness.chain, head)
        assert block_of(reply) == head


@on_uvloop
async def test_upstream_with_an_impossible_head_does_not_have_the_block() -> None:
    async with rpc_harness(3) as harness:
        liar, head = harness.upstreams[0], harness.chain.head
        liar.behind = -1_000_000
        await harness.look()
        target: dict[str, Any] = {"X_Min_Block": str(head + 1), "X_Min_Block_Wait": "0.05"}
        reply = await harness.call(*BALANCE, **target)
        assert reply.fault(503)
        assert block_of(reply) == head
        assert not liar.count("eth_getBalance")


@on_uvloop
async def test_client_that_leaves_while_its_call_waits_leaves_nothing_behind() -> None:
    async with rpc_harness(1) as harness:
        client = await harness.worker.connect()
        body = rpc(*BALANCE)
        await client.write(harness.worker.post(body, X_Min_Block=str(harness.chain.head + 1), X_Min_Block_Wait="10"))
        waits = harness.route.dispatcher.takeovers.block_waits
        assert isinstance(waits, BlockWaits)
        await until(lambda: len(waits) == 1)
        await client.close()
        await until(lambda: len(waits) == 0)
        harness.chain.head += 1
        await harness.look()
        assert not harness.count("eth_getBalance")


@on_uvloop
async def test_calls_that_wait_for_a_block_are_paid_for_and_cause_few_polls() -> None:
    """Upstreams limit the calls of all accounts together, and a block that never comes would cost its account nothing."""
    async with rpc_harness(1) as harness:
        key = harness.worker.add_key("patient")
        wait: dict[str, Any] = {"X_Min_Block": str(harness.chain.head + 5), "X_Min_Block_Wait": "4"}
        began, polls = time.monotonic(), harness.count("eth_getBlockByNumber")
        replies = await asyncio.gather(*[harness.call(*BALANCE, key="patient", **wait) for _ in range(3)])
        took_s = time.monotonic() - began
        assert [reply.status for reply in replies] == [503] * 3
        assert harness.count("eth_getBlockByNumber") - polls <= MOST_POLLS + took_s + 1
        buckets = harness.worker.app.admission.buckets
        assert buckets.edge(key.rate.bucket_index) == pytest.approx(began - 1 + 3 * key.rate.request_s, abs=1.0)
        assert buckets.edge(key.rate.bucket_index) > began - 1 + 2.5 * key.rate.request_s


@on_uvloop
async def test_data_is_not_read_very_often_while_a_request_waits_for_its_block() -> None:
    reads = 0

    async def handler(_: RestRequest) -> dict[str, int]:
        nonlocal reads
        reads += 1
        return {"as_of_block": 1}

    async with rpc_harness(1) as harness:
        app = harness.worker.app
        resolver = NetworkResolver(TABLES.chains, app.networks, app.admission)
        directives = Directives(min_block=2, min_block_wait=2.0)
        asked = RestRequest(harness.worker.add_key("patient"), 0, {}, {}, None, resolver, directives)
        with pytest.raises(BehindBlock):
            await _at_block(handler, asked)
        assert 2 <= reads <= 12


@on_uvloop
async def test_socket_with_a_least_block_gets_no_older_answer() -> None:
    async with rpc_harness(2) as harness:
        target = harness.chain.head + 1
        assert "X-Min-Block" in (await refused(harness.worker, X_Min_Block="latest")).fault(400)["message"]
        async with bare(harness.worker, X_Min_Block=str(target), X_Min_Block_Wait="0.05") as socket:
            socket.write(rpc(*BALANCE))
            assert (await socket.json())["error"]["code"] == -32002
            harness.chain.head = target
            socket.write(rpc(*BALANCE))
            assert (await socket.json())["result"] == balance_at(harness.chain, target)


@asynccontextmanager
async def two_lagging() -> AsyncIterator[RpcHarness]:
    """Three upstreams of which two are a block behind, polled as in the product."""
    async with rpc_harness(3) as harness:
        for each in harness.upstreams[1:]:
            each.behind = 1
        await harness.look()
        harness.watch()
        yield harness


@on_uvloop
async def test_read_after_a_transfer_is_stale_without_the_token_and_never_with_it() -> None:
    async with two_lagging() as harness:
        chain, stale = harness.chain, 0
        for _ in range(TRANSFERS):
            chain.head += 1  # A transfer is mined, and the client learns its block from a webhook.
            plain = await harness.call(*BALANCE)
            stale += plain.json["result"] != balance_at(chain, chain.head)
            reply = await harness.call(*BALANCE, X_Min_Block=str(chain.head), X_Min_Block_Wait="10")
            assert reply.status == 200, reply
            assert reply.json["result"] == balance_at(chain, chain.head)
            assert block_of(reply) == chain.head
        assert stale
