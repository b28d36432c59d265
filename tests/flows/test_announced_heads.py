"""Blocks that an upstream announces over its WebSocket make cached replies out of date at once."""

from __future__ import annotations

import time
from typing import Any

import pytest

from proxy.services.feed.head_announcements import HeadAnnouncements
from proxy.services.rpc.tracker import USED_FOR_S, Tracker
from tests.feed_upstreams import FeedHarness, feed_harness
from tests.http_client import rpc
from tests.rpc_upstreams import Refused
from tests.service import holds, until
from tests.web.worker import LIVE, on_uvloop

ADDRESS = "0x" + "ab" * 20


class Clock:
    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


async def start(harness: FeedHarness, clock: Clock | None = None) -> Tracker:
    """Follow the heads as a worker process does."""
    app, clock = harness.worker.app, clock or Clock()
    route = app.networks.routes[harness.network]
    tracker = Tracker(route.state, clock)
    await tracker.look()
    app.tasks.start("heads", tracker.run)
    announcements = HeadAnnouncements(route, tracker, clock)
    if announcements.is_possible:
        app.tasks.start("announced heads", announcements.run)
    return tracker


async def balance(harness: FeedHarness) -> tuple[str, str]:
    """A balance, which is the hash of the block that it was read at, and whether it came from the cache."""
    reply = await harness.worker.send(rpc("eth_getBalance", [ADDRESS, "latest"]), network=harness.network)
    assert reply.status == 200, reply
    return reply.json["result"], reply.headers["x-cache"]


async def warm(harness: FeedHarness) -> str:
    """Read a balance until it is cached."""
    while True:
        found, cached = await balance(harness)
        if cached == "hit":
            return found


def refuse(_: list[Any]) -> None:
    raise Refused(-32000, "not now")


async def hear(harness: FeedHarness) -> None:
    """Let the balance be read, wait for a subscription, and refuse all further polls."""
    for upstream in harness.upstreams:
        upstream.answers["eth_getBalance"] = lambda _: harness.chain.canonical[-1]
    await start(harness)
    await warm(harness)
    await until(lambda: any(each.subscriptions for each in harness.upstreams))
    for upstream in harness.upstreams:
        upstream.answers["eth_getBlockByNumber"] = upstream.answers["eth_blockNumber"] = refuse


@pytest.mark.parametrize("kinds", [("ws",), ("http", "ws"), ("ws", "http")])
@on_uvloop
async def test_warm_read_follows_an_announced_block_before_any_poll(kinds: tuple[str, ...]) -> None:
    async with feed_harness(kinds, network=LIVE) as harness:
        await hear(harness)
        heads = harness.worker.app.networks.routes[LIVE].heads
        for _ in range(3):
            assert await warm(harness) == harness.chain.canonical[-1]
            await harness.chain.mine()
            await until(lambda: heads.tip == harness.chain.head)
            assert await balance(harness) == (harness.chain.canonical[-1], "miss")


@on_uvloop
async def test_announced_reorganisation_at_the_same_height_is_followed() -> None:
    async with feed_harness(("ws",), network=LIVE) as harness:
        await hear(harness)
        state = harness.worker.app.networks.routes[LIVE].state
        await warm(harness)
        reorgs = state.reorgs
        await harness.chain.replace_blocks(1, longer=0)
        await until(lambda: state.reorgs > reorgs)
        assert await balance(harness) == (harness.chain.canonical[-1], "miss")


@on_uvloop
async def test_idle_network_has_no_subscription() -> None:
    clock = Clock()
    async with feed_harness(("ws",), network=LIVE) as harness:
        upstream = harness.upstreams[0]
        await start(harness, clock)
        await holds(lambda: not upstream.subscribed, for_s=0.7)
        await balance(harness)
        await until(lambda: bool(upstream.subscriptions))
        await harness.chain.mine()
        await until(lambda: not harness.worker.app.networks.routes[LIVE].state.replies.has_recent)
        clock.ahead_s = USED_FOR_S
        await until(lambda: not upstream.subscriptions)


@on_uvloop
async def test_lost_and_mute_streams_are_replaced() -> None:
    async with feed_harness(("ws", "ws"), network=LIVE) as harness:
        first, second = harness.upstreams
        await start(harness)
        await balance(harness)
        await until(lambda: bool(first.subscriptions))
        first.cut()
        await until(lambda: bool(first.subscriptions or second.subscriptions))
        mute = first if first.subscriptions else second
        mute.mute = True
        count = first.subscribed + second.subscribed
        for _ in range(4):
            await harness.chain.mine()
        await until(lambda: first.subscribed + second.subscribed > count)
        await balance(harness)


@on_uvloop
async def test_network_without_a_websocket_is_polled_only() -> None:
    async with feed_harness(("http",), network=LIVE) as harness:
        route = harness.worker.app.networks.routes[LIVE]
        assert not HeadAnnouncements(route, Tracker(route.state)).is_possible
