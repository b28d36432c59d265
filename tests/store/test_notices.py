"""Postgres notifications: every listener gets them, over a connection that is replaced when it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from proxy.store.postgres.notices import Notices
from proxy.store.postgres.pool import Pool
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


async def test_every_listener_of_a_channel_is_called_whenever_it_was_added(pool: Pool) -> None:
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


async def test_cut_connection_is_replaced_and_all_listeners_are_called(
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
        await asyncio.sleep(0.6)  # longer than one attempt to connect
        await say(pool, "news", "missed")
        await cable.plug()
        await until(lambda: heard == [None, None])
        await say(pool, "news", "one")
        await until(lambda: heard == [None, None, "one"])


async def test_silently_dropped_connection_is_replaced(server: Server, database: str, pool: Pool, cable: Cable) -> None:
    """The connection is not closed, but nothing arrives any more: only a check finds out."""
    heard: list[str | None] = []
    async with (
        pooled(database.replace(str(server.sockets), str(cable.directory))) as far,
        listening(far, check_every_s=0.2) as notices,
    ):
        notices.listen("news", heard.append)
        await until(lambda: heard == [None])
        cable.drop_silently()
        await until(lambda: heard == [None, None])
        await say(pool, "news", "one")
        await until(lambda: heard == [None, None, "one"])


async def test_loop_can_be_cancelled_while_connecting(pool: Pool) -> None:
    async with listening(pool):
        await asyncio.sleep(0)
