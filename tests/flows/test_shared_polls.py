"""Workers of one host share their polls of upstreams: one polls, and the others learn all that it finds."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from proxy.services.rpc.shared_polls import GRACE_S, SHORTEST_S, SharedPolls
from proxy.services.rpc.tracker import Tracker, start_tracking
from tests.rpc_harness import NetworkHarness, RpcHarness, rpc_harness
from tests.rpc_upstreams import Chain
from tests.service import until
from tests.web.worker import LIVE, on_uvloop, running_worker

ADDRESS = "0x" + "ab" * 20
# Its blocks are so quick that its heads are polled twice a second.
QUICK = "arbitrum/mainnet"
Change = Callable[[RpcHarness], None]


@asynccontextmanager
async def two_workers(
    count: int = 1, *, network: str = LIVE, faults: bool = False
) -> AsyncIterator[tuple[RpcHarness, NetworkHarness]]:
    """A worker that has polled its upstreams, and a new one beside it."""
    async with rpc_harness(count, network=network, faults=faults) as first:
        urls = [each.url for each in first.proxies or first.upstreams]
        async with running_worker({network: urls}, first.worker) as beside:
            yield first, NetworkHarness(beside, network)


def calls(first: RpcHarness) -> int:
    return sum(len(each.calls) for each in first.upstreams)


async def start(worker: NetworkHarness) -> None:
    """Start to track the heads, as a worker does."""
    await start_tracking([worker.tracker], worker.worker.app.tasks)


@on_uvloop
async def test_worker_that_starts_needs_no_poll_if_another_one_has_polled() -> None:
    async with two_workers(2) as (first, second):
        before, now = calls(first), time.monotonic()
        app = second.worker.app
        second.tracker = Tracker(second.route.state, lambda: now, table=app.memory.polls)
        second.tracker.withhold()
        assert second.states == ["unchecked"] * 2
        await start(second)
        assert second.states == ["up"] * 2
        assert second.route.heads.tip == first.chain.head
        assert calls(first) == before


@on_uvloop
async def test_worker_polls_for_itself_if_the_last_polls_are_old() -> None:
    async with two_workers() as (first, second):
        before = calls(first)
        second.tracker = Tracker(
            second.route.state, lambda: time.monotonic() + 60.0, table=second.worker.app.memory.polls
        )
        await start(second)
        assert calls(first) > before
        await until(lambda: second.states == ["up"])


def mine(first: RpcHarness) -> None:
    first.chain.head += 1


def lag(first: RpcHarness) -> None:
    first.upstreams[0].behind = 100


def serve_another_chain(first: RpcHarness) -> None:
    first.upstreams[0].answers["eth_chainId"] = lambda _: "0x539"
    first.tracker._named_at.clear()


def fork(first: RpcHarness) -> None:
    chain = first.chain
    first.upstreams[0].chain = Chain(chain.head, chain.name, chain.identity, {chain.head - 3: 1})


@pytest.mark.parametrize(
    ("change", "states"),
    [
        (mine, ["up", "up", "up"]),
        (lag, ["lagging", "up", "up"]),
        (serve_another_chain, ["wrong_chain", "up", "up"]),
        (fork, ["forked", "up", "up"]),
    ],
)
@on_uvloop
async def test_findings_of_one_worker_reach_the_others(change: Change, states: list[str]) -> None:
    async with two_workers(3) as (first, second):
        await start(second)
        change(first)
        await first.look()
        await first.shows(*states)
        before = calls(first)
        second.tracker.adopt()
        assert second.states == states
        assert second.route.heads.tip == first.route.heads.tip == first.chain.head
        assert [each.health.head for each in second.route.upstreams] == [each.head for each in first.upstreams]
        assert calls(first) == before
        # And back.
        upstream = first.upstreams[0]
        upstream.behind, upstream.chain = 0, first.chain
        upstream.answers.clear()
        first.tracker._named_at.clear()
        await first.look()
        await first.shows("up", "up", "up")
        second.tracker.adopt()
        assert second.states == ["up", "up", "up"]


@on_uvloop
async def test_reorganisation_that_one_worker_finds_clears_the_caches_of_the_others() -> None:
    async with two_workers() as (first, second):
        await start(second)
        first.upstreams[0].answers["eth_getBalance"] = lambda _: first.chain.hash_of(first.chain.head)
        balance = ("eth_getBalance", [ADDRESS, "latest"])
        was = await second.result(*balance)
        assert await second.result(*balance) == was
        first.chain.reorganise()
        reorgs = second.route.state.reorgs
        await first.look()
        assert await second.result(*balance) != was
        second.tracker.adopt()
        assert second.route.state.reorgs > reorgs


@on_uvloop
async def test_upstream_that_one_worker_finds_silent_is_silent_for_all() -> None:
    async with two_workers(faults=True) as (first, second):
        await start(second)
        health = second.route.upstreams[0].health
        await first.proxies[0].switch("dead")
        await first.look()
        second.tracker.adopt()
        assert health.silent
        await first.proxies[0].switch("pass")
        await first.look()
        second.tracker.adopt()
        assert not health.silent


@on_uvloop
async def test_head_that_a_call_has_seen_is_not_lowered_by_an_older_poll() -> None:
    async with two_workers() as (first, second):
        await start(second)
        health, newer = second.route.upstreams[0].health, first.chain.head + 1
        await first.look()
        second.route.state.compare_number(newer, health, time.monotonic())
        second.tracker.adopt()
        assert (second.route.heads.tip, health.head) == (newer, newer)
        assert second.route.state.reorgs == 0


@on_uvloop
async def test_another_worker_takes_over_when_the_one_that_polls_ends() -> None:
    async with two_workers(network=QUICK) as (first, second):
        for worker in (first, second):
            await start(worker)
        for _ in range(2):
            first.chain.head += 1
            await until(lambda: first.route.heads.tip == second.route.heads.tip == first.chain.head)
        await first.worker.app.tasks.close()
        for _ in range(3):
            first.chain.head += 1
            await until(lambda: second.route.heads.tip == first.chain.head)


@on_uvloop
async def test_process_that_polled_last_polls_next_and_the_others_wait_a_moment() -> None:
    async with rpc_harness(1) as first:
        table = first.worker.app.memory.polls
        health = first.route.upstreams[0].health
        one, other = (SharedPolls(first.route.network, [health], table) for _ in range(2))
        one.begin(health, 100.0)
        other.news()
        assert one.due_at(health, 2.0, -math.inf) == 102.0
        assert other.due_at(health, 2.0, -math.inf) == 102.0 + GRACE_S
        # A network that is in use here is polled sooner.
        assert other.due_at(health, 1.0, -math.inf) == 101.0 + GRACE_S
        # A block that was announced after the poll.
        assert one.due_at(health, 2.0, 101.5) == 101.5
        assert one.due_at(health, 2.0, 100.1) == 100.0 + SHORTEST_S
        assert one.due_at(health, 2.0, 99.0) == 102.0
        # An upstream that is silent is polled by all.
        health.head_poll_failed(103.0)
        one.end(health, None, 0.0, 103.0)
        other.news()
        assert other.due_at(health, 2.0, -math.inf) == 102.0
        # The other one takes over.
        other.begin(health, 104.0)
        one.news()
        assert other.due_at(health, 2.0, -math.inf) == 106.0
