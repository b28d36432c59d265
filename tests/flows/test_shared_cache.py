"""The shared cache on a real Redis: it stores final replies only, and calls work without it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy.store.valkey.shared_replies import LOOK_S, QUEUE, SharedReplies
from tests.redis_server import RedisServer, redis_server, require_redis
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import Chain
from tests.service import until
from tests.web.worker import TEST, on_uvloop

ADDRESS = "0x" + "ab" * 20
TX = "0x" + "cd" * 32
FORKED = ("eth_getBalance", [ADDRESS, "0x5"])
OLD = ("eth_getBalance", [ADDRESS, "0x1"])


@pytest.fixture(scope="module", autouse=True)
def _redis() -> None:
    require_redis()


@asynccontextmanager
async def hosts(
    redis: RedisServer, *networks: str | None, chain: Chain | None = None
) -> AsyncIterator[list[RpcHarness]]:
    """A worker each, of one chain, with nothing in common but the Redis."""
    chain = chain or Chain()
    async with AsyncExitStack() as stack:
        found = []
        for network in networks:
            options: dict[str, Any] = {"network": network} if network else {}
            started = rpc_harness(1, chain=chain, valkey={"cache_url": redis.url}, **options)
            found.append(await stack.enter_async_context(started))
        yield found


async def how(harness: RpcHarness, method: str, params: list[Any], **options: Any) -> str:
    reply = await harness.call(method, params, **options)
    assert reply.status == 200, reply
    assert "result" in reply.json
    return reply.headers.get("x-cache", "")


@on_uvloop
async def test_final_answer_of_one_worker_is_found_by_another(tmp_path: Path) -> None:
    chain = Chain(mined={TX: 900})
    calls = [OLD, ("eth_getTransactionReceipt", [TX]), ("web3_sha3", ["0x"])]
    async with redis_server(tmp_path) as redis, hosts(redis, None, None, chain=chain) as (one, other):
        for method, params in calls:
            assert await how(one, method, params) == "miss"
        await until(lambda: redis.size() == len(calls))
        for method, params in calls:
            assert await other.result(method, params) == await one.result(method, params)
            assert await how(other, method, params) == "hit"
            assert other.count(method) == 0


@on_uvloop
async def test_only_final_replies_are_shared(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as redis, hosts(redis, None) as (one,):
        for method, params in (
            ("eth_getBalance", [ADDRESS, "latest"]),
            ("eth_getBalance", [ADDRESS, hex(one.chain.head - 3)]),
            ("eth_getBlockByNumber", ["finalized", False]),
            ("eth_gasPrice", []),
            ("eth_getTransactionCount", [ADDRESS, "latest"]),
        ):
            await one.result(method, params)
        assert await one.result("eth_getTransactionReceipt", [TX]) is None
        await one.result(*OLD)
        await until(lambda: redis.size() > 0)
        assert redis.size() == 1


@on_uvloop
async def test_another_network_and_another_chain_of_the_same_name_find_nothing(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as redis, hosts(redis, None, TEST) as (one, test):
        await one.result(*OLD)
        await until(lambda: redis.size() == 1)
        assert await how(test, *OLD) == "miss"
        async with hosts(redis, None, chain=Chain(name="restarted")) as (restarted,):
            assert await how(restarted, *OLD) == "miss"
            assert await restarted.result(*OLD) != await one.result(*OLD)


@on_uvloop
async def test_batch_uses_shared_replies_and_requests_the_rest_together(tmp_path: Path) -> None:
    chain = Chain()
    chain.mined = {f"0x{n:064x}": 900 for n in range(10)}
    async with redis_server(tmp_path) as redis, hosts(redis, None, None, chain=chain) as (one, other):
        receipts = [("eth_getTransactionReceipt", [tx]) for tx in chain.mined]
        await one.batch(*receipts[:5])
        await until(lambda: redis.size() == 5)
        before = other.upstreams[0].requests
        reply = await other.batch(*receipts, ("eth_getBalance", [ADDRESS, "latest"]))
        assert [item["result"]["transactionHash"] for item in reply.json[:-1]] == list(chain.mined)
        assert "result" in reply.json[-1]
        assert other.count("eth_getTransactionReceipt") == 5
        assert other.upstreams[0].requests - before == 2


@on_uvloop
async def test_caller_that_wants_no_cache_is_not_given_the_shared_one(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as redis, hosts(redis, None, None) as (one, other):
        await one.result(*OLD)
        await until(lambda: redis.size() == 1)
        assert await how(other, *OLD, Cache_Control="no-cache") == "miss"
        assert other.count("eth_getBalance") == 1


@on_uvloop
async def test_redis_that_is_away_is_skipped_and_used_again_when_it_is_back(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as redis, hosts(redis, None) as (one,):
        await one.result(*OLD)
        await until(lambda: redis.size() == 1)
        await redis.stop()
        took = await _time_calls(one, 2, 60)
        print(f"\naway: slowest {max(took) * 1000:.1f} ms of {len(took)}")
        await redis.start()
        fresh = iter(range(200, 900))

        async def is_used() -> bool:
            await one.result("eth_getBalance", [ADDRESS, hex(next(fresh))])
            return redis.size() > 0

        await until(is_used)


@on_uvloop
async def test_redis_that_hangs_costs_one_look_and_not_every_call(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as redis, hosts(redis, None) as (one,):
        await one.result(*OLD)
        await until(lambda: redis.size() == 1)
        redis.freeze()
        try:
            took = await _time_calls(one, 2, 40)
        finally:
            redis.thaw()
        print(f"\nhanging: slowest {max(took) * 1000:.1f} ms, {sum(each > LOOK_S for each in took)} of 40 waited")
        # A busy machine delays some of the others too.
        assert sum(each > LOOK_S for each in took) <= 20


async def _time_calls(harness: RpcHarness, first: int, count: int) -> list[float]:
    took = []
    for number in range(first, first + count):
        began = time.monotonic()
        assert await how(harness, "eth_getBalance", [ADDRESS, hex(number)]) == "miss"
        took.append(time.monotonic() - began)
    return took


@on_uvloop
async def test_caller_that_disconnects_during_the_lookup_causes_no_upstream_call(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as redis, hosts(redis, None) as (one,):
        await one.result(*OLD)
        await until(lambda: redis.size() == 1)
        redis.freeze()
        client = await one.worker.connect()
        body = b'{"jsonrpc":"2.0","id":1,"method":"eth_getBalance","params":["%b","0x2"]}' % ADDRESS.encode()
        await client.write(one.worker.post(body, network=one.network))
        await until(lambda: bool(one.route.state.flights), every_s=0.001)
        await client.close()
        await until(lambda: not one.route.state.flights)
        redis.thaw()
        assert one.count("eth_getBalance") == 1


@on_uvloop
async def test_queue_of_writes_is_bounded_and_full_it_drops() -> None:
    shared = SharedReplies("redis://127.0.0.1:1/0")
    for n in range(QUEUE + 10):
        shared.put(str(n), b"x")
    shared.put("large", bytes(2 << 20))
    assert shared.dropped == 10
    found: list[Sequence[bytes | None]] = []
    shared.look(["1", "2"], found.append)
    assert found == [[None, None]]
    assert not shared.is_available(time.monotonic())


@on_uvloop
async def test_bytes_of_queued_writes_are_bounded() -> None:
    shared = SharedReplies("redis://127.0.0.1:1/0")
    for n in range(20):
        shared.put(str(n), bytes(1 << 20))
    assert shared.dropped == 4


# An upstream on another branch


@asynccontextmanager
async def forked_worker(redis: RedisServer) -> AsyncIterator[RpcHarness]:
    """Three upstreams, of which the first is on another branch since the first blocks, which has not been found yet."""
    async with rpc_harness(3, valkey={"cache_url": redis.url}) as harness:
        await harness.look()
        stray, chain = harness.upstreams[0], harness.chain
        stray.chain = Chain(chain.head, chain.name, chain.identity, {1: 1})
        yield harness


def only_stray(harness: RpcHarness, *, only: bool) -> None:
    for upstream in harness.route.upstreams[1:]:
        upstream.health.cordon(cordoned=only, now=time.monotonic())


@on_uvloop
async def test_shared_replies_of_an_upstream_that_is_found_on_another_branch_are_deleted(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as redis, forked_worker(redis) as harness:
        only_stray(harness, only=True)
        wrong = await harness.result(*FORKED)
        await until(lambda: redis.size() == 1)
        only_stray(harness, only=False)
        await harness.shows("forked", "up", "up")
        await until(lambda: redis.size() == 0)
        assert await harness.result(*FORKED) != wrong


@on_uvloop
async def test_reply_that_was_under_way_from_an_upstream_found_on_another_branch_is_not_shared(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as redis, forked_worker(redis) as harness:
        stray = harness.upstreams[0]
        stray.held = {"eth_getBalance"}
        async with asyncio.TaskGroup() as group:
            only_stray(harness, only=True)
            waiting = group.create_task(harness.result(*FORKED, X_Retry="0"))
            await until(lambda: stray.count("eth_getBalance") == 1)
            only_stray(harness, only=False)
            await harness.shows("forked", "up", "up")
            stray.gate.set()
        await waiting
        assert await how(harness, "eth_getBalance", [ADDRESS, "0x6"]) == "miss"
        await until(lambda: redis.size() == 1)
        assert await how(harness, *FORKED) == "miss"
