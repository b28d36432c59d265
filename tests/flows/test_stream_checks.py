"""Upstreams of Solana that carry subscriptions only: one of another cluster is never used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy.__main__ import main
from proxy.services.rpc import stream_checks
from proxy.services.rpc.tracker import Tracker
from tests.feed_upstreams import FeedHarness, feed_harness
from tests.flows.test_missing_methods import PubSub
from tests.flows.test_upstream_branches import CONFIG
from tests.service import until
from tests.svm_upstreams import SvmChain, SvmFeedUpstream, SvmUpstream
from tests.web.worker import on_uvloop

NETWORK = "solana/devnet"
OTHER_GENESIS = "5eykt4UsFv8P8NJdTREpY1vzqKqZKvdpKuc147dw2N9d"


@asynccontextmanager
async def slots(upstream: SvmFeedUpstream, number: int) -> AsyncIterator[None]:
    """Let the upstream notify of slots, again and again, from this number on."""

    async def notify() -> None:
        count = 0
        while True:
            await upstream.slot(number + (count := count + 1))
            await asyncio.sleep(0.02)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(notify())
        yield
        task.cancel()


async def standing(harness: FeedHarness) -> str:
    route = harness.worker.app.networks.routes[NETWORK]
    tracker = Tracker(route.state)
    tracker.withhold()
    await tracker.look()
    return route.streams[0].health.standing


def svm(harness: FeedHarness) -> SvmFeedUpstream:
    upstream = harness.upstreams[1]
    assert isinstance(upstream, SvmFeedUpstream)
    return upstream


@pytest.mark.parametrize("is_ours", [True, False])
@on_uvloop
async def test_stream_that_names_its_chain_is_compared(is_ours: bool) -> None:
    async with feed_harness(["http", "ws"], kind=SvmFeedUpstream, chain=SvmChain(), network=NETWORK) as harness:
        if not is_ours:
            svm(harness).answers["getGenesisHash"] = lambda _: OTHER_GENESIS
        assert await standing(harness) == ("good" if is_ours else "wrong_chain")


@pytest.mark.parametrize(("lead", "expected"), [(32, "good"), (10**7, "wrong_chain")])
@on_uvloop
async def test_stream_that_refuses_calls_is_compared_by_its_slots(lead: int, expected: str) -> None:
    chain = SvmChain()
    async with feed_harness(["http", "ws"], kind=PubSub, chain=chain, network=NETWORK) as harness:
        async with slots(svm(harness), chain.head + lead):
            assert await standing(harness) == expected
        await until(lambda: not svm(harness).subscriptions)


@on_uvloop
async def test_stream_that_reports_nothing_is_not_used_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_checks, "REPORT_S", 0.2)
    async with feed_harness(["http", "ws"], kind=PubSub, chain=SvmChain(), network=NETWORK) as harness:
        assert await standing(harness) == "unchecked"
        assert harness.worker.app.networks.routes[NETWORK].streams[0].health.silent


@on_uvloop
async def test_check_connect_fails_for_a_stream_of_another_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls, stream = SvmUpstream(SvmChain()), SvmFeedUpstream(SvmChain())
    calls.answers["getGenesisHash"] = lambda _: "EtWTRABZaYq6iMfeYKouRu166VU2xqa1wcaWoxPkrZBG"
    stream.answers["getGenesisHash"] = lambda _: OTHER_GENESIS
    await calls.open()
    await stream.open()
    try:
        given: list[Any] = [calls.url, stream.ws]
        blocks = [f'[[upstreams]]\nnetwork = "{NETWORK}"\nurl = "{each}"\n' for each in given]
        file = tmp_path / "penstock.toml"
        file.write_text(CONFIG + "".join(blocks))
        assert await asyncio.to_thread(main, ["check", "--offline", "--connect", "--config", str(file)]) == 1
    finally:
        await calls.close()
        await stream.close()
    rows = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("sol")}
    assert rows == {f"{NETWORK}#1": "up", f"{NETWORK}#2": "wrong_chain"}
