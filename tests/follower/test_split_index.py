"""The index of a network in another database: nothing is lost or doubled in either, and one works without the other."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from proxy.commands import context
from proxy.compose.background import Background
from proxy.errors import StartError
from proxy.settings import load
from proxy.store.postgres.fleet import FleetStore
from proxy.store.postgres.webhooks import NewWebhook, WebhookStore
from proxy.tasks import Tasks
from tests import database as database_room
from tests.chain_upstream import ZERO, address, erc20
from tests.database import MIGRATED, Server, connected
from tests.flows.production import settings_text
from tests.follower.follower_process import FollowerProcess
from tests.follower.harness import NETWORK, FollowerHarness, follower_harness, indexed, indexed_transfers, settings_of
from tests.follower.test_failover import change, some_events
from tests.service import command_here, until
from tests.shipped_tables import TABLES

COIN, HOLDER = address(100), address(1)
ACCOUNT = "insert into accounts (id, name, email, plan) values ('acct', 'A', 'a@example.com', 'growth')"


def split(main: str, other: str, urls: list[str], **follower: Any) -> dict[str, Any]:
    """Settings with the index of the network in the other database."""
    tree = settings_of(main, urls, **follower)
    return {**tree, "databases": [{"name": "index", "url": other, "networks": [NETWORK]}]}


@dataclass
class SplitIndex:
    harness: FollowerHarness
    main: str
    other: str

    @property
    def tree(self) -> dict[str, Any]:
        return split(self.main, self.other, [self.harness.upstream.url], keep_blocks=64)

    @contextmanager
    def follower(self, *, kill_in: int = 0) -> Iterator[FollowerProcess]:
        process = FollowerProcess(self.tree, kill_in)
        try:
            yield process
        finally:
            process.kill()

    async def cursor(self, url: str) -> tuple[int, bytes] | None:
        async with connected(url) as connection:
            row = await connection.fetchrow(
                "select block, block_hash from followed_networks where network = $1 and block is not null", NETWORK
            )
        return None if row is None else (row["block"], row["block_hash"])

    async def is_followed(self, url: str) -> bool:
        tip = self.harness.chain.blocks[-1]
        return await self.cursor(url) == (tip.number, bytes.fromhex(tip.hash[2:]))

    async def is_complete(self) -> bool:
        """Whether both databases have reached the tip, and the holdings match the chain."""
        if not await self.is_followed(self.main) or not await self.is_followed(self.other):
            return False
        if await indexed_transfers(self.other) != self.harness.chain.transfers(0):
            return False
        return await indexed(self.other) == self.harness.chain.holdings(0)


@pytest.fixture
async def other(server: Server) -> AsyncIterator[str]:
    name = await server.create(MIGRATED)
    yield server.url(name)
    await server.drop(name)


@pytest.fixture
async def apart(database: str, other: str) -> AsyncIterator[SplitIndex]:
    async with follower_harness(database) as harness:
        yield SplitIndex(harness, database, other)


async def test_kills_while_the_chain_grows_and_forks_leave_a_complete_index(apart: SplitIndex) -> None:
    rng = random.Random(1)
    for kill_in in (2, 0, 3, 0):
        change(apart.harness, rng)
        with apart.follower(kill_in=kill_in) as doomed:
            await doomed.ready()
            for _ in range(3):
                change(apart.harness, rng)
                await asyncio.sleep(rng.random() * 0.2)
    with apart.follower():
        await until(apart.is_complete, within_s=40.0)
    assert not await indexed(apart.main), "the main database has no holdings"


async def test_events_are_written_once_in_the_main_database(apart: SplitIndex) -> None:
    async with connected(apart.main) as connection:
        await connection.execute(ACCOUNT)
    new = NewWebhook(
        account="acct",
        network=NETWORK,
        live=False,
        url="https://hooks.example.com/",
        event_type="log",
        config={},
    )
    store = WebhookStore(apart.harness.running.pool)
    await store.create(WebhookStore.new_id(), new, addresses=[COIN], secret=b"sealed", most=100)
    sent = 0
    for _ in range(3):
        with apart.follower() as doomed:
            await doomed.ready()
            for _ in range(5):
                apart.harness.chain.mine([erc20(COIN, ZERO, HOLDER, 5)])
                sent += 1
                await asyncio.sleep(0.05)
    with apart.follower():
        await until(apart.is_complete, within_s=40.0)
    async with connected(apart.main) as connection:
        found = await connection.fetch("select id, block from events")
    numbers = sorted(row["block"] for row in found)
    assert numbers == list(range(numbers[0], numbers[0] + sent))
    async with connected(apart.other) as connection:
        assert not await connection.fetchval("select count(*) from events")


async def test_index_moved_back_is_refused_until_it_is_reset(apart: SplitIndex) -> None:
    """The main database lacks the holdings of the blocks in between."""
    rng = random.Random(2)
    harness = apart.harness
    harness.chain.mine(*(some_events(rng) for _ in range(8)))
    with apart.follower():
        await until(apart.is_complete, within_s=40.0)
    harness.chain.mine(some_events(rng))

    async def fault() -> str | None:
        async with connected(apart.main) as connection:
            return cast(
                "str | None",
                await connection.fetchval("select fault from followed_networks where network = $1", NETWORK),
            )

    tasks = Tasks()
    tasks.start("follower", harness.follower(keep=64).run)
    await until(fault, within_s=40.0)
    await tasks.close()
    assert "--forget" in str(await fault())
    tasks = Tasks()
    tasks.start("follower", harness.follower(keep=64, renews=True).run)
    await until(harness.is_complete, within_s=40.0)
    await tasks.close()


async def test_each_database_is_followed_while_the_other_is_away(database: str) -> None:
    async with database_room.running() as second, follower_harness(database) as harness:
        both = SplitIndex(harness, database, second.postgres.url)
        with both.follower() as process:
            await until(both.is_complete, within_s=40.0)
            assert second.postgres.child.process is not None
            second.postgres.child.process.send_signal(signal.SIGKILL)
            await second.postgres.child.process.wait()
            harness.chain.mine([erc20(COIN, ZERO, HOLDER, 5)])
            await until(lambda: both.is_followed(database), within_s=40.0)
            await second.postgres.start()
            await until(both.is_complete, within_s=40.0)
            assert process.code is None


async def test_holdings_are_read_where_the_index_is(apart: SplitIndex) -> None:
    apart.harness.chain.mine([erc20(COIN, ZERO, HOLDER, 5)])
    running = Background(load(environ={}, overrides=apart.tree), TABLES)
    await running.open()
    try:
        running.follow()
        await until(apart.is_complete, within_s=40.0)
        contracts = running.data.contracts
        network = apart.harness.route.network
        assert (await contracts.newest_block(network)).block == apart.harness.chain.head
        assert set(running.indexes.by_name) == {"main", "index"}
        shown = await FleetStore(running.pool, running.indexes.split_pools).followed()
        assert [row["network"] for row in shown] == [NETWORK, f"{NETWORK} index"]
        assert set(running._followed()) == {NETWORK, f"{NETWORK} index"}
    finally:
        await running.close()


def written(tmp_path: Path, main: str, other: str) -> Path:
    path = tmp_path / "settings.toml"
    block = f'[[databases]]\nname = "index"\nurl = "{other}"\nnetworks = ["ethereum/sepolia"]\n'
    path.write_text(settings_text(main, "http://127.0.0.1:1") + block)
    return path


async def test_commands_serve_each_database(tmp_path: Path, database: str, empty_database: str, other: str) -> None:
    config = str(written(tmp_path, database, empty_database))

    async def run(*words: str) -> str:
        done = await asyncio.to_thread(command_here, *words, "--config", config)
        return done.stdout + done.stderr

    assert "databases.index.url: the database lacks the migrations" in await run("check")
    assert "databases.index.url: applied 0001_initial" in await run("migrate")
    assert "databases.index.url: the database schema is up to date" in await run("migrate")
    found = await run("check", "--connect")
    assert "database index" in found
    assert "lacks" not in found
    assert empty_database.split("/")[-1].split("?")[0] in found, "the address is printed without its password"
    file = str(tmp_path / "index.dump")
    assert "there is no such database" in await run("backup", file, "--database", "nothing")
    assert "wrote" in await run("backup", file, "--database", "index")
    assert "databases.index.url: the database is not empty" in await run("restore", file, "--database", "index")


async def test_database_is_not_named_twice(tmp_path: Path, database: str) -> None:
    same = f"{database}&application_name=other"
    found = load(written(tmp_path, database, same), environ={})
    with pytest.raises(StartError, match=r"databases\.index\.url: is the address of another database"):
        await context.inspect_service(found)


async def test_service_starts_while_the_database_of_an_index_is_away(tmp_path: Path, database: str) -> None:
    found = load(written(tmp_path, database, "postgresql://127.0.0.1:1/none"), environ={})
    await context.check_service(found)
    with pytest.raises(StartError, match=r"databases\.index\.url: cannot connect"):
        await context.inspect_service(found)
