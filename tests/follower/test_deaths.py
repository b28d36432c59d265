"""Followers that die, hang, or lose their database: one leads at any time, and the record is the chain's in the end."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import orjson
import pytest

from proxy.store import migrate
from proxy.tasks import Tasks
from tests import database as database_room
from tests.chain_upstream import ZERO, Event, address, erc20, erc721
from tests.database import Server, connected
from tests.follower.scene import NETWORK, Scene, scene, settings_of
from tests.service import ROOT, until
from tests.store.cable import Cable

COIN, ART = address(100), address(101)
FOLLOW = ROOT / "tests" / "follower" / "follow.py"


@contextmanager
def follower(stage: Scene, *, trap: int = 0, database: str = "") -> Iterator[subprocess.Popen[bytes]]:
    tree = settings_of(database or stage.database, [stage.upstream.url], keep_blocks=64)
    process = subprocess.Popen(
        [sys.executable, str(FOLLOW), orjson.dumps(tree).decode(), str(trap)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def some_events(chance: random.Random) -> list[Event]:
    who = [address(n) for n in range(6)]
    return [
        erc20(COIN, chance.choice(who), chance.choice(who), chance.randrange(1000))
        if chance.random() < 0.7
        else erc721(ART, ZERO, chance.choice(who), chance.randrange(10**9))
        for _ in range(chance.randrange(6))
    ]


def change(stage: Scene, chance: random.Random) -> None:
    """The chain goes on, and now and then back."""
    if chance.random() < 0.3 and stage.chain.head > 8:
        depth = chance.randrange(1, 6)
        stage.chain.drop(depth)
        stage.chain.mine(*(some_events(chance) for _ in range(depth)))
    stage.chain.mine(*(some_events(chance) for _ in range(chance.randrange(1, 5))))


async def leader(stage: Scene) -> int | None:
    """The session that holds the network's lock."""
    async with connected(stage.database) as connection:
        found = await connection.fetchval(
            "select pid from pg_locks where locktype = 'advisory' and granted and objsubid = 2"
            " and database = (select oid from pg_database where datname = current_database())"
        )
    return None if found is None else int(found)


@pytest.mark.parametrize("seed", [1, 2])
async def test_kill_inside_transactions_loses_nothing_and_doubles_nothing(database: str, seed: int) -> None:
    """SIGKILL when all is written and nothing committed, again and again, while the chain grows and forks."""
    chance = random.Random(seed)
    async with scene(database) as stage:
        for _ in range(4):
            change(stage, chance)
            with follower(stage, trap=chance.randrange(1, 4)) as doomed:
                while doomed.poll() is None:
                    change(stage, chance)
                    await asyncio.sleep(0.15)
                assert doomed.returncode == -signal.SIGKILL
            found = await stage.cursor()
            assert found is None or found[0] <= stage.chain.head
        with follower(stage):
            await until(stage.is_whole, within_s=40.0)


async def test_kill_at_any_moment(database: str) -> None:
    chance = random.Random(7)
    async with scene(database) as stage:
        stage.chain.mine(*(some_events(chance) for _ in range(300)))
        for _ in range(4):
            with follower(stage) as process:
                assert process.stdout is not None
                await asyncio.to_thread(process.stdout.readline)
                change(stage, chance)
                await asyncio.sleep(chance.random() * 0.4)
        with follower(stage):
            await until(stage.is_whole, within_s=40.0)


async def test_of_two_followers_one_leads_and_the_other_takes_over_when_it_dies(database: str) -> None:
    chance = random.Random(3)
    async with scene(database) as stage:
        stage.chain.mine(*(some_events(chance) for _ in range(20)))
        with follower(stage) as first, follower(stage):
            await until(stage.is_whole, within_s=40.0)
            before = await leader(stage)
            assert before is not None
            first.kill()
            change(stage, chance)
            await until(stage.is_whole, within_s=40.0)
            assert await leader(stage) is not None


async def test_follower_that_hangs_is_replaced_and_writes_nothing_when_it_wakes(database: str) -> None:
    chance = random.Random(4)
    async with scene(database) as stage:
        stage.chain.mine(*(some_events(chance) for _ in range(20)))
        with follower(stage) as first:
            await until(stage.is_whole, within_s=40.0)
            held = await leader(stage)
            first.send_signal(signal.SIGSTOP)
            with follower(stage):
                change(stage, chance)
                await until(stage.is_whole, within_s=40.0)
                assert await leader(stage) not in (None, held)
                first.send_signal(signal.SIGCONT)
                for _ in range(5):
                    change(stage, chance)
                    await asyncio.sleep(0.1)
                await until(stage.is_whole, within_s=40.0)
                assert first.poll() is None, "it stands for election again"


@asynccontextmanager
async def on_a_cable(server: Server, name: str) -> AsyncIterator[tuple[Cable, str]]:
    with tempfile.TemporaryDirectory(prefix="penstock-") as directory:
        cable = Cable(Path(directory), server.sockets)
        await cable.plug()
        yield cable, server.url(name, sockets=cable.directory)
        await cable.cut()


async def test_follower_whose_database_falls_silent_gives_way(server: Server, database: str) -> None:
    """The line stays open and says nothing: those who wait end the silent session, and only one writes."""
    chance = random.Random(5)
    name = urlsplit(database).path.removeprefix("/")
    async with on_a_cable(server, name) as (cable, url), scene(database) as stage:
        stage.chain.mine(*(some_events(chance) for _ in range(10)))
        with follower(stage, database=url):
            await until(stage.is_whole, within_s=40.0)
            cable.muted = True
            with follower(stage):
                change(stage, chance)
                await until(stage.is_whole, within_s=40.0)
                cable.muted = False
                change(stage, chance)
                await until(stage.is_whole, within_s=40.0)


async def test_lost_line_heals(server: Server, database: str) -> None:
    chance = random.Random(6)
    name = urlsplit(database).path.removeprefix("/")
    async with on_a_cable(server, name) as (cable, url), scene(database) as stage:
        stage.chain.mine(*(some_events(chance) for _ in range(10)))
        with follower(stage, database=url) as process:
            for _ in range(3):
                await until(stage.is_whole, within_s=40.0)
                await cable.cut()
                change(stage, chance)
                await cable.plug()
            await until(stage.is_whole, within_s=40.0)
            assert process.poll() is None


async def test_postgres_that_is_killed_and_comes_back() -> None:
    chance = random.Random(8)
    async with database_room.running() as own:
        async with connected(own.postgres.url) as connection:
            await migrate.migrate(connection)
        async with scene(own.postgres.url) as stage:
            stage.chain.mine(*(some_events(chance) for _ in range(50)))
            with follower(stage) as process:
                for _ in range(2):
                    await until(stage.is_whole, within_s=40.0)
                    change(stage, chance)
                    assert own.postgres.child.process is not None
                    own.postgres.child.process.send_signal(signal.SIGKILL)
                    await own.postgres.child.process.wait()
                    change(stage, chance)
                    await own.postgres.start()
                await until(stage.is_whole, within_s=40.0)
                assert process.poll() is None


async def test_loop_that_is_cancelled_in_the_middle_leaves_whole_blocks(database: str) -> None:
    chance = random.Random(9)
    async with scene(database) as stage:
        stage.chain.mine(*(some_events(chance) for _ in range(400)))
        for _ in range(5):
            tasks = Tasks()
            tasks.start("following", stage.following(keep=64).run)
            await asyncio.sleep(chance.random() * 0.3)
            await tasks.close()
            change(stage, chance)
        tasks = Tasks()
        tasks.start("following", stage.following(keep=64).run)
        await until(stage.is_whole, within_s=40.0)
        await tasks.close()
        assert NETWORK in repr(stage.route)
