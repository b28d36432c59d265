"""Logs are fetched once for all listeners, sent once and in order, and sent as removed when their blocks are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import orjson
import pytest
from prometheus_client import REGISTRY

from proxy.chains.evm.log_filter import parse
from proxy.services.feed import dispatch
from proxy.services.feed.blocks import read_receipts
from proxy.services.feed.topics import FeedEvent, Topic
from proxy.services.rpc.calls import RpcError
from tests.feed_upstreams import (
    CONTRACTS,
    EVENTS,
    HEADS,
    QUICK,
    FeedHarness,
    RecordingListener,
    feed_harness,
    logs_topic,
    matches,
)
from tests.rpc_upstreams import Refused
from tests.service import holds, until
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


def expected_logs(harness: FeedHarness, start: int, **members: Any) -> list[tuple[str, str]]:
    """The logs on the canonical chain that a listener with this filter must hold."""
    log_filter = parse(members)
    return harness.chain.logs_of(lambda log: matches(log_filter, log), start)


async def until_logs(harness: FeedHarness, listener: RecordingListener, start: int, **members: Any) -> None:
    """Wait until the listener holds the expected logs. `logs()` checks their order and count each time."""
    await until(lambda: listener.logs() == expected_logs(harness, start, **members), within_s=20)


@on_uvloop
async def test_each_filter_gets_its_logs_in_order_and_each_block_is_fetched_once() -> None:
    async with feed_harness(["ws", "http"]) as harness:
        listeners = [(members, await harness.listen(logs_topic(**members))) for members in FILTERS for _ in range(3)]
        start = len(harness.chain.canonical)
        await harness.chain.mine(8, logs=5)
        for members, listener in listeners:
            await until_logs(harness, listener, start, **members)
        assert harness.count("eth_getLogs") <= 8 + 1  # the block at which the feed started
        assert listeners[0][1].events[0].block == start


@on_uvloop
async def test_logs_are_not_fetched_without_listeners_of_logs() -> None:
    async with feed_harness(["ws"]) as harness:
        heads = await harness.listen(HEADS)
        await harness.chain.mine(3)
        await harness.until_tip(heads)
        assert harness.count("eth_getLogs") == 0
        listener = await harness.listen(ALL)
        start = len(harness.chain.canonical)
        await harness.chain.mine(2)
        await until_logs(harness, listener, start)
        harness.feed.unsubscribe(ALL, listener)
        calls = harness.count("eth_getLogs")
        await harness.chain.mine(3)
        await harness.until_tip(heads)
        assert harness.count("eth_getLogs") == calls
        assert listener.logs() == expected_logs(harness, start)[:4]


@pytest.mark.parametrize("kinds", [["ws", "ws", "http"], ["ws", "http"]])
@on_uvloop
async def test_no_log_is_lost_or_doubled_when_the_upstream_is_killed_in_the_middle_of_a_stream_of_blocks(
    kinds: list[str],
) -> None:
    async with feed_harness(kinds) as harness:
        heads = await harness.listen(HEADS)
        listeners = [(members, await harness.listen(logs_topic(**members))) for members in FILTERS]
        start = len(harness.chain.canonical)
        for n in range(80):
            await harness.chain.mine(logs=n % 4)
            await asyncio.sleep(0.01)
            if n == 20:
                await harness.upstreams[0].kill()
            if n == 50:
                await harness.upstreams[0].open()
        await harness.until_tip(heads)
        assert heads.hashes == harness.chain.canonical[start:]
        for members, listener in listeners:
            await until_logs(harness, listener, start, **members)
            assert not any(log["removed"] for log in listener.results)


@pytest.mark.parametrize("kinds", [["ws"], ["http"]])
@pytest.mark.parametrize("at_once", [True, False])
@on_uvloop
async def test_three_block_reorganisation_removes_the_old_logs_newest_first(kinds: list[str], at_once: bool) -> None:
    async with feed_harness(kinds) as harness:
        listener = await harness.listen(ALL)
        start = len(harness.chain.canonical)
        await harness.chain.mine(5)
        await until_logs(harness, listener, start)
        old = expected_logs(harness, start)
        sent = len(listener.events)
        await harness.chain.replace_blocks(3, at_once=at_once)
        await until_logs(harness, listener, start)
        after = [(log["blockHash"], log["logIndex"], log["removed"]) for log in listener.results[sent:]]
        # Two logs in each block.
        assert after[:6] == [(*log, True) for log in reversed(old[-6:])]
        assert after[6:] == [(*log, False) for log in expected_logs(harness, start + 2)]


@on_uvloop
async def test_reorganisations_while_upstreams_die_leave_each_listener_with_the_canonical_logs() -> None:
    async with feed_harness(["ws", "ws", "http"]) as harness:
        listeners = [(members, await harness.listen(logs_topic(**members))) for members in FILTERS]
        start = len(harness.chain.canonical)
        await harness.chain.mine(12)
        for members, listener in listeners:
            await until_logs(harness, listener, start, **members)
        for round_, (depth, longer) in enumerate(((2, 1), (5, 0), (10, 3), (1, 1), (12, 2))):
            if round_ == 1:
                harness.upstreams[0].cut()
            if round_ == 2:
                await harness.upstreams[0].kill()
            await harness.chain.replace_blocks(depth, longer=longer, logs=round_ % 3, at_once=round_ % 2 == 0)
            await asyncio.sleep(0.02)
        await harness.chain.mine()
        for members, listener in listeners:
            await until_logs(harness, listener, start, **members)


@on_uvloop
async def test_later_listener_receives_no_removals_of_older_logs() -> None:
    async with feed_harness(["ws"]) as harness:
        early = await harness.listen(ALL)
        start = len(harness.chain.canonical)
        await harness.chain.mine(3)
        await until_logs(harness, early, start)
        late = await harness.listen(ALL)
        await harness.chain.mine(1)
        await until_logs(harness, late, start + 3)
        await harness.chain.replace_blocks(3)
        await until_logs(harness, early, start)
        # It received one of the three removed blocks, and receives all new ones.
        await until(lambda: late.logs() == expected_logs(harness, start + 1))


@on_uvloop
async def test_heads_go_on_and_logs_wait_in_order_while_logs_are_unavailable() -> None:
    async with feed_harness(["ws", "http"]) as harness:
        heads, listener = await harness.listen(HEADS), await harness.listen(ALL)
        start = len(harness.chain.canonical)

        def fail(_: Any) -> Any:
            raise Refused(-32603, "internal error")

        for upstream in harness.upstreams:
            upstream.answers["eth_getLogs"] = fail
        await harness.chain.mine(4)
        await harness.until_tip(heads)
        await harness.chain.replace_blocks(2)
        await harness.until_tip(heads)
        await until(lambda: harness.count("eth_getLogs") > 8)
        assert listener.events == []
        for upstream in harness.upstreams:
            upstream.answers.clear()
        await until_logs(harness, listener, start)


@on_uvloop
async def test_later_blocks_wait_for_a_block_whose_logs_fail() -> None:
    async with feed_harness(["ws"]) as harness:
        listener = await harness.listen(ALL)
        start = len(harness.chain.canonical)
        upstream = harness.upstreams[0]
        failures = 3

        def fail_sometimes(params: list[Any]) -> Any:
            nonlocal failures
            if params[0].get("blockHash") == harness.chain.canonical[start] and failures:
                failures -= 1
                raise Refused(-32000, "unknown block")
            return upstream._eth_getLogs(params)

        upstream.answers["eth_getLogs"] = fail_sometimes
        await harness.chain.mine(3)
        await until_logs(harness, listener, start)
        assert failures == 0


@on_uvloop
async def test_empty_logs_of_a_block_that_has_some_are_fetched_again() -> None:
    async with feed_harness(["ws"]) as harness:
        listener = await harness.listen(ALL)
        start = len(harness.chain.canonical)
        upstream, empty = harness.upstreams[0], [True, True]
        upstream.answers["eth_getLogs"] = lambda params: [] if empty and empty.pop() else upstream._eth_getLogs(params)
        await harness.chain.mine(2)
        await until_logs(harness, listener, start)
        assert not empty


def refuse(_: Any) -> Any:
    raise Refused(-32603, "internal error")


@on_uvloop
async def test_empty_logs_from_an_upstream_below_the_block_are_ignored() -> None:
    async with feed_harness(["ws", "http"]) as harness:
        first, second = harness.upstreams
        listener = await harness.listen(ALL)
        start = len(harness.chain.canonical)
        harness.evm.route.upstreams[1].health.saw_head(start - 1, time.monotonic())
        first.answers["eth_getLogs"] = refuse
        second.answers["eth_getLogs"] = lambda _: []
        await harness.chain.mine()
        await until(lambda: second.count("eth_getLogs") > dispatch.EMPTY_RETRIES + 1)
        assert listener.events == []
        first.answers.clear()
        await until_logs(harness, listener, start)


@on_uvloop
async def test_logs_are_fetched_from_upstreams_that_have_the_block() -> None:
    async with feed_harness(["ws", "http", "http"]) as harness:
        first, second, third = harness.upstreams
        listener = await harness.listen(ALL)
        start = len(harness.chain.canonical)
        for upstream, head in zip(harness.evm.route.upstreams, (start - 1, start - 1, start), strict=True):
            upstream.health.saw_head(head, time.monotonic())
        first.answers["eth_getLogs"] = second.answers["eth_getLogs"] = refuse
        await harness.chain.mine()
        await until_logs(harness, listener, start)
        assert second.count("eth_getLogs") == 0
        assert third.count("eth_getLogs") == 1


@on_uvloop
async def test_logs_are_read_from_the_receipts_if_get_logs_fails() -> None:
    async with feed_harness(["ws"]) as harness:
        listener = await harness.listen(ALL)
        start = len(harness.chain.canonical)
        upstream = harness.upstreams[0]
        upstream.answers["eth_getLogs"] = refuse
        upstream.answers["eth_getBlockReceipts"] = lambda params: [
            {"logs": [log]} for log in harness.chain.logs[params[0]]
        ]
        await harness.chain.mine(3)
        await until_logs(harness, listener, start)


@pytest.mark.parametrize("given", [None, "0x", [{}], [{"logs": None}], [{"logs": [{}]}], {"logs": []}])
def test_malformed_receipts_have_no_logs(given: Any) -> None:
    assert read_receipts(orjson.dumps(given)) is None
    assert read_receipts(b'[{"logs":[]},{"logs":[]}]') == []


@on_uvloop
async def test_block_whose_logs_no_upstream_has_is_reported_and_ends_log_subscriptions_before_it_stops_heads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch, "MAX_QUEUED", 5)
    monkeypatch.setattr(dispatch, "QUIET_ATTEMPTS", 3)
    async with feed_harness(["ws"]) as harness:
        heads, listener = await harness.listen(HEADS), await harness.listen(ALL)
        start = len(harness.chain.canonical)
        harness.upstreams[0].answers["eth_getLogs"] = refuse
        counted = stuck(harness)
        await harness.chain.mine(2)
        await until(lambda: stuck(harness) > counted)
        assert "no upstream has the logs of a block" in caplog.text
        assert not listener.ended  # The queue is not full: they wait.
        await harness.chain.mine(20)
        await harness.until_tip(heads)
        assert heads.hashes == harness.chain.canonical[start:]
        assert [f"fromBlock {hex(start)}" in why.message for why in listener.ended] == [True]
        assert listener.events == []
        resumed = await harness.listen(ALL)
        harness.upstreams[0].answers.clear()
        after = len(harness.chain.canonical)
        await harness.chain.mine(2)
        await until_logs(harness, resumed, after)


def stuck(harness: FeedHarness) -> float:
    return REGISTRY.get_sample_value("penstock_feed_blocks_stuck_total", {"network": harness.network}) or 0.0


@on_uvloop
async def test_logs_of_another_block_are_rejected() -> None:
    """An upstream that does not support `blockHash` returns the logs of the newest block."""
    async with feed_harness(["ws", "http"]) as harness:
        first, _ = harness.upstreams
        first.answers["eth_getLogs"] = lambda params: harness.chain.logs[harness.chain.canonical[1]]
        listener = await harness.listen(ALL)
        start = len(harness.chain.canonical)
        await harness.chain.mine(4)
        await holds(lambda: all(pair in expected_logs(harness, start) for pair in listener.logs()), for_s=0.2)
        first.answers.clear()
        await until_logs(harness, listener, start)


@on_uvloop
async def test_block_with_thousands_of_logs_is_sent_completely() -> None:
    async with feed_harness(["ws"]) as harness:
        listener, some = await harness.listen(ALL), await harness.listen(logs_topic(address=CONTRACTS[0]))
        start = len(harness.chain.canonical)
        await harness.chain.mine(1, logs=3000)
        await harness.chain.mine(1, logs=1)
        await until(lambda: len(listener.events) == 3001)
        assert listener.logs() == expected_logs(harness, start)
        assert some.logs() == expected_logs(harness, start, address=CONTRACTS[0])


@on_uvloop
async def test_unknown_subscription_is_refused() -> None:
    async with feed_harness(["ws"], network=QUICK) as harness:
        with pytest.raises(RpcError, match="newHeads, logs"):
            await harness.feed.subscribe(Topic("newFriends"), RecordingListener())


@on_uvloop
async def test_filter_whose_listeners_left_in_the_same_turn_does_not_stop_the_others() -> None:
    """A filter stays in the index for a few turns after its last listener left, and its logs match it meanwhile."""
    async with feed_harness(["ws"]) as harness:
        topics = [logs_topic(address=CONTRACTS[n % 4]) for n in range(4)] + [logs_topic(topics=[EVENTS])]
        leaving = [LeavingListener() for _ in topics]

        def leave() -> None:
            for topic, listener in zip(topics, leaving, strict=True):
                harness.feed.unsubscribe(topic, listener)

        for topic, listener in zip(topics, leaving, strict=True):
            listener.leave = leave
            await harness.feed.subscribe(topic, listener)
        stays = await harness.listen(logs_topic())
        await harness.chain.mine(logs=4)
        await harness.until_tip(stays)
        assert sum(bool(each.events) for each in leaving) == 1
        await harness.chain.replace_blocks(1, logs=4)
        await harness.until_tip(stays)
        assert len(stays.logs()) == 8


class LeavingListener(RecordingListener):
    """All listeners leave when one of them receives something."""

    leave: Callable[[], None]

    def on_events(self, events: Sequence[FeedEvent]) -> None:
        super().on_events(events)
        self.leave()
