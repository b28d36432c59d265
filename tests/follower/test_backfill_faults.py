"""Back-fills whose upstreams return too little, fail or are killed: the index has every transfer once, or names the gaps."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.errors import InvalidRequest
from proxy.services.follower import backfill as backfills
from proxy.services.follower import range_lanes
from proxy.services.follower.backfill import BackfillLimits, BackfillProgress
from proxy.services.follower.block_reader import CAPS, ReadFailed
from proxy.store.postgres.index_reads import IndexReads
from proxy.store.postgres.transfers import TransferStore
from proxy.tasks import Tasks
from tests.chain_upstream import LittleChain, erc20
from tests.database import connected
from tests.follower.follower_process import BackfillProcess
from tests.follower.harness import (
    COIN,
    NETWORK,
    A,
    B,
    FollowerHarness,
    everything,
    follower_harness,
    settings_of,
)
from tests.follower.test_backfill import START, backfill, fill, old_chain
from tests.rpc_upstreams import Refused
from tests.service import until

# How often a back-fill is killed.
KILLS = int(os.environ.get("PENSTOCK_KILLS", "4"))


async def follow(harness: FollowerHarness, start: int = START) -> None:
    async with harness.leading(start=start) as (follower, term):
        await follower.step(term)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_lanes, "PAUSE_S", 0.02)
    monkeypatch.setattr(range_lanes, "LONGEST_PAUSE_S", 0.05)


async def test_all_upstreams_are_read_each_with_its_own_range(database: str) -> None:
    async with follower_harness(database, upstreams=3, chain=old_chain(), start={NETWORK: START}) as harness:
        harness.upstreams[0].max_range = 2
        harness.upstreams[1].max_range, harness.upstreams[1].refusal = 5, "infura"
        await follow(harness)
        before = [each.count("eth_getLogs") for each in harness.upstreams]
        await fill(harness, 0)
        assert await harness.is_complete(0)
        assert all(each.count("eth_getLogs") > n for each, n in zip(harness.upstreams, before, strict=True))


def empty(harness: FollowerHarness, index: int) -> None:
    """Let an upstream return no logs of old blocks, as a node does that lacks them."""
    upstream = harness.upstreams[index]
    upstream.answers["eth_getLogs"] = lambda params: []
    upstream.answers["eth_getBlockReceipts"] = lambda params: []


def truncated(harness: FollowerHarness, index: int) -> None:
    """Let an upstream return the first logs of a range only, without an error."""
    upstream = harness.upstreams[index]
    upstream.answers["eth_getLogs"] = lambda params: upstream._eth_getLogs(params)[:7]


def without_one(harness: FollowerHarness, index: int) -> None:
    """Let an upstream leave out a block."""
    upstream = harness.upstreams[index]
    upstream.answers["eth_getLogs"] = lambda params: [
        log for log in upstream._eth_getLogs(params) if int(log["blockNumber"], 16) != 42
    ]


@pytest.mark.parametrize("spoil", [empty, truncated, without_one])
async def test_logs_that_an_upstream_leaves_out_come_from_another(
    database: str, spoil: Callable[[FollowerHarness, int], None]
) -> None:
    async with follower_harness(database, upstreams=2, chain=old_chain(), start={NETWORK: START}) as harness:
        await follow(harness)
        spoil(harness, 0)
        done = await fill(harness, 0)
        assert done.gaps == []
        assert await harness.is_complete(0)


async def test_reply_of_a_round_number_of_logs_is_read_again_in_halves(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cap = 50
    monkeypatch.setattr("proxy.services.follower.block_reader.CAPS", CAPS | {cap})
    chain = LittleChain()
    chain.mine(*([[erc20(COIN, A, B, 1)] * 20] * 100))
    async with follower_harness(database, chain=chain, start={NETWORK: START}) as harness:
        await follow(harness)
        upstream = harness.upstream
        # The last block of a truncated reply has some of its logs, so that no bloom filter shows the others.
        upstream.answers["eth_getLogs"] = lambda params: upstream._eth_getLogs(params)[:cap]
        await fill(harness, 0)
        assert await harness.is_complete(0)


async def test_range_that_no_upstream_serves_is_a_gap_that_the_next_run_repairs(database: str) -> None:
    async with follower_harness(database, chain=old_chain(), start={NETWORK: START}) as harness:
        await follow(harness)
        upstream = harness.upstream

        def logs(params: list[Any]) -> Any:
            first, last = (int(params[0].get(name, "0x0"), 16) for name in ("fromBlock", "toBlock"))
            if first <= 30 <= last:
                raise Refused(-32000, "missing trie node")
            return upstream._eth_getLogs(params)

        upstream.answers["eth_getLogs"] = logs
        done = await fill(harness, 0)
        ((first, last, reason),) = done.gaps
        assert first <= 30 <= last
        assert "missing trie node" in reason
        assert done.done == done.total - (last - first + 1)
        found = await TransferStore(IndexReads(harness.running.pool)).coverage(NETWORK)
        assert {blocks.first for blocks in found.values()} == {last + 1}
        upstream.answers.clear()
        assert (await fill(harness, 0)).done == last - first + 1
        assert await harness.is_complete(0)


async def test_backfill_ends_if_upstreams_are_unavailable(database: str) -> None:
    def refuse(_: list[Any]) -> Any:
        raise Refused(-32000, "missing trie node")

    async with follower_harness(database, chain=old_chain(), start={NETWORK: START}) as harness:
        await follow(harness)
        harness.upstream.answers["eth_getLogs"] = refuse
        with pytest.raises(ReadFailed, match="missing trie node"):
            await fill(harness, 0)


async def test_backfill_keeps_its_rate_of_calls(database: str) -> None:
    async with follower_harness(database, chain=old_chain(), start={NETWORK: START}) as harness:
        await follow(harness)
        harness.upstream.max_range = 10
        fast = backfill(harness)
        fast.limits = BackfillLimits(calls_per_second=40.0)
        loop = asyncio.get_running_loop()
        began = loop.time()
        done = await fast.run(0, None, lambda progress: None)
        assert done.calls >= 20
        assert loop.time() - began >= (done.calls - 1) / 40.0
        assert await harness.is_complete(0)


async def test_full_disk_pauses_the_backfill(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backfills, "DISK_PAUSE_S", 0.05)
    async with (
        follower_harness(database, chain=old_chain(), start={NETWORK: START}) as harness,
        connected(database) as connection,
    ):
        await follow(harness)
        await connection.execute(
            """create function full_disk() returns trigger language plpgsql as
            $$ begin raise exception 'could not extend file' using errcode = 'disk_full'; end $$"""
        )
        await connection.execute(
            "create trigger full_disk before update on transfer_coverage for each row execute function full_disk()"
        )
        paused = asyncio.Event()

        def report(progress: BackfillProgress) -> None:
            if progress.paused:
                paused.set()

        async with asyncio.TaskGroup() as group:
            filling = group.create_task(backfill(harness).run(0, None, report))
            async with asyncio.timeout(30):
                await paused.wait()
            assert not filling.done()
            await connection.execute("drop trigger full_disk on transfer_coverage")
        assert filling.result().paused == ""
        assert await harness.is_complete(0)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
async def test_backfill_and_follower_resume_when_a_full_disk_has_room_again(
    small_disk: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backfills, "DISK_PAUSE_S", 0.05)
    async with connected(database) as connection:
        name = await connection.fetchval("select current_database()")
        await connection.execute(f"create tablespace {name} location '{small_disk}'")
        await connection.execute(f"alter database {name} set default_tablespace = {name}")
    chain = LittleChain()
    chain.mine(*(everything() * 80))
    start = chain.head - 10
    async with follower_harness(database, chain=chain, start={NETWORK: start}) as harness:
        await follow(harness, start)
        ballast = small_disk / "ballast"
        _fill_up(ballast)
        tasks, states = Tasks(), list[str]()
        tasks.start("follower", harness.follower(start=start).run)
        chain.mine(*(everything() * 80))
        async with asyncio.TaskGroup() as group:
            filling = group.create_task(backfill(harness).run(0, None, lambda each: states.append(each.paused)))
            await until(lambda: "the disk of the database is full" in states, within_s=60.0)
            assert not filling.done()
            assert await harness.cursor() != (chain.head, chain.blocks[-1].hash)
            ballast.unlink()
        assert filling.result().paused == ""
        await until(lambda: harness.is_complete(0), within_s=60.0)
        await tasks.close()


def _fill_up(path: Path) -> None:
    """Write a file until the disk is full."""
    disk = os.statvfs(path.parent)
    path.write_bytes(bytes(disk.f_bavail * disk.f_bsize))
    assert os.statvfs(path.parent).f_bavail == 0


async def test_backfill_waits_for_a_follower_that_is_behind(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backfills, "FOLLOWER_CHECK_S", 0.05)
    async with follower_harness(database, chain=old_chain(), start={NETWORK: START}) as harness:
        async with harness.leading(start=START) as (follower, term):
            await follower.step(term)
            harness.chain.mine(*everything())
            await until(lambda: _has_head(harness), within_s=20.0)
            waits = asyncio.Event()

            def report(progress: BackfillProgress) -> None:
                if "behind" in progress.paused:
                    waits.set()

            async with asyncio.TaskGroup() as group:
                filling = group.create_task(backfill(harness).run(0, None, report))
                async with asyncio.timeout(30):
                    await waits.wait()
                assert filling.get_name()
                await follower.step(term)
        assert await harness.is_complete(0)


async def _has_head(harness: FollowerHarness) -> bool:
    return bool(harness.route.heads.tip >= harness.chain.head)


async def test_credits_end_a_backfill_that_can_be_continued(database: str) -> None:
    async with follower_harness(database, chain=old_chain(), cost="alchemy", start={NETWORK: START}) as harness:
        await follow(harness)
        harness.upstream.max_range = 5
        poor = backfill(harness)
        poor.limits = BackfillLimits(credits=300)
        with pytest.raises(InvalidRequest, match="run the command again"):
            await poor.run(0, None, lambda progress: None)
        await fill(harness, 0)
        assert await harness.is_complete(0)


async def test_killed_backfills_leave_every_transfer_once_over_reorganisations(database: str) -> None:
    """kill -9 at random moments, while the follower goes on and the chain drops up to 30 blocks."""
    rng = random.Random(KILLS)
    chain = LittleChain()
    # Long enough that most of the kills come before the end.
    chain.mine(*(everything() * 15 * max(4, KILLS)))
    start = chain.head - 60
    async with follower_harness(database, chain=chain, start={NETWORK: start}) as harness:
        harness.upstream.max_range = 3
        tree = settings_of(database, [harness.upstream.url], start={NETWORK: start})
        tasks = Tasks()
        tasks.start("follower", harness.follower(start=start, keep=40).run)
        await until(lambda: harness.is_complete(start), within_s=60.0)
        killed = 0
        for _ in range(KILLS):
            process = BackfillProcess(tree)
            await process.ready()
            await asyncio.sleep(rng.uniform(0.0, 0.4))
            chain.drop(rng.randrange(31))
            chain.mine(*(everything() * 7)[: rng.randrange(31, 36)])
            process.kill()
            killed += process.code == -signal.SIGKILL
        print(f"{killed} of {KILLS} back-fills were killed, among as many reorganisations")
        assert killed > KILLS // 2
        await fill(harness, 0)
        await until(lambda: harness.is_complete(0), within_s=60.0)
        await tasks.close()
