"""Blocks that an upstream announces over its WebSocket make cached replies out of date at once."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from proxy.services.feed.head_announcements import HeadAnnouncements
from proxy.services.rpc.tracker import USED_FOR_S, Tracker
from tests.feed_upstreams import FeedScene, feed_scene
from tests.http_client import rpc
from tests.rpc_upstreams import Refused
from tests.service import until
from tests.web.worker import LIVE, on_uvloop

ADDRESS = "0x" + "ab" * 20


class Clock:
    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


async def start(of: FeedScene, clock: Clock | None = None) -> Tracker:
    """Follow the heads as a worker process does."""
    app, clock = of.worker.app, clock or Clock()
    route = app.networks.routes[of.network]
    tracker = Tracker(route, clock)
    await tracker.look()
    app.tasks.start("heads", tracker.run)
    announcements = HeadAnnouncements(route, tracker, clock)
    if announcements.is_possible:
        app.tasks.start("announced heads", announcements.run)
    return tracker


async def balance(of: FeedScene) -> tuple[str, str]:
    """A balance, which is the hash of the block that it was read at, and whether it came from the cache."""
    reply = await of.worker.send(rpc("eth_getBalance", [ADDRESS, "latest"]), network=of.network)
    assert reply.status == 200, reply
    return reply.json["result"], reply.headers["x-cache"]


async def warm(of: FeedScene) -> str:
    """Read a balance until it is cached."""
    while True:
        found, cached = await balance(of)
        if cached == "hit":
            return found


def refuse(_: list[Any]) -> None:
    raise Refused(-32000, "not now")


async def hear(of: FeedScene) -> None:
    """Let the balance be read, wait for a subscription, and refuse all further polls."""
    for upstream in of.upstreams:
        upstream.answers["eth_getBalance"] = lambda _: of.chain.canonical[-1]
    await start(of)
    await warm(of)
    await until(lambda: any(each.subscriptions for each in of.upstreams))
    for upstream in of.upstreams:
        upstream.answers["eth_getBlockByNumber"] = upstream.answers["eth_blockNumber"] = refuse


@pytest.mark.parametrize("kinds", [("ws",), ("http", "ws"), ("ws", "http")])
def test_warm_read_follows_an_announced_block_before_any_poll(kinds: tuple[str, ...]) -> None:
    @on_uvloop
    async def run() -> None:
        async with feed_scene(kinds, network=LIVE) as found:
            await hear(found)
            heads = found.worker.app.networks.routes[LIVE].heads
            for _ in range(3):
                assert await warm(found) == found.chain.canonical[-1]
                await found.chain.mine()
                await until(lambda: heads.tip == found.chain.head)
                assert await balance(found) == (found.chain.canonical[-1], "miss")

    run()


@on_uvloop
async def test_announced_reorganisation_at_the_same_height_is_followed() -> None:
    async with feed_scene(("ws",), network=LIVE) as found:
        await hear(found)
        state = found.worker.app.networks.routes[LIVE].state
        await warm(found)
        reorgs = state.reorgs
        await found.chain.replace_blocks(1, longer=0)
        await until(lambda: state.reorgs > reorgs)
        assert await balance(found) == (found.chain.canonical[-1], "miss")


@on_uvloop
async def test_idle_network_has_no_subscription() -> None:
    clock = Clock()
    async with feed_scene(("ws",), network=LIVE) as found:
        upstream = found.upstreams[0]
        await start(found, clock)
        await asyncio.sleep(0.7)
        assert not upstream.subscribed
        await balance(found)
        await until(lambda: bool(upstream.subscriptions))
        await found.chain.mine()
        await until(lambda: not found.worker.app.networks.routes[LIVE].state.replies.has_recent)
        clock.ahead_s = USED_FOR_S
        await until(lambda: not upstream.subscriptions)


@on_uvloop
async def test_lost_and_mute_streams_are_replaced() -> None:
    async with feed_scene(("ws", "ws"), network=LIVE) as found:
        first, second = found.upstreams
        await start(found)
        await balance(found)
        await until(lambda: bool(first.subscriptions))
        first.cut()
        await until(lambda: bool(first.subscriptions or second.subscriptions))
        mute = first if first.subscriptions else second
        mute.mute = True
        count = first.subscribed + second.subscribed
        for _ in range(4):
            await found.chain.mine()
        await until(lambda: first.subscribed + second.subscribed > count)
        await balance(found)


@on_uvloop
async def test_network_without_a_websocket_is_polled_only() -> None:
    async with feed_scene(("http",), network=LIVE) as found:
        route = found.worker.app.networks.routes[LIVE]
        assert not HeadAnnouncements(route, Tracker(route)).is_possible
