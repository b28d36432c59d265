"""Followers that die, hang, or lose their database: at most one leads at a time, and the index ends up complete."""

from __future__ import annotations

import asyncio
import random
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from proxy.tasks import Tasks
from tests import database as database_room
from tests.chain_upstream import ZERO, Event, address, erc20, erc721
from tests.database import Server, connected
from tests.follower.follower_process import FollowerProcess
from tests.follower.harness import NETWORK, FollowerHarness, follower_harness, settings_of
from tests.service import until
from tests.store.cable import Cable

COIN, ART = address(100), address(101)


@contextmanager
def follower(harness: FollowerHarness, *, kill_in: int = 0, database: str = "") -> Iterator[FollowerProcess]:
    tree = settings_of(database or harness.database, [harness.upstream.url], keep_blocks=64)
    process = FollowerProcess(tree, kill_in)
    try:
        yield process
    finally:
        process.kill()


def some_events(rng: random.Random) -> list[Event]:
    holders = [address(n) for n in range(6)]
    return [
        erc20(COIN, rng.choice(holders), rng.choice(holders), rng.randrange(1000))
        if rng.random() < 0.7
        else erc721(ART, ZERO, rng.choice(holders), rng.randrange(10**9))
        for _ in range(rng.randrange(6))
    ]


def change(harness: FollowerHarness, rng: random.Random) -> None:
    """Extend the chain, sometimes after a reorganisation."""
    if rng.random() < 0.3 and harness.chain.head > 8:
        depth = rng.randrange(1, 6)
        harness.chain.drop(depth)
        harness.chain.mine(*(some_events(rng) for _ in range(depth)))
    harness.chain.mine(*(some_events(rng) for _ in range(rng.randrange(1, 5))))


async def leader(harness: FollowerHarness) -> int | None:
    """The session that holds the network's lock."""
    async with connected(harness.database) as connection:
        found = await connection.fetchval(
            "select pid from pg_locks where locktype = 'advisory' and granted and objsubid = 2"
            " and database = (select oid from pg_database where datname = current_database())"
        )
    return None if found is None else int(found)


@pytest.mark.parametrize("seed", [1, 2])
async def test_kill_inside_transactions_loses_nothing_and_doubles_nothing(database: str, seed: int) -> None:
    """SIGKILL right before the commit, repeatedly, while the chain grows and forks."""
    rng = random.Random(seed)
    async with follower_harness(database) as harness:
        for _ in range(4):
            change(harness, rng)
            with follower(harness, kill_in=rng.randrange(1, 4)) as doomed:
                while doomed.code is None:
                    change(harness, rng)
                    await asyncio.sleep(0.15)
                assert doomed.code == -signal.SIGKILL
            found = await harness.cursor()
            assert found is None or found[0] <= harness.chain.head
        with follower(harness):
            await until(harness.is_complete, within_s=40.0)


async def test_kill_at_any_moment(database: str) -> None:
    rng = random.Random(7)
    async with follower_harness(database) as harness:
        harness.chain.mine(*(some_events(rng) for _ in range(300)))
        for _ in range(4):
            with follower(harness) as process:
                await process.ready()
                change(harness, rng)
                await asyncio.sleep(rng.random() * 0.4)
        with follower(harness):
            await until(harness.is_complete, within_s=40.0)


async def test_second_follower_takes_over_when_the_leader_dies(database: str) -> None:
    rng = random.Random(3)
    async with follower_harness(database) as harness:
        harness.chain.mine(*(some_events(rng) for _ in range(20)))
        with follower(harness) as first, follower(harness):
            await until(harness.is_complete, within_s=40.0)
            before = await leader(harness)
            assert before is not None
            first.kill()
            change(harness, rng)
            await until(harness.is_complete, within_s=40.0)
            assert await leader(harness) is not None


async def test_follower_that_hangs_is_replaced_and_writes_nothing_when_it_resumes(database: str) -> None:
    rng = random.Random(4)
    async with follower_harness(database) as harness:
        harness.chain.mine(*(some_events(rng) for _ in range(20)))
        with follower(harness) as first:
            await until(harness.is_complete, within_s=40.0)
            held = await leader(harness)
            first.send_signal(signal.SIGSTOP)
            with follower(harness):
                change(harness, rng)
                await until(harness.is_complete, within_s=40.0)
                assert await leader(harness) not in (None, held)
                first.send_signal(signal.SIGCONT)
                for _ in range(5):
                    change(harness, rng)
                    await asyncio.sleep(0.1)
                await until(harness.is_complete, within_s=40.0)
                assert first.code is None, "it competes for the leadership again"


@asynccontextmanager
async def through_cable(server: Server, name: str) -> AsyncIterator[tuple[Cable, str]]:
    with tempfile.TemporaryDirectory(prefix="penstock-") as directory:
        cable = Cable(Path(directory), server.sockets)
        await cable.plug()
        yield cable, server.url(name, sockets=cable.directory)
        await cable.cut()


async def test_follower_whose_database_goes_silent_is_replaced(server: Server, database: str) -> None:
    """The connection stays open without traffic: waiting followers end the silent session, and only one writes."""
    rng = random.Random(5)
    name = urlsplit(database).path.removeprefix("/")
    async with through_cable(server, name) as (cable, url), follower_harness(database) as harness:
        harness.chain.mine(*(some_events(rng) for _ in range(10)))
        with follower(harness, database=url):
            await until(harness.is_complete, within_s=40.0)
            cable.muted = True
            with follower(harness):
                change(harness, rng)
                await until(harness.is_complete, within_s=40.0)
                cable.muted = False
                change(harness, rng)
                await until(harness.is_complete, within_s=40.0)


async def test_follower_recovers_from_a_lost_database_connection(server: Server, database: str) -> None:
    rng = random.Random(6)
    name = urlsplit(database).path.removeprefix("/")
    async with through_cable(server, name) as (cable, url), follower_harness(database) as harness:
        harness.chain.mine(*(some_events(rng) for _ in range(10)))
        with follower(harness, database=url) as process:
            for _ in range(3):
                await until(harness.is_complete, within_s=40.0)
                await cable.cut()
                change(harness, rng)
                await cable.plug()
            await until(harness.is_complete, within_s=40.0)
            assert process.code is None


async def test_follower_recovers_after_postgres_was_killed() -> None:
    rng = random.Random(8)
    async with database_room.running() as own, follower_harness(own.postgres.url) as harness:
        harness.chain.mine(*(some_events(rng) for _ in range(50)))
        with follower(harness) as process:
            for _ in range(2):
                await until(harness.is_complete, within_s=40.0)
                change(harness, rng)
                assert own.postgres.child.process is not None
                own.postgres.child.process.send_signal(signal.SIGKILL)
                await own.postgres.child.process.wait()
                change(harness, rng)
                await own.postgres.start()
            await until(harness.is_complete, within_s=40.0)
            assert process.code is None


async def test_cancelled_loop_leaves_complete_blocks(database: str) -> None:
    rng = random.Random(9)
    async with follower_harness(database) as harness:
        harness.chain.mine(*(some_events(rng) for _ in range(400)))
        for _ in range(5):
            tasks = Tasks()
            tasks.start("follower", harness.follower(keep=64).run)
            await asyncio.sleep(rng.random() * 0.3)
            await tasks.close()
            change(harness, rng)
        tasks = Tasks()
        tasks.start("follower", harness.follower(keep=64).run)
        await until(harness.is_complete, within_s=40.0)
        await tasks.close()
        assert NETWORK in repr(harness.route)
