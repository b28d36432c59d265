"""What Postgres tells: everybody who listens hears it, from whenever on, over a connection that is replaced when it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from proxy.store.notices import Notices
from proxy.store.pool import Pool
from proxy.tasks import Tasks
from tests.database import Server, pooled
from tests.service import until
from tests.store.cable import Cable


@asynccontextmanager
async def listening(pool: Pool, *, check_every_s: float = 3600.0) -> AsyncIterator[Notices]:
    tasks, notices = Tasks(), Notices(pool, check_every_s=check_every_s)
    tasks.start("notices", notices.run)
    try:
        yield notices
    finally:
        await tasks.close()


async def say(pool: Pool, channel: str, text: str) -> None:
    async with pool.connection() as connection:
        await connection.execute("select pg_notify($1, $2)", channel, text)


async def test_all_ears_of_a_channel_hear_whenever_they_came(pool: Pool) -> None:
    first: list[str | None] = []
    second: list[str | None] = []
    other: list[str | None] = []
    async with listening(pool) as notices:
        notices.listen("news", first.append)
        await until(lambda: first == [None])
        notices.listen("news", second.append)
        notices.listen("others", other.append)
        await until(lambda: other == [None])
        await say(pool, "news", "one")
        await say(pool, "others", "two")
        await until(lambda: (first, second, other) == ([None, "one"], ["one"], [None, "two"]))


async def test_connection_that_was_cut_is_replaced_and_everybody_told(
    server: Server, database: str, pool: Pool, cable: Cable
) -> None:
    heard: list[str | None] = []
    async with (
        pooled(database.replace(str(server.sockets), str(cable.directory))) as far,
        listening(far) as notices,
    ):
        notices.listen("news", heard.append)
        await until(lambda: heard == [None])
        await cable.cut()
        await asyncio.sleep(0.6)  # longer than one try
        await say(pool, "news", "missed")
        await cable.plug()
        await until(lambda: heard == [None, None])
        await say(pool, "news", "one")
        await until(lambda: heard == [None, None, "one"])


async def test_connection_that_has_gone_deaf_is_replaced(
    server: Server, database: str, pool: Pool, cable: Cable
) -> None:
    """Nothing ends it, and nothing comes on it any more: only whoever asks finds out."""
    heard: list[str | None] = []
    async with (
        pooled(database.replace(str(server.sockets), str(cable.directory))) as far,
        listening(far, check_every_s=0.2) as notices,
    ):
        notices.listen("news", heard.append)
        await until(lambda: heard == [None])
        cable.forget()
        await until(lambda: heard == [None, None])
        await say(pool, "news", "one")
        await until(lambda: heard == [None, None, "one"])


async def test_loop_ends_in_the_middle_of_connecting(pool: Pool) -> None:
    async with listening(pool):
        await asyncio.sleep(0)
