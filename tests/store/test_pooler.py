"""A pooler in transaction mode in front of Postgres: statements go through it, LISTEN and locks past it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from proxy.core.usage import UsageSums
from proxy.store.postgres.blocks import BlockStore
from proxy.store.postgres.notices import Notices
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.usage import UsageStore
from proxy.tasks import Tasks
from tests import programs
from tests.database import Server, pooled
from tests.service import until
from tests.store import pgbouncer

pytestmark = programs.needs("pgbouncer")


@pytest.fixture(scope="module")
async def bouncer(server: Server, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Path]:
    async with pgbouncer.pooler(server, tmp_path_factory.mktemp("pgbouncer")) as sockets:
        yield sockets


@pytest.fixture
def pooled_url(bouncer: Path, database: str) -> str:
    return pgbouncer.url(bouncer, database.partition("@/")[2].partition("?")[0])


@pytest.fixture
async def line(pooled_url: str, database: str) -> AsyncIterator[Pool]:
    async with pooled(pooled_url, size=10, direct_url=database) as found:
        yield found


async def test_statements_of_many_connections_share_the_pooler(line: Pool) -> None:
    async def ask(number: int) -> int:
        async with line.connection() as connection, connection.transaction():
            await connection.execute("select set_config('penstock.number', $1, true)", str(number))
            return int(await connection.fetchval("select current_setting('penstock.number')"))

    assert await asyncio.gather(*[ask(number) for number in range(100)]) == [*range(100)]


async def test_kept_statements_would_fail_behind_a_pooler(pooled_url: str) -> None:
    """The reason for `database.direct_url`: it also switches off prepared statements."""

    async def ask(pool: Pool, number: int) -> None:
        async with pool.connection() as connection:
            await connection.fetchval(f"select $1::integer + {number % 3}", number)

    async with pooled(pooled_url, size=10) as pool:
        results = await asyncio.gather(*[ask(pool, number) for number in range(60)], return_exceptions=True)
    assert any(isinstance(result, asyncpg.PostgresError) for result in results)


async def test_usage_is_written_and_read_through_the_pooler(line: Pool) -> None:
    stores = [UsageStore(line) for _ in range(4)]
    rows = {(("acct_1", "key_1", "net/one", "m"), 1): UsageSums(requests=1)}
    await asyncio.gather(*[store.write(f"w{index}", 1, rows) for index, store in enumerate(stores)])
    async with line.connection() as connection:
        assert await connection.fetchval("select sum(requests) from usage where step = 'minute'") == 4 * 5


async def test_notifications_are_heard_past_the_pooler(line: Pool) -> None:
    heard: list[str | None] = []
    notices, tasks = Notices(line), Tasks()
    notices.listen("somewhere", heard.append)
    tasks.start("notices", notices.run)
    try:
        await until(lambda: None in heard)
        async with line.connection() as connection:
            await connection.execute("select pg_notify('somewhere', 'news')")
        await until(lambda: "news" in heard)
    finally:
        await tasks.close()


async def test_lock_of_a_follower_is_held_past_the_pooler(line: Pool) -> None:
    """Through the pooler the lock would stay with a connection that others use."""
    store = BlockStore(line)
    async with asyncio.TaskGroup() as group, store.lead("dev/devnet"):
        waiting = group.create_task(_led(store))
        async with line.connection() as connection:
            await connection.fetchval("select 1")
        assert not waiting.done()


async def _led(store: BlockStore) -> None:
    async with store.lead("dev/devnet"):
        pass
