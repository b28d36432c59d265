"""Upstreams whose heads differ, lag or are wrong: a caller's head never goes back, and empty replies are verified."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import orjson
import pytest
from aiohttp import web

from proxy.core.heads import SOON_S
from proxy.core.routing import HEDGE_FLOOR_S
from proxy.services.rpc.tracker import PATIENCE_S, Tracker
from tests.faults import Mode
from tests.http_client import rpc
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import Chain, ScriptedUpstream, scripted
from tests.service import until
from tests.web.worker import LIVE, on_uvloop, running_worker

SEED = 4711
NO_CACHE: Mapping[str, Any] = {"enabled": False, "coalesce": False}
# Fifteen seconds are sixty blocks of it.
QUICK = "arbitrum/mainnet"
TX = "0x" + "cd" * 32


def large_block(upstream: ScriptedUpstream, params: list[Any]) -> dict[str, Any]:
    return {**(upstream._eth_getBlockByNumber(params) or {}), "transactions": ["0x" + "ab" * 32] * 2000}


def block_ahead(upstream: ScriptedUpstream, lead: int, params: list[Any]) -> dict[str, Any] | None:
    block = upstream._eth_getBlockByNumber(params)
    return {**(block or {}), "number": hex(upstream.head + lead)} if params[0] == "latest" else block


async def heads_seen(harness: RpcHarness, rounds: int, **headers: str) -> list[int]:
    """Heads that one caller reads on one connection, by two methods in turn."""
    heads: list[int] = []
    ways: Sequence[tuple[str, list[Any]]] = (("eth_blockNumber", []), ("eth_getBlockByNumber", ["latest", False]))
    async with await harness.worker.connect() as client:
        for n in range(rounds):
            method, params = ways[n % 2]
            reply = await client.send(harness.worker.post(rpc(method, params), network=harness.network, **headers))
            if reply.status == 503:  # A refusal is allowed, an older head is not.
                continue
            result = reply.json["result"]
            heads.append(int(result if isinstance(result, str) else result["number"], 16))
    return heads


@pytest.mark.parametrize("cached", [True, False])
@on_uvloop
async def test_head_never_goes_backwards_while_upstreams_advance_out_of_step(cached: bool) -> None:
    chance = random.Random(SEED)
    # Blocks come far faster here than on the network that this is taken for: it is one that is used to quick ones.
    async with rpc_harness(3, network=QUICK, cache={} if cached else NO_CACHE) as harness:
        stop = asyncio.Event()
        reached: dict[int, int] = {}

        async def advance() -> None:
            while not stop.is_set():
                if chance.random() < 0.3:
                    harness.chain.head += 1
                for each in harness.upstreams:
                    # A node that is behind stays there or catches up: its own head does not go back.
                    lead = harness.chain.head - reached.get(each.port, 0)
                    each.behind = max(0, min(2, lead, each.behind + chance.choice((-1, 0, 1))))
                    reached[each.port] = each.head
                if chance.random() < 0.3:
                    await harness.look()
                await asyncio.sleep(0.002)

        async with asyncio.TaskGroup() as group:
            moving = group.create_task(advance())
            asking = [group.create_task(heads_seen(harness, 700)) for _ in range(3)]
            await asyncio.wait(asking)
            stop.set()
            await moving
        for task in asking:
            heads = task.result()
            assert heads == sorted(heads)
            assert len(heads) > 600
            assert heads[-1] > heads[0] + 10


@pytest.mark.parametrize("mode", ["high_head", "low_head", "lagging"])
@pytest.mark.parametrize("count", [3, 5])
@on_uvloop
async def test_wrong_head_of_one_upstream_is_ignored(mode: Mode, count: int) -> None:
    async with rpc_harness(count, faults=True, cache=NO_CACHE) as harness:
        await harness.proxies[0].switch(mode)
        for _ in range(12):
            harness.chain.head += 1
            await harness.look()
            heads = await heads_seen(harness, 20)
            assert set(heads) == {harness.chain.head}
        health = harness.route.upstreams[0].health
        assert health.lagging
        before = harness.upstreams[0].count("eth_call")
        # One at a time: calls that wait for each other are late on a slow machine, and late ones go to other upstreams too.
        load = await harness.load(60, at_once=1)
        assert not load.failed
        assert harness.upstreams[0].count("eth_call") == before
        await harness.proxies[0].switch("pass")
        await harness.look()
        assert not health.lagging


@on_uvloop
async def test_wrong_head_in_the_first_reply_is_corrected() -> None:
    async with rpc_harness(3, faults=True, cache=NO_CACHE) as harness:
        await harness.proxies[0].switch("high_head")
        for _ in range(30):
            assert await heads_seen(harness, 2) == [harness.chain.head] * 2
        assert harness.route.heads.tip == harness.chain.head


@pytest.mark.parametrize("digits", [16, 70, 700])
@pytest.mark.parametrize("count", [1, 3])
@on_uvloop
async def test_head_that_no_block_can_have_is_answered_and_changes_nothing(count: int, digits: int) -> None:
    """A single upstream too: the number does not fit into the memory that workers share."""
    claimed = "0x" + "f" * digits

    async with rpc_harness(count, cache=NO_CACHE) as harness:
        liar, tip = harness.upstreams[0], harness.route.heads.tip
        liar.answers["eth_blockNumber"] = lambda _: claimed
        liar.answers["eth_getBlockByNumber"] = lambda _: {"number": claimed, "hash": TX}
        for _ in range(4):
            assert (await harness.call("eth_blockNumber")).status == 200
            assert (await harness.call("eth_getBlockByNumber", ["latest", False])).status == 200
            await harness.look()
        assert harness.route.heads.tip == tip
        assert harness.route.state.shared_head.tip == tip


@pytest.mark.parametrize(("count", "lead"), [(3, 1_000_000), (2, -900)])
@on_uvloop
async def test_quickest_of_all_is_not_believed_alone_at_the_start(count: int, lead: int) -> None:
    async with scripted(count, Chain()) as upstreams:
        upstreams[0].answers["eth_getBlockByNumber"] = partial(block_ahead, upstreams[0], lead)
        for slow in upstreams[1:]:
            slow.held = {"eth_getBlockByNumber"}
        async with (
            running_worker({LIVE: [each.url for each in upstreams]}) as running,
            asyncio.TaskGroup() as group,
        ):
            route = running.app.networks.routes[LIVE]
            looking = group.create_task(Tracker(route.state).look())
            await asyncio.wait([looking], timeout=2 * PATIENCE_S)
            for slow in upstreams[1:]:
                slow.gate.set()
            await looking
            assert route.heads.agreed == upstreams[0].chain.head
            assert [each.health.lagging for each in route.upstreams] == [True] + [False] * (count - 1)


@on_uvloop
async def test_liar_that_is_a_little_ahead_does_not_drive_the_honest_out() -> None:
    async with rpc_harness(3, cache=NO_CACHE) as harness:
        liar = harness.upstreams[0]
        liar.answers["eth_getBlockByNumber"] = partial(block_ahead, liar, 10)
        liar.answers["eth_blockNumber"] = lambda _: hex(harness.chain.head + 10)
        for _ in range(10):
            harness.chain.head += 1
            await harness.look()
            assert set(await heads_seen(harness, 10)) == {harness.chain.head}
        assert [each.health.lagging for each in harness.route.upstreams] == [True, False, False]


async def check_older_block_is_never_returned(harness: RpcHarness) -> None:
    harness.chain.head += 1
    await harness.look()
    # From here on one upstream is a block behind, and this has not been noticed yet.
    harness.upstreams[0].behind = 1
    for _ in range(12):
        block = await harness.result("eth_getBlockByNumber", ["latest", False], Cache_Control="no-cache")
        assert int(block["number"], 16) == harness.chain.head


@pytest.mark.parametrize("cached", [True, False])
@on_uvloop
async def test_large_block_is_compared_with_the_head_before_it_is_returned(cached: bool) -> None:
    async with rpc_harness(2, cache={"enabled": cached, "coalesce": cached}) as harness:
        for upstream in harness.upstreams:
            upstream.answers["eth_getBlockByNumber"] = partial(large_block, upstream)
        await check_older_block_is_never_returned(harness)


class Pretty(ScriptedUpstream):
    """Sends indented JSON, with a space on either side of each colon."""

    async def _answer(self, request: web.Request) -> web.Response:
        reply = await super()._answer(request)
        body = json.dumps(orjson.loads(reply.body), indent=2, separators=(",", " : "))  # type: ignore[arg-type]
        return web.Response(body=body.encode(), content_type="application/json")


@pytest.mark.parametrize("cached", [True, False])
@on_uvloop
async def test_block_is_compared_with_the_head_however_its_json_is_written(cached: bool) -> None:
    async with rpc_harness(2, kind=Pretty, cache={"enabled": cached, "coalesce": cached}) as harness:
        await check_older_block_is_never_returned(harness)


@on_uvloop
async def test_newer_head_published_by_another_worker_is_not_overwritten() -> None:
    async with rpc_harness(3) as harness:
        newer = harness.chain.head + 3
        for upstream in harness.upstreams:
            upstream.held = {"eth_sendRawTransaction"}
        async with asyncio.TaskGroup() as group:
            group.create_task(harness.result("eth_sendRawTransaction", ["0xf86c" + "07" * 20]))
            await until(lambda: harness.count("eth_sendRawTransaction") == 1, every_s=0.001)
            harness.route.state.shared_head.publish(newer)
            # A write is published to the other workers too.
            for upstream in harness.upstreams:
                upstream.gate.set()
        assert harness.route.state.shared_head.tip == newer
        assert harness.route.heads.tip == newer


@on_uvloop
async def test_silent_upstream_does_not_delay_the_heads_of_the_others() -> None:
    async with rpc_harness(3, faults=True) as harness:
        await harness.proxies[0].switch("black_hole")
        harness.chain.head += 1
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(harness.look())
            await until(lambda: harness.route.heads.tip == harness.chain.head)
            assert not looking.done()
            looking.cancel()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("method", ["eth_blockNumber", "eth_getBlockByNumber"])
@on_uvloop
async def test_shorter_branch_is_believed_without_waiting_for_the_next_poll(count: int, method: str) -> None:
    async with rpc_harness(count) as harness:
        await watch_without_polls(harness)
        for upstream in harness.upstreams:
            upstream.behind = 2
        params = ["latest", False] if method == "eth_getBlockByNumber" else []

        async def is_lower() -> bool:
            await harness.call(method, params, Cache_Control="no-cache")
            return harness.route.heads.tip == harness.chain.head - 2

        await until(is_lower)


@on_uvloop
async def test_upstream_of_nodes_at_different_heights_is_not_polled_for_each_reply() -> None:
    async with rpc_harness(3, cache=NO_CACHE) as harness:
        await watch_without_polls(harness)
        before = [each.count("eth_getBlockByNumber") for each in harness.upstreams]
        harness.upstreams[0].answers["eth_blockNumber"] = lambda _: hex(harness.chain.head - 1)
        for _ in range(60):
            assert int(await harness.result("eth_blockNumber"), 16) == harness.chain.head
        await asyncio.sleep(0)
        after = [each.count("eth_getBlockByNumber") for each in harness.upstreams]
        assert [now - then for now, then in zip(after, before, strict=True)] <= [1, 1, 1]


@on_uvloop
async def test_shorter_branch_is_believed_soon_after_the_second_of_three_upstreams_has_it() -> None:
    async with rpc_harness(3) as harness:
        clock = await watch_without_polls(harness)
        heads, (first, second, third) = harness.route.heads, harness.upstreams
        for _ in range(3):
            tip, polls = heads.tip, third.count("eth_getBlockByNumber")
            first.behind += 2

            async def is_checked(polls: int = polls) -> bool:
                await harness.call("eth_blockNumber", Cache_Control="no-cache")
                return third.count("eth_getBlockByNumber") > polls

            await until(is_checked)
            assert heads.tip == tip
            second.behind += 2
            # The doubt is checked again, long before the next poll is due.
            clock.at += 2 * SOON_S
            await until(lambda tip=tip: heads.tip == tip - 2)
            third.behind += 2
            clock.at += 2 * SOON_S
            await harness.look()


class LateUpstream(ScriptedUpstream):
    """Its replies to calls of the held methods are sent late, and are as old as the calls."""

    async def _reply(self, call: dict[str, Any]) -> dict[str, Any]:
        held, self.held = self.held, set()
        found = await super()._reply(call)
        self.held = held
        if call["method"] in held:
            await self.gate.wait()
        return found


@asynccontextmanager
async def poll_under_way(count: int) -> AsyncIterator[RpcHarness]:
    """Polls are answered with the head of now. The answers arrive at the end of the context."""
    async with rpc_harness(count, kind=LateUpstream, cache=NO_CACHE) as harness:
        before = harness.count("eth_getBlockByNumber")
        for upstream in harness.upstreams:
            upstream.held = {"eth_getBlockByNumber"}
        async with asyncio.TaskGroup() as group:
            group.create_task(harness.look())
            await until(lambda: harness.count("eth_getBlockByNumber") == before + count)
            yield harness
            for upstream in harness.upstreams:
                upstream.gate.set()


@pytest.mark.parametrize("count", [1, 2])
@on_uvloop
async def test_poll_that_a_newer_reply_overtakes_does_not_take_the_head_back(count: int) -> None:
    async with poll_under_way(count) as harness:
        harness.chain.head += 1
        assert int(await harness.result("eth_blockNumber"), 16) == harness.chain.head
        reorgs = harness.route.state.reorgs
    assert harness.route.heads.tip == harness.chain.head
    assert harness.route.state.reorgs == reorgs


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("blocks", [1, -2])
@on_uvloop
async def test_poll_that_news_of_another_host_overtakes_does_not_contradict_it(count: int, blocks: int) -> None:
    async with poll_under_way(count) as harness:
        harness.chain.head += blocks
        state, head = harness.route.state, harness.chain.head
        state.follow(head, 0, is_lower=blocks < 0)
        reorgs = state.reorgs
    assert (harness.route.heads.tip, state.shared_head.tip, state.reorgs) == (head, head, reorgs)


class StandingClock:
    def __init__(self) -> None:
        self.at = time.monotonic()

    def __call__(self) -> float:
        return self.at


async def watch_without_polls(harness: RpcHarness) -> StandingClock:
    """Follow the heads with a clock that stands still, so that no poll is due."""
    clock = StandingClock()
    tracker = Tracker(harness.route.state, clock)
    await tracker.look()
    harness.worker.app.tasks.start("heads", tracker.run)
    await until(tracker.is_ready.is_set)
    return clock


@asynccontextmanager
async def hanging(
    *held: str,
) -> AsyncIterator[tuple[RpcHarness, asyncio.Task[Any], list[ScriptedUpstream]]]:
    """A read that hangs at the one of two upstreams that has the latest block, up to the end of the context."""
    async with rpc_harness(2, cache=NO_CACHE) as harness:
        behind, ahead = harness.upstreams
        await harness.load(60)
        behind.behind = 1
        await harness.look()
        ahead.held = {*held}
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(harness.result("eth_getBalance", [TX[:42], "latest"]))
            await until(lambda: ahead.count("eth_getBalance") == 1)
            yield harness, asking, harness.upstreams
            ahead.gate.set()


@on_uvloop
async def test_late_read_of_the_latest_block_is_not_sent_to_an_upstream_that_is_behind() -> None:
    """A second attempt may save time, but an older reply is worse than a late one."""
    async with hanging("eth_getBalance") as (_, asking, (_, ahead)):
        await asyncio.wait([asking], timeout=5 * HEDGE_FLOOR_S)
    assert asking.result() == ahead._eth_getBalance([TX[:42], "latest"])


@on_uvloop
async def test_read_that_hangs_at_a_silent_upstream_is_sent_to_one_that_is_behind() -> None:
    held = ("eth_getBalance", "eth_getBlockByNumber", "eth_blockNumber")
    async with hanging(*held) as (harness, asking, (behind, _)):
        harness.watch()
        await until(asking.done)
    assert asking.result() == behind._eth_getBalance([TX[:42], "latest"])


@on_uvloop
async def test_failed_read_of_the_latest_block_is_repeated_where_that_block_is() -> None:
    async with rpc_harness(2, faults=True, cache=NO_CACHE) as harness:
        behind, ahead = harness.upstreams
        behind.behind = 1
        await harness.look()
        for _ in range(4):
            await harness.proxies[1].switch("reset", times=1)
            assert await harness.result("eth_getBalance", [TX[:42], "latest"]) == ahead._eth_getBalance(
                [TX[:42], "latest"]
            )


# Empty answers


def calls_that_may_be_empty(harness: RpcHarness) -> list[tuple[str, list[Any]]]:
    head = hex(harness.chain.head)
    return [
        ("eth_getBlockByNumber", [head, False]),
        ("eth_getTransactionReceipt", [TX]),
        ("eth_getTransactionByHash", [TX]),
        ("eth_getLogs", [{"fromBlock": head, "toBlock": head}]),
    ]


@pytest.mark.parametrize("index", range(4))
@on_uvloop
async def test_empty_reply_of_a_lagging_upstream_is_retried_on_another(index: int) -> None:
    async with rpc_harness(2, cache=NO_CACHE) as harness:
        harness.chain.mined[TX] = harness.chain.head
        harness.upstreams[0].behind = 1
        await harness.look()
        method, params = calls_that_may_be_empty(harness)[index]
        for _ in range(12):
            assert await harness.result(method, params)


@on_uvloop
async def test_part_of_the_logs_is_not_taken_for_all_of_them() -> None:
    """An upstream that does not have the last block yet omits its logs without an error."""
    async with rpc_harness(2, cache=NO_CACHE) as harness:
        harness.upstreams[0].behind = 1
        await harness.look()
        for last in ("latest", hex(harness.chain.head)):
            for _ in range(10):
                query = {"fromBlock": hex(harness.chain.head - 9), "toBlock": last}
                assert len(await harness.result("eth_getLogs", [query])) == 10


@on_uvloop
async def test_reply_that_is_empty_on_every_upstream_is_returned() -> None:
    async with rpc_harness(3, cache=NO_CACHE) as harness:
        harness.upstreams[0].behind = harness.upstreams[1].behind = 1
        await harness.look()
        for _ in range(10):
            assert await harness.result("eth_getTransactionReceipt", [TX]) is None
        assert all(each.health.bad == 0 for each in harness.route.upstreams)


@pytest.mark.parametrize("mode", ["reset", "black_hole", "dead"])
@on_uvloop
async def test_empty_reply_is_returned_when_no_other_upstream_works(mode: Mode) -> None:
    async with rpc_harness(2, faults=True, cache=NO_CACHE, rpc={"call_timeout_s": 0.5}) as harness:
        await harness.load(100)
        harness.upstreams[0].behind = 1
        await harness.look()
        await harness.proxies[1].switch(mode)
        assert await harness.result("eth_getTransactionReceipt", [TX]) is None


@on_uvloop
async def test_pruned_upstream_never_gets_calls_for_old_state() -> None:
    async with rpc_harness(2, faults=True, cache=NO_CACHE, options=[{"archive": False}]) as harness:
        for n in range(1, 20):
            await harness.result("eth_getBalance", [TX[:42], hex(n)])
        assert harness.upstreams[0].count("eth_getBalance") == 0
        await harness.proxies[1].switch("dead")
        reply = await harness.call("eth_getBalance", [TX[:42], "0x1"])
        assert reply.status >= 500
        assert harness.upstreams[0].count("eth_getBalance") == 0
