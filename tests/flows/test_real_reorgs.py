"""Reorganisations and forks of real chains, Hardhat's and geth's: no reply may come from a block that was replaced."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from proxy.__main__ import main
from tests.faults import fault_proxy
from tests.feed_upstreams import HEADS, RecordingListener
from tests.real_harness import ADDRESS, BASE, DEV, RealHarness, real_harness
from tests.real_nodes import RealNode, hardhat_nodes
from tests.rpc_harness import NetworkHarness
from tests.web.worker import PEPPER, on_uvloop, running_worker


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("depth", [1, 2, 3])
@on_uvloop
async def test_nothing_from_before_a_reorganisation_is_returned_after_one_poll(
    nodes: list[RealNode], count: int, depth: int
) -> None:
    """To a shorter branch, to one of the same length, and to a longer one."""

    async with real_harness(nodes[:count]) as harness:
        for seed, blocks in enumerate((0, depth, depth + 1)):
            await harness.look()
            calls = harness.reads()
            for _ in range(2):
                await harness.check(calls)
            await harness.follow(harness.branch[:-depth] + (7 + seed,) * blocks)
            await harness.look()
            await harness.check(calls)
            await harness.check(harness.reads())


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("reader", ["eth_blockNumber", "eth_getTransactionReceipt"])
@on_uvloop
async def test_block_whose_hash_was_never_polled_is_replaced_at_its_height(
    nodes: list[RealNode], count: int, reader: str
) -> None:
    async with real_harness(nodes[:count]) as harness:
        await harness.follow((*BASE, 4))
        # A client learns of the new block before the tracker does.
        await harness.call(reader, [harness.transaction] if "Receipt" in reader else [], Cache_Control="no-cache")
        calls = harness.reads()
        await harness.check(calls)
        await harness.follow((*BASE, 7))
        await harness.look()
        await harness.check(calls)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("subscribers", ["none", "over http", "over ws"])
@on_uvloop
async def test_reply_is_stale_for_one_poll_at_most(nodes: list[RealNode], count: int, subscribers: str) -> None:
    async with real_harness(nodes[:count], ws=count if subscribers == "over ws" else 0) as harness:
        harness.watch()
        if subscribers != "none":
            feed = harness.worker.app.feeds.find(DEV)
            assert feed is not None
            await feed.subscribe(HEADS, RecordingListener())
        for depth in (1, 2, 3):
            calls = harness.reads()
            for _ in range(2):
                await harness.check(calls)
            await harness.follow(harness.branch[:-depth] + (10 + depth,) * depth)
            await harness.polled()
            await harness.check(calls)


@on_uvloop
async def test_head_goes_back_only_when_both_of_two_upstreams_have_gone_back(nodes: list[RealNode]) -> None:
    async with real_harness(nodes[:2]) as harness:
        await harness.nodes[0].follow(BASE[:-2])
        await harness.look()
        for _ in range(6):
            await harness.check(harness.reads())
        calls = harness.reads()
        await harness.follow(BASE[:-2])
        await harness.look()
        await harness.check(calls)
        assert int(await harness.result("eth_blockNumber"), 16) == len(BASE) - 2


# Forks


async def check_left_out(harness: RealHarness, forked: int) -> None:
    """The upstream with the index `forked` takes no reads, is shown as forked, and comes back when it is on our branch."""
    await harness.shows(*["forked" if index == forked else "up" for index in range(len(harness.nodes))])
    taken = harness.proxies[forked].methods["eth_getBalance"]
    for _ in range(8):
        await harness.result("eth_getBalance", [ADDRESS, "latest"], Cache_Control="no-cache")
    await harness.check(harness.reads())
    assert harness.proxies[forked].methods["eth_getBalance"] == taken
    await harness.nodes[forked].follow(harness.branch)
    await harness.look()
    await harness.shows(*["up"] * len(harness.nodes))


@pytest.mark.parametrize(("count", "depth"), [(3, 1), (3, 3), (3, 20), (2, 20)])
@on_uvloop
async def test_forked_upstream_takes_no_reads(nodes: list[RealNode], count: int, depth: int) -> None:
    """One of two is known by a final block that it lacks, although its branch is longer."""

    async with real_harness(nodes[:count]) as harness:
        await harness.nodes[0].follow(BASE[:-depth] + (7,) * (depth + 1))
        await harness.look()
        await check_left_out(harness, 0)


# Another chain


@on_uvloop
async def test_upstream_of_another_chain_takes_no_reads(
    nodes: list[RealNode], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="penstock.heads"), hardhat_nodes(1, chain_ids=[1337]) as (stray,):
        async with (
            real_harness(nodes[1:2]),
            fault_proxy(stray.port) as proxy,
            running_worker({DEV: [proxy.url, nodes[1].url]}) as running,
        ):
            harness = NetworkHarness(running, DEV)
            harness.tracker.withhold()
            await harness.look()
            await harness.shows("wrong_chain", "up")
            for _ in range(8):
                await harness.result("eth_getBalance", [ADDRESS, "latest"], Cache_Control="no-cache")
            assert proxy.methods["eth_getBalance"] == 0
    assert [record.levelname for record in caplog.records if "another chain" in record.message] == ["ERROR"]


@on_uvloop
async def test_check_connect_names_the_upstream_of_another_chain(
    nodes: list[RealNode], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with real_harness(nodes[:1]):
        file = tmp_path / "penstock.toml"
        file.write_text(
            f'database.url = "postgresql://nobody@127.0.0.1:1/nothing"\nkeys.pepper = "{PEPPER}"\n'
            + "".join(
                f'[[upstreams]]\nnetwork = "{network}"\nurl = "{nodes[0].url}"\n'
                for network in (DEV, "ethereum/mainnet")
            )
        )
        assert await asyncio.to_thread(main, ["check", "--offline", "--connect", "--config", str(file)]) == 1
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line}
    assert rows[f"{DEV}#1"] == ["up", "31337", str(len(BASE)), "0", "all=0", "yes", "local"]
    assert rows["ethereum/mainnet#1"][0] == "wrong_chain"
