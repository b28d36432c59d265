"""A primary and its standby: reads from the standby are recent enough, and a failover leaves no connection behind."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from proxy.dev import postgres
from proxy.dev.postgres import Postgres
from proxy.store.postgres.holdings import HoldingStore
from proxy.store.postgres.pool import DatabaseAway, DatabaseConnection, Pool
from proxy.store.postgres.replica import SAMPLE_S, ReplicaReads
from proxy.tasks import Tasks
from tests import database as database_room
from tests.database import Server, connected, pooled
from tests.service import until
from tests.store.cable import Cable

NETWORK = "dev/devnet"
HOLDER = bytes(20)
HOLD = """
insert into token_holdings (network, holder, contract, amount) select number, $1, $1, 5 from followed_networks
"""


@asynccontextmanager
async def standby(primary: Postgres) -> AsyncIterator[Postgres]:
    with tempfile.TemporaryDirectory(prefix="penstock-") as directory:
        home = Path(directory)
        home.chmod(0o711)
        (sockets := home / "s").mkdir(mode=0o700)
        found = Postgres(home / "data", sockets, home / "log", standby_of=primary.url)
        try:
            await found.start()
            yield found
        finally:
            await found.child.stop()


@pytest.fixture(scope="module")
async def pair() -> AsyncIterator[tuple[Server, Postgres]]:
    """A primary with a table, and its standby."""
    async with database_room.running() as primary:
        await primary.admin.execute("create table notes (text text)")
        async with standby(primary.postgres) as second:
            yield primary, second


@dataclass
class Replicated:
    """Reads of a pool that has a replica, and the replica itself."""

    primary: Server
    pool: Pool
    reads: ReplicaReads
    replica: DatabaseConnection

    @asynccontextmanager
    async def held_back(self) -> AsyncIterator[None]:
        """The replica does not get what the primary writes meanwhile."""
        await until(lambda: self.reads.read(is_standby))
        await self.replica.execute("select pg_wal_replay_pause()")
        try:
            yield
        finally:
            await self.replica.execute("select pg_wal_replay_resume()")


@asynccontextmanager
async def replicated(pair: tuple[Server, Postgres], *, max_age_s: float) -> AsyncIterator[Replicated]:
    primary, second = pair
    replica = Pool(second.url, size=2, acquire_timeout_s=5.0, only_reads=True)
    async with pooled(primary.postgres.url) as pool, connected(second.url) as admin:
        reads, tasks = ReplicaReads(pool, replica, max_age_s=max_age_s), Tasks()
        tasks.start("replica", reads.watch)
        try:
            yield Replicated(primary, pool, reads, admin)
        finally:
            await tasks.close()
            await reads.close()


async def count(connection: DatabaseConnection) -> int:
    return int(await connection.fetchval("select count(*) from notes"))


async def is_standby(connection: DatabaseConnection) -> bool:
    return bool(await connection.fetchval("select pg_is_in_recovery()"))


async def test_reads_use_the_standby_while_it_is_current(pair: tuple[Server, Postgres]) -> None:
    async with replicated(pair, max_age_s=60.0) as found:
        assert not await found.reads.read(is_standby)  # nothing is known of the standby yet
        await until(lambda: found.reads.read(is_standby))


async def test_standby_that_stops_replaying_is_left_out(pair: tuple[Server, Postgres]) -> None:
    async with replicated(pair, max_age_s=3 * SAMPLE_S) as found:
        async with found.held_back():
            await found.primary.admin.execute("insert into notes values ('missing on the standby')")
            await until(lambda: _negated(found.reads.read(is_standby)))
        await until(lambda: found.reads.read(is_standby))


async def test_read_bound_to_a_position_is_never_older(pair: tuple[Server, Postgres]) -> None:
    async with replicated(pair, max_age_s=3600.0) as found, found.held_back():
        reads, primary = found.reads, found.primary
        before = await reads.read(count)
        await primary.admin.execute("insert into notes values ('new')")
        position = await reads.position(primary.admin)
        assert await reads.read(count) == before
        assert await reads.read(count, since=position) == before + 1


async def test_holdings_are_never_older_than_the_block_of_their_index(pair: tuple[Server, Postgres]) -> None:
    """The block comes from the primary, and the standby does not have it yet."""
    async with replicated(pair, max_age_s=3600.0) as found, found.held_back():
        store, reads, primary = HoldingStore(found.pool, found.reads), found.reads, found.primary
        await primary.admin.execute("insert into followed_networks (network) values ($1)", NETWORK)
        await primary.admin.execute(HOLD, HOLDER)
        assert await store.tokens_of(NETWORK, HOLDER, limit=5) == []
        reads.max_age_s = 0.0
        await store.as_of(NETWORK)
        reads.max_age_s = 3600.0
        assert await reads.read(is_standby)
        assert await store.tokens_of(NETWORK, HOLDER, limit=5) == [HOLDER]


async def test_pool_leaves_a_standby_when_its_address_leads_to_a_primary(
    pair: tuple[Server, Postgres], tmp_path: Path
) -> None:
    """As behind a balancer, after a failover. No write had to fail for it."""
    primary, second = pair
    cable = Cable(tmp_path, Path(second.url.partition("host=")[2]))
    await cable.plug()
    async with pooled(primary.url(postgres.USER, sockets=tmp_path), size=2) as pool:
        assert await pool.read(is_standby)
        with pytest.raises(DatabaseAway, match="not reachable"):
            await write(pool)
        cable.target = primary.sockets / cable.target.name
        await until(lambda: _negated(pool.read(is_standby)))
        await write(pool)
    await cable.cut()


async def test_promoted_standby_takes_the_writes() -> None:
    async with database_room.running() as primary:
        await primary.admin.execute("create table notes (text text)")
        async with standby(primary.postgres) as second:
            both = f"{second.url},{primary.sockets}&target_session_attrs=primary"
            async with pooled(both, size=2) as pool:
                await write(pool)
                await primary.postgres.child.stop()
                with pytest.raises(DatabaseAway):
                    await write(pool)
                await second.promote()
                await until(lambda: _succeeds(write(pool)))
                assert await pool.read(count) == 2
            # Its connection is lost with the server.
            primary.admin.terminate()


async def write(pool: Pool) -> None:
    async with pool.connection() as connection:
        await connection.execute("insert into notes values ('x')")


async def _negated(answer: Awaitable[bool]) -> bool:
    return not await answer


async def _succeeds(work: Awaitable[object]) -> bool:
    try:
        await work
    except DatabaseAway:
        return False
    return True
