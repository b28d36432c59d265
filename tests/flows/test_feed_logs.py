"""Logs: taken once for all listeners, told once and in order, taken back when their blocks are; against the chain's record."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
import pytest
from prometheus_client import REGISTRY

from proxy.chains.evm.log_filter import parse
from proxy.services.feed import dispatch
from proxy.services.feed.blocks import read_receipts
from proxy.services.feed.topics import Topic
from proxy.services.rpc.calls import RpcError
from tests.feed_upstreams import (
    CONTRACTS,
    EVENTS,
    HEADS,
    QUICK,
    Ear,
    FeedScene,
    feed_scene,
    logs_topic,
    matches,
)
from tests.rpc_upstreams import Refused
from tests.service import until
from tests.web.worker import on_uvloop

ALL = logs_topic()
FILTERS: list[dict[str, Any]] = [
    {},
    {"address": CONTRACTS[1]},
    {"address": CONTRACTS[:3], "topics": [EVENTS[0]]},
    {"topics": [[EVENTS[1], EVENTS[2]]]},
    {"topics": [None, f"0x{14:064x}"]},
    {"address": "0x" + "99" * 20},
]


def record(found: FeedScene, start: int, **members: Any) -> list[tuple[str, str]]:
    """What a follower with this filter must hold, by the chain's own record."""
    wanted = parse(members)
    return found.chain.logs_of(lambda log: matches(wanted, log), start)


async def until_logs(found: FeedScene, ear: Ear, start: int, **members: Any) -> None:
    """Until the listener holds what it must. The order and the count are checked with every look."""
    await until(lambda: ear.logs() == record(found, start, **members), within_s=20)


@on_uvloop
async def test_each_filter_gets_its_logs_in_order_and_each_block_is_asked_for_once() -> None:
    async with feed_scene(["ws", "http"]) as found:
        ears = [(members, await found.listen(logs_topic(**members))) for members in FILTERS for _ in range(3)]
        start = len(found.chain.line)
        await found.chain.mine(8, logs=5)
        for members, ear in ears:
            await until_logs(found, ear, start, **members)
        assert found.count("eth_getLogs") <= 8 + 1  # the block that the feed began with
        assert ears[0][1].events[0].block == start


@on_uvloop
async def test_logs_are_not_asked_for_while_nobody_listens_to_them() -> None:
    async with feed_scene(["ws"]) as found:
        heads = await found.listen(HEADS)
        await found.chain.mine(3)
        await found.until_tip(heads)
        assert found.count("eth_getLogs") == 0
        ear = await found.listen(ALL)
        start = len(found.chain.line)
        await found.chain.mine(2)
        await until_logs(found, ear, start)
        found.feed.unsubscribe(ALL, ear)
        asked = found.count("eth_getLogs")
        await found.chain.mine(3)
        await found.until_tip(heads)
        assert found.count("eth_getLogs") == asked
        assert ear.logs() == record(found, start)[:4]


@pytest.mark.parametrize("kinds", [["ws", "ws", "http"], ["ws", "http"]])
def test_no_log_is_lost_or_doubled_when_the_upstream_is_killed_in_the_middle_of_a_stream_of_blocks(
    kinds: list[str],
) -> None:
    @on_uvloop
    async def run() -> None:
        async with feed_scene(kinds) as found:
            heads = await found.listen(HEADS)
            ears = [(members, await found.listen(logs_topic(**members))) for members in FILTERS]
            start = len(found.chain.line)
            for n in range(80):
                await found.chain.mine(logs=n % 4)
                await asyncio.sleep(0.01)
                if n == 20:
                    await found.upstreams[0].kill()
                if n == 50:
                    await found.upstreams[0].open()
            await found.until_tip(heads)
            assert heads.hashes == found.chain.line[start:]
            for members, ear in ears:
                await until_logs(found, ear, start, **members)
                assert not any(log["removed"] for log in ear.results)

    run()


@pytest.mark.parametrize("kinds", [["ws"], ["http"]])
@pytest.mark.parametrize("at_once", [True, False])
def test_three_block_reorganisation_takes_the_old_logs_back_newest_first(kinds: list[str], at_once: bool) -> None:
    @on_uvloop
    async def run() -> None:
        async with feed_scene(kinds) as found:
            ear = await found.listen(ALL)
            start = len(found.chain.line)
            await found.chain.mine(5)
            await until_logs(found, ear, start)
            old = record(found, start)
            told = len(ear.events)
            await found.chain.reorganise(3, at_once=at_once)
            await until_logs(found, ear, start)
            after = [(log["blockHash"], log["logIndex"], log["removed"]) for log in ear.results[told:]]
            # Two logs in each block.
            assert after[:6] == [(*log, True) for log in reversed(old[-6:])]
            assert after[6:] == [(*log, False) for log in record(found, start + 2)]

    run()


@on_uvloop
async def test_reorganisations_while_upstreams_die_leave_each_listener_with_the_canonical_logs() -> None:
    async with feed_scene(["ws", "ws", "http"]) as found:
        ears = [(members, await found.listen(logs_topic(**members))) for members in FILTERS]
        start = len(found.chain.line)
        await found.chain.mine(12)
        for members, ear in ears:
            await until_logs(found, ear, start, **members)
        for round_, (depth, longer) in enumerate(((2, 1), (5, 0), (10, 3), (1, 1), (12, 2))):
            if round_ == 1:
                found.upstreams[0].cut()
            if round_ == 2:
                await found.upstreams[0].kill()
            await found.chain.reorganise(depth, longer=longer, logs=round_ % 3, at_once=round_ % 2 == 0)
            await asyncio.sleep(0.02)
        await found.chain.mine()
        for members, ear in ears:
            await until_logs(found, ear, start, **members)


@on_uvloop
async def test_who_came_later_is_not_told_that_older_logs_are_taken_back() -> None:
    async with feed_scene(["ws"]) as found:
        early = await found.listen(ALL)
        start = len(found.chain.line)
        await found.chain.mine(3)
        await until_logs(found, early, start)
        late = await found.listen(ALL)
        await found.chain.mine(1)
        await until_logs(found, late, start + 3)
        await found.chain.reorganise(3)
        await until_logs(found, early, start)
        # Of the three blocks it had heard of one; the new ones it is told all.
        await until(lambda: late.logs() == record(found, start + 1))


@on_uvloop
async def test_heads_go_on_and_logs_wait_in_order_while_logs_cannot_be_had() -> None:
    async with feed_scene(["ws", "http"]) as found:
        heads, ear = await found.listen(HEADS), await found.listen(ALL)
        start = len(found.chain.line)

        def fail(_: Any) -> Any:
            raise Refused(-32603, "internal error")

        for upstream in found.upstreams:
            upstream.answers["eth_getLogs"] = fail
        await found.chain.mine(4)
        await found.until_tip(heads)
        await found.chain.reorganise(2)
        await found.until_tip(heads)
        await until(lambda: found.count("eth_getLogs") > 8)
        assert ear.events == []
        for upstream in found.upstreams:
            upstream.answers.clear()
        await until_logs(found, ear, start)


@on_uvloop
async def test_logs_that_fail_for_one_block_do_not_let_a_later_block_pass() -> None:
    async with feed_scene(["ws"]) as found:
        ear = await found.listen(ALL)
        start = len(found.chain.line)
        upstream = found.upstreams[0]
        failures = 3

        def fail_sometimes(params: list[Any]) -> Any:
            nonlocal failures
            if params[0].get("blockHash") == found.chain.line[start] and failures:
                failures -= 1
                raise Refused(-32000, "unknown block")
            return upstream._eth_getLogs(params)

        upstream.answers["eth_getLogs"] = fail_sometimes
        await found.chain.mine(3)
        await until_logs(found, ear, start)
        assert failures == 0


@on_uvloop
async def test_empty_logs_of_a_block_that_has_some_are_asked_for_again() -> None:
    async with feed_scene(["ws"]) as found:
        ear = await found.listen(ALL)
        start = len(found.chain.line)
        upstream, empty = found.upstreams[0], [True, True]
        upstream.answers["eth_getLogs"] = lambda params: [] if empty and empty.pop() else upstream._eth_getLogs(params)
        await found.chain.mine(2)
        await until_logs(found, ear, start)
        assert not empty


def refuse(_: Any) -> Any:
    raise Refused(-32603, "internal error")


@on_uvloop
async def test_no_logs_is_not_believed_of_an_upstream_that_has_not_come_to_the_block() -> None:
    async with feed_scene(["ws", "http"]) as found:
        first, second = found.upstreams
        ear = await found.listen(ALL)
        start = len(found.chain.line)
        found.evm.route.upstreams[1].health.saw_head(start - 1, time.monotonic())
        first.answers["eth_getLogs"] = refuse
        second.answers["eth_getLogs"] = lambda _: []
        await found.chain.mine()
        await until(lambda: second.count("eth_getLogs") > dispatch.DOUBTS + 1)
        assert ear.events == []
        first.answers.clear()
        await until_logs(found, ear, start)


@on_uvloop
async def test_logs_are_asked_of_upstreams_that_have_come_to_the_block() -> None:
    async with feed_scene(["ws", "http", "http"]) as found:
        first, second, third = found.upstreams
        ear = await found.listen(ALL)
        start = len(found.chain.line)
        for upstream, head in zip(found.evm.route.upstreams, (start - 1, start - 1, start), strict=True):
            upstream.health.saw_head(head, time.monotonic())
        first.answers["eth_getLogs"] = second.answers["eth_getLogs"] = refuse
        await found.chain.mine()
        await until_logs(found, ear, start)
        assert second.count("eth_getLogs") == 0
        assert third.count("eth_getLogs") == 1


@on_uvloop
async def test_logs_come_out_of_the_receipts_where_they_cannot_be_had_otherwise() -> None:
    async with feed_scene(["ws"]) as found:
        ear = await found.listen(ALL)
        start = len(found.chain.line)
        upstream = found.upstreams[0]
        upstream.answers["eth_getLogs"] = refuse
        upstream.answers["eth_getBlockReceipts"] = lambda params: [
            {"logs": [log]} for log in found.chain.logs[params[0]]
        ]
        await found.chain.mine(3)
        await until_logs(found, ear, start)


@pytest.mark.parametrize("given", [None, "0x", [{}], [{"logs": None}], [{"logs": [{}]}], {"logs": []}])
def test_what_are_no_receipts_has_no_logs(given: Any) -> None:
    assert read_receipts(orjson.dumps(given)) is None
    assert read_receipts(b'[{"logs":[]},{"logs":[]}]') == []


@on_uvloop
async def test_block_whose_logs_nobody_has_is_reported_and_ends_the_subscriptions_before_it_stops_the_heads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch, "MOST_WAITING", 5)
    monkeypatch.setattr(dispatch, "QUIET_TRIES", 3)
    async with feed_scene(["ws"]) as found:
        heads, ear = await found.listen(HEADS), await found.listen(ALL)
        start = len(found.chain.line)
        found.upstreams[0].answers["eth_getLogs"] = refuse
        counted = stuck(found)
        await found.chain.mine(2)
        await until(lambda: stuck(found) > counted)
        assert "no upstream has the logs of a block" in caplog.text
        assert not ear.ended  # There is room for more: they wait.
        await found.chain.mine(20)
        await found.until_tip(heads)
        assert heads.hashes == found.chain.line[start:]
        assert [f"fromBlock {hex(start)}" in why.message for why in ear.ended] == [True]
        assert ear.events == []
        again = await found.listen(ALL)
        found.upstreams[0].answers.clear()
        after = len(found.chain.line)
        await found.chain.mine(2)
        await until_logs(found, again, after)


def stuck(found: FeedScene) -> float:
    return REGISTRY.get_sample_value("penstock_feed_blocks_stuck_total", {"network": found.network}) or 0.0


@on_uvloop
async def test_logs_of_another_block_are_not_believed() -> None:
    """An upstream that does not know `blockHash` answers for the newest block."""
    async with feed_scene(["ws", "http"]) as found:
        first, _ = found.upstreams
        first.answers["eth_getLogs"] = lambda params: found.chain.logs[found.chain.line[1]]
        ear = await found.listen(ALL)
        start = len(found.chain.line)
        await found.chain.mine(4)
        await asyncio.sleep(0.2)
        assert all(pair in record(found, start) for pair in ear.logs())
        first.answers.clear()
        await until_logs(found, ear, start)


@on_uvloop
async def test_block_with_thousands_of_logs_is_told_whole() -> None:
    async with feed_scene(["ws"]) as found:
        ear, some = await found.listen(ALL), await found.listen(logs_topic(address=CONTRACTS[0]))
        start = len(found.chain.line)
        await found.chain.mine(1, logs=3000)
        await found.chain.mine(1, logs=1)
        await until(lambda: len(ear.events) == 3001)
        assert ear.logs() == record(found, start)
        assert some.logs() == record(found, start, address=CONTRACTS[0])


@on_uvloop
async def test_unknown_subscription_is_refused() -> None:
    async with feed_scene(["ws"], network=QUICK) as found:
        with pytest.raises(RpcError, match="newHeads, logs"):
            await found.feed.subscribe(Topic("newFriends"), Ear())
