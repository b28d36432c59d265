"""The queue of an upstream's calls: who may be given one more place while the limit changes."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from proxy.wire import call_queue
from tests.service import until
from tests.web.worker import on_uvloop
from tests.wire import upstreams
from tests.wire.recorded_calls import GOOD, pool, send_call


@pytest.mark.parametrize("depth", [1, 2])
@on_uvloop
async def test_client_without_a_call_does_not_wait_for_a_lower_limit(depth: int) -> None:
    """The limit falls below the calls in flight of another client. The first place that is free is not that client's."""
    one, others = asyncio.Event(), asyncio.Event()
    script = upstreams.first(upstreams.held(one, GOOD), upstreams.held(others, GOOD))
    async with pool(script, limit=4, depth=depth) as (upstream, server):
        busy = [send_call(upstream, number, client="busy") for number in range(4)]
        await until(lambda: len(server.bodies) >= 4 // depth)
        waits = send_call(upstream, 4, client="busy")
        upstream._queue.limit.allowed = 2
        other = send_call(upstream, 5, client="other")
        assert len(upstream._queue) == 2
        one.set()
        await until(lambda: any(call.done.is_set() for call in busy))
        assert [sink.client for sink in upstream.in_flight()].count("other") == 1
        assert len(upstream._queue) == 1
        others.set()
        for call in (*busy, waits, other):
            assert await call.result() == "0x1"


@on_uvloop
async def test_call_that_was_left_among_others_still_counts_for_its_client() -> None:
    gate = asyncio.Event()
    async with pool(upstreams.held(gate, GOOD), limit=4, depth=2) as (upstream, server):
        calls = [send_call(upstream, number, client="a") for number in range(2)]
        await until(lambda: server.bodies)
        upstream.leave(calls[0])
        assert [sink.client for sink in upstream.in_flight()] == ["a", "a"]
        gate.set()
        assert await calls[1].result() == "0x1"
        assert not calls[0].events


@on_uvloop
async def test_client_that_fills_the_queue_makes_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_queue, "MAX_WAITING", 8)
    gate = asyncio.Event()
    async with pool(upstreams.held(gate, GOOD), limit=1) as (upstream, _):
        greedy = [send_call(upstream, number, client="greedy") for number in range(20)]
        others = [send_call(upstream, number, client=f"other {number}") for number in range(4)]
        await until(lambda: any(call.events for call in greedy))
        assert len(upstream._queue) <= 8
        assert not any(call.events for call in others), "none of the others was refused"
        gate.set()
        for call in others:
            assert await call.result() == "0x1"


@on_uvloop
async def test_client_whose_reader_was_evicted_comes_after_others() -> None:
    gate = asyncio.Event()
    async with pool(upstreams.held(gate, GOOD), limit=1) as (upstream, server):
        first = send_call(upstream, 0, client="first")
        await until(lambda: server.bodies)
        upstream._queue.evicted("slow", upstream.now)
        slow, other = send_call(upstream, 1, client="slow"), send_call(upstream, 2, client="other")
        gate.set()
        for call in (first, other, slow):
            assert await call.result() == "0x1"
        assert [orjson.loads(body)["params"] for body in server.bodies] == [[0], [2], [1]]


@on_uvloop
async def test_replies_whose_readers_do_not_read_take_no_place_within_the_limit() -> None:
    async with pool(upstreams.stub(), limit=40) as (upstream, _):
        queue = upstream._queue
        queue.limit.allowed = 10
        assert queue.room(30) == -20
        queue.tick(upstream.now, used=30, readers=25)
        assert queue.is_held_by_readers
        assert queue.room(30) == 5
        queue.tick(upstream.now, used=38, readers=38)
        assert queue.room(38) == 2, "the connections are bounded all the same"
        queue.tick(upstream.now, used=10, readers=2)
        assert not queue.is_held_by_readers
