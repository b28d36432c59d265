"""Batches above the rate: items are admitted as the buckets refill, and refused one by one when that takes too long."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import orjson
import pytest

from proxy import telemetry
from proxy.core.access import Limits
from proxy.services.rpc.batch_admission import MOST_OF_ACCOUNT
from tests.http_client import Reply
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import value_of
from tests.service import holds, until
from tests.sockets import bare
from tests.web.worker import NO_CACHE, on_uvloop

# 50 units each.
DEAR = "trace_replayTransaction"


def reads(count: int) -> list[tuple[str, list[Any]]]:
    return [("eth_call", [{"data": hex(n)}, "latest"]) for n in range(count)]


def check_results(items: list[dict[str, Any]], calls: list[tuple[str, list[Any]]]) -> None:
    assert [item.get("result") for item in items] == [value_of(method, params) for method, params in calls]


@on_uvloop
async def test_batch_above_the_rate_is_answered_in_order_as_the_bucket_refills() -> None:
    async with rpc_harness(1, **NO_CACHE) as harness:
        harness.worker.add_key("small", limits=Limits(20, 10_000, 0))
        calls = reads(40)
        reply = await harness.batch(*calls, key="small")
        assert reply.status == 200
        assert [item["id"] for item in reply.json] == list(range(40))
        check_results(reply.json, calls)
        assert reply.headers["x-compute-units"] == "120"


@on_uvloop
async def test_items_beyond_the_bound_are_refused_with_a_time_to_retry() -> None:
    async with rpc_harness(1, rpc={"batch_wait_s": 0.3}, **NO_CACHE) as harness:
        key = harness.worker.add_key("small", limits=Limits(10, 10_000, 0))
        calls = reads(60)
        reply = await harness.batch(*calls, key="small")
        refused = [item["id"] for item in reply.json if "error" in item]
        admitted = 60 - len(refused)
        assert refused == list(range(admitted, 60))
        assert admitted >= 10
        check_results(reply.json[:admitted], calls[:admitted])
        for item in reply.json[admitted:]:
            assert item["error"]["code"] == -32005
            assert item["error"]["data"] == {"retryAfter": 1}
        assert reply.headers["x-compute-units"] == str(3 * admitted)
        counted = key.tallies[harness.route.policies["eth_call"].tally]
        assert (counted.results, counted.errors, counted.faults) == (admitted, 60 - admitted, 0)
        assert counted.units == 3 * admitted


def waits() -> tuple[float, float]:
    """How many items have waited for a rate, and for how long together."""
    (family,) = telemetry.rate_wait_seconds.collect()
    found = {each.name: each.value for each in family.samples if each.labels["kind"] == "batch"}
    return found.get("penstock_rate_wait_seconds_count", 0.0), found.get("penstock_rate_wait_seconds_sum", 0.0)


async def repeated(harness: RpcHarness, count: int, key: str) -> Reply:
    """Send a batch as ethers does: it repeats a request that got a 429 at once, and not a single call of a batch."""
    for _ in range(12):
        reply = await harness.batch(*reads(count), key=key)
        if reply.status != 429:
            return reply
        assert reply.headers["retry-after"] == "1"
    raise AssertionError("twelve attempts")


def is_whole(reply: Reply, count: int) -> bool:
    return [item.get("result") for item in reply.json] == [value_of(method, params) for method, params in reads(count)]


@pytest.mark.parametrize("counts", [(70, 70), (45, 45), (60, 20, 70), (5, 70, 1), (35, 35, 35, 35)])
@on_uvloop
async def test_batches_follow_each_other_if_the_rate_is_too_low_for_all(counts: tuple[int, ...]) -> None:
    """Each of them can be answered in time (20 calls and 20 a second), but not all at once."""
    async with rpc_harness(1, rpc={"batch_wait_s": 2.75}, **NO_CACHE) as harness:
        harness.worker.add_key("small", limits=Limits(20, 10_000, 0))
        began = time.monotonic()
        replies = await asyncio.gather(*(repeated(harness, count, "small") for count in counts))
        took_s = time.monotonic() - began
        assert [is_whole(reply, count) for reply, count in zip(replies, counts, strict=True)] == [True] * len(counts)
        # Refused batches have reached no upstream, and have not taken tokens.
        assert sent(harness) == sum(counts)
        assert sum(counts) / 20 - 1.1 < took_s < sum(counts) / 20 + len(counts)
        assert len(harness.worker.app.rpc.waiting_batches) == 0


@on_uvloop
async def test_batch_that_is_under_way_is_not_cut_by_a_later_one_of_another_key() -> None:
    async with rpc_harness(1, rpc={"batch_wait_s": 2.75}, **NO_CACHE) as harness:
        first = harness.worker.add_key("small", limits=Limits(20, 10_000, 0))
        harness.worker.add_key("second", beside=first)
        async with asyncio.TaskGroup() as group:
            early = group.create_task(harness.batch(*reads(70), key="small"))
            await until(lambda: sent(harness) >= 15, every_s=0.01)
            late = group.create_task(harness.batch(*reads(30), key="second"))
        assert is_whole(early.result(), 70)
        assert late.result().status == 429
        assert is_whole(await repeated(harness, 30, "second"), 30)


@on_uvloop
async def test_batch_on_a_socket_that_cannot_start_gets_an_error_for_each_call() -> None:
    async with rpc_harness(1, rpc={"batch_wait_s": 2.75}, **NO_CACHE) as harness:
        harness.worker.add_key("small", limits=Limits(20, 10_000, 0))
        under_way = asyncio.get_running_loop().create_task(harness.batch(*reads(70), key="small"))
        await until(lambda: sent(harness) >= 15, every_s=0.01)
        async with bare(harness.worker, network=harness.network, key="small") as socket:
            socket.write(
                orjson.dumps(
                    [{"jsonrpc": "2.0", "id": n, "method": m, "params": p} for n, (m, p) in enumerate(reads(30))]
                )
            )
            refused = await socket.json()
        assert [item["id"] for item in refused] == [*range(30)]
        assert {item["error"]["code"] for item in refused} == {-32005}
        assert is_whole(await under_way, 70)
        assert sent(harness) == 70


@on_uvloop
async def test_batch_of_a_full_bucket_and_a_wait_starts_only_with_a_full_bucket() -> None:
    """One that cannot be answered whole any more is refused when it could be if it were sent again."""
    async with rpc_harness(1, rpc={"batch_wait_s": 2.0}, **NO_CACHE) as harness:
        harness.worker.add_key("small", limits=Limits(20, 10_000, 0))
        assert is_whole(await harness.batch(*reads(20), key="small"), 20)
        began = time.monotonic()
        refused = await harness.batch(*reads(58), key="small")
        assert "send it again" in refused.fault(429)["message"]
        assert 0.8 <= time.monotonic() - began < 1.9
        assert sent(harness) == 20
        assert is_whole(await harness.batch(*reads(58), key="small"), 58)


@on_uvloop
async def test_first_calls_of_a_batch_are_refunded_if_they_are_not_made() -> None:
    """They are charged together and sent in steps."""
    async with rpc_harness(1, rpc={"batch_wait_s": 2.0}, **NO_CACHE) as harness:
        key = harness.worker.add_key("large", limits=Limits(200, 100_000, 0))
        asking = asyncio.get_running_loop().create_task(harness.batch(*reads(580), key="large"))
        await until(lambda: sent(harness) >= 1, every_s=0.0)
        harness.worker.app.keyring.remove(key)
        refused = [item for item in (await asking).json if "error" in item]
        assert {item["error"]["code"] for item in refused} == {-32016}
        made = sent(harness)
        assert made == 580 - len(refused)
        harness.worker.add_key("beside", beside=key)
        left = 200 - made
        if left > 0:
            assert is_whole(await harness.batch(*reads(left), key="beside"), left)


@on_uvloop
async def test_wait_for_the_own_rate_is_not_a_part_of_the_calls_time() -> None:
    async with rpc_harness(1, rpc={"batch_wait_s": 1.0}, **NO_CACHE) as harness:
        key = harness.worker.add_key("small", limits=Limits(10, 10_000, 0))
        (items, waited_s), began = waits(), time.monotonic()
        reply = await harness.batch(*reads(60), key="small")
        took_s = time.monotonic() - began
        admitted = len([item for item in reply.json if "result" in item])
        assert 10 < admitted < 60
        # Those that were admitted later or refused have waited, and the others have not.
        assert waits()[0] - items >= 60 - 11
        waited_s = waits()[1] - waited_s
        assert (60 - admitted) * 0.5 < waited_s <= 60 * took_s
        counted = key.tallies[harness.route.policies["eth_call"].tally]
        assert counted.seconds + waited_s <= 60 * took_s
        assert counted.seconds < 0.5 * waited_s


@on_uvloop
async def test_batch_that_waits_for_its_own_rate_is_not_recorded_as_slow() -> None:
    async with rpc_harness(1, requests={"slow_ms": 200.0}, **NO_CACHE) as harness:
        harness.worker.add_key("small", limits=Limits(20, 10_000, 0))
        assert is_whole(await harness.batch(*reads(40), key="small"), 40)
        assert "slow" not in {each.reason for each in harness.worker.app.recorder.waiting}


@on_uvloop
async def test_call_that_costs_more_than_the_bucket_holds_fails_alone() -> None:
    async with rpc_harness(1, **NO_CACHE) as harness:
        harness.worker.add_key("poor", limits=Limits(100, 40, 0))
        calls = [*reads(2), (DEAR, ["0x" + "11" * 32, ["trace"]]), ("eth_noSuchThing", []), *reads(20)]
        reply = await harness.batch(*calls, key="poor")
        assert [item.get("error", {}).get("code") for item in reply.json[:5]] == [None, None, -32600, -32601, None]
        assert "can never fit" in reply.json[2]["error"]["message"]
        check_results(reply.json[4:], reads(20))


@on_uvloop
async def test_batch_of_a_thousand_is_answered_and_a_larger_one_refused() -> None:
    async with rpc_harness(1, **NO_CACHE) as harness:
        calls = reads(1000)
        check_results((await harness.batch(*calls)).json, calls)
        refused = await harness.batch(*calls, calls[0])
        assert "more than 1000 items" in refused.fault(400)["message"]


@on_uvloop
async def test_largest_batch_is_a_setting() -> None:
    async with rpc_harness(1, rpc={"max_batch": 3}, **NO_CACHE) as harness:
        check_results((await harness.batch(*reads(3))).json, reads(3))
        assert "more than 3 items" in (await harness.batch(*reads(4))).fault(400)["message"]


@pytest.mark.parametrize("count", [2, 200])
@on_uvloop
async def test_batch_after_the_daily_quota_is_a_429(count: int) -> None:
    async with rpc_harness(1, **NO_CACHE) as harness:
        key = harness.worker.add_key("spent", limits=Limits(1000, 10_000, 100))
        key.account.exhausted, key.account.remaining = True, 0
        reply = await harness.batch(*reads(count), key="spent")
        assert "daily quota" in reply.fault(429)["message"]
        assert int(reply.headers["retry-after"]) >= 1


@on_uvloop
async def test_client_that_leaves_takes_its_waiting_items_along() -> None:
    async with rpc_harness(1, **NO_CACHE) as harness:
        harness.worker.add_key("small", limits=Limits(5, 10_000, 0))
        with contextlib.suppress(asyncio.CancelledError):
            async with asyncio.TaskGroup() as group:
                asking = group.create_task(harness.batch(*reads(20), key="small"))
                await until(lambda: sent(harness) >= 5, every_s=0.01)
                asking.cancel()
        await until(lambda: not harness.worker.app.limiter.connections, every_s=0.01)
        before = sent(harness)
        await holds(lambda: sent(harness) == before, for_s=0.5)


def sent(harness: RpcHarness) -> int:
    return harness.upstreams[0].count("eth_call")


@on_uvloop
async def test_only_some_batches_of_an_account_wait_at_a_time() -> None:
    """Waiting is free: without a bound one key could fill the memory with batches."""
    async with rpc_harness(1, rpc={"batch_wait_s": 60.0}, **NO_CACHE) as harness:
        first = harness.worker.add_key("poor", limits=Limits(1, 10_000, 0))
        harness.worker.add_key("second", beside=first)
        harness.worker.add_key("neighbour", limits=Limits(20, 10_000, 0))
        waiting = harness.worker.app.rpc.waiting_batches
        with contextlib.suppress(asyncio.CancelledError):
            async with asyncio.TaskGroup() as group:
                held = [group.create_task(harness.batch(*reads(50), key="poor")) for _ in range(MOST_OF_ACCOUNT)]
                await until(lambda: len(waiting) == MOST_OF_ACCOUNT, every_s=0.01)
                refused = await harness.batch(*reads(50), key="second")
                assert "rate limit exceeded" in refused.fault(429)["message"]
                check_results((await harness.batch(*reads(25), key="neighbour")).json, reads(25))
                for each in held:
                    each.cancel()
        await until(lambda: len(waiting) == 0, every_s=0.01)


@on_uvloop
async def test_revoked_key_loses_its_waiting_items() -> None:
    async with rpc_harness(1, **NO_CACHE) as harness:
        key = harness.worker.add_key("small", limits=Limits(5, 10_000, 0))
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(harness.batch(*reads(20), key="small"))
            await until(lambda: sent(harness) >= 5, every_s=0.01)
            harness.worker.app.keyring.remove(key)
        items = asking.result().json
        assert items[-1]["error"]["code"] == -32016
        check_results([item for item in items if "result" in item], reads(20)[: sent(harness)])
