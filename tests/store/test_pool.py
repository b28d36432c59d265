"""Connections to Postgres: results for callers while it is up, down or silent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable

import asyncpg
import pytest

from proxy.errors import InvalidRequest, Unavailable
from proxy.store.postgres.pool import COMMAND_S, Pool
from tests import database as database_room
from tests.database import Server, pooled
from tests.service import until
from tests.store.cable import Cable


@pytest.fixture
async def line(server: Server, cable: Cable) -> AsyncIterator[Pool]:
    """A pool of two behind the cable, with a timeout long enough for a busy machine. It notices a cut cable at once."""
    url = server.url("postgres", sockets=cable.directory)
    async with pooled(url, size=2) as found:
        yield found


async def answer(pool: Pool) -> int:
    async with pool.connection() as connection:
        return int(await connection.fetchval("select 42"))


async def test_pool_answers(line: Pool) -> None:
    assert await answer(line) == 42
    assert repr(line) == "<Pool 0 busy of at most 2>"


@pytest.mark.parametrize(("kind", "value"), [("bigint", 2**70), ("text", "a\0b"), ("text", "\ud800")])
async def test_unstorable_value_is_an_invalid_request_and_keeps_the_connection(
    line: Pool, kind: str, value: object
) -> None:
    with pytest.raises(InvalidRequest, match="cannot be stored"):
        async with line.connection() as connection:
            await connection.fetchval(f"select $1::{kind}", value)
    assert await answer(line) == 42


async def test_closed_pool_is_unavailable_and_can_be_closed_twice(database: str) -> None:
    pool = Pool(database, size=1, acquire_timeout_s=1.0)
    assert repr(pool) == "<Pool closed>"
    with pytest.raises(Unavailable):
        await answer(pool)
    await pool.open()
    assert await answer(pool) == 42
    await pool.close()
    await pool.close()
    with pytest.raises(Unavailable):
        await answer(pool)


async def test_pool_opens_without_a_database_and_recovers(line: Pool, cable: Cable) -> None:
    await cable.cut()
    async with pooled(line.url, size=1) as late:
        with pytest.raises(Unavailable):
            await answer(late)
        await cable.plug()
        assert await answer(late) == 42


async def test_lost_database_is_unavailable_until_it_returns(line: Pool, cable: Cable) -> None:
    assert await answer(line) == 42
    await cable.cut()
    for _ in range(3):
        with pytest.raises(Unavailable) as caught:
            await answer(line)
        assert "postgres" not in caught.value.message.lower()
    await cable.plug()
    assert await answer(line) == 42


async def test_statement_cut_off_in_the_middle_is_unavailable(line: Pool, cable: Cable) -> None:
    async def slow() -> None:
        async with line.connection() as connection:
            await connection.execute("select pg_sleep(30)")

    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(_raised(slow()))
        await until(lambda: "1 busy" in repr(line))
        await cable.cut()
    assert isinstance(waiting.result(), Unavailable)
    await cable.plug()
    assert await answer(line) == 42


async def test_silent_database_blocks_no_caller_for_long(line: Pool, cable: Cable) -> None:
    cable.muted = True
    async with pooled(line.url, size=1, acquire_timeout_s=0.1) as hurried:
        began = time.monotonic()
        with pytest.raises(Unavailable):
            await answer(hurried)
        assert time.monotonic() - began < COMMAND_S
    cable.muted = False
    assert await answer(line) == 42


async def test_database_that_falls_silent_is_given_up_in_a_transaction(line: Pool, cable: Cable) -> None:
    """Neither the statement nor its rollback nor a cancellation gets an answer."""

    async def write() -> None:
        async with pool.connection() as connection, connection.transaction():
            cable.muted = True
            await connection.execute("select 1")

    async with pooled(line.url, size=1, request_timeout_s=0.2) as pool:
        assert await answer(pool) == 42
        async with asyncio.timeout(COMMAND_S / 2):
            assert isinstance(await _raised(write()), Unavailable)
            cable.muted = False
            assert await answer(pool) == 42


async def test_slow_statement_is_cancelled_and_keeps_the_connection(database: str) -> None:
    async with pooled(database, size=1, request_timeout_s=0.1) as pool:
        async with pool.connection() as connection:
            backend = connection.get_server_pid()
        with pytest.raises(Unavailable, match="did not answer in time"):
            async with pool.connection() as connection:
                await connection.execute("select pg_sleep(60)")
        async with pool.connection() as connection:
            assert connection.get_server_pid() == backend


async def test_longer_use_of_a_connection_is_granted(database: str) -> None:
    async with pooled(database, size=1, request_timeout_s=0.05) as pool:
        async with pool.connection(for_s=60.0) as connection:
            await connection.execute("select pg_sleep(0.3)")
        async with pool.connection(within_s=60.0) as connection:
            await connection.execute("select pg_sleep(0.3)")


@pytest.mark.parametrize("code", ["disk_full", "out_of_memory", "io_error", "58000", "serialization_failure"])
async def test_database_that_cannot_do_its_work_is_unavailable(line: Pool, code: str) -> None:
    with pytest.raises(Unavailable, match="cannot do this at the moment"):
        async with line.connection() as connection:
            await connection.execute(f"do $$ begin raise exception 'full' using errcode = '{code}'; end $$")
    assert await answer(line) == 42


@pytest.mark.parametrize("size", [1, 2, 5])
async def test_request_without_a_free_connection_fails_fast(database: str, size: int) -> None:
    async with pooled(database, size=size, acquire_timeout_s=0.05) as pool:
        held = [pool.connection(within_s=5.0) for _ in range(size)]
        for connection in held:
            await connection.__aenter__()
        assert repr(pool) == f"<Pool {size} busy of at most {size}>"
        with pytest.raises(Unavailable):
            await answer(pool)
        for connection in held:
            await connection.__aexit__(None, None, None)
        assert repr(pool) == f"<Pool 0 busy of at most {size}>"
        assert await answer(pool) == 42


async def test_background_work_may_wait_longer_for_a_connection(database: str) -> None:
    async def patient() -> int:
        async with pool.connection(within_s=10.0) as connection:
            return int(await connection.fetchval("select 42"))

    async with pooled(database, size=1, acquire_timeout_s=0.05) as pool, asyncio.TaskGroup() as group:
        async with pool.connection(within_s=5.0):
            waiting = group.create_task(patient())
            with pytest.raises(Unavailable):
                await answer(pool)
            assert not waiting.done()
        assert await waiting == 42


async def test_missing_database_is_unavailable(server: Server) -> None:
    async with pooled(server.url("nowhere"), size=1) as pool:
        with pytest.raises(Unavailable):
            await answer(pool)


async def test_invalid_statement_is_not_reported_as_unavailable(line: Pool) -> None:
    with pytest.raises(asyncpg.PostgresSyntaxError):
        async with line.connection() as connection:
            await connection.execute("selekt 1")
    assert await answer(line) == 42


async def test_terminated_backend_is_unavailable_once_and_replaced(line: Pool, server: Server) -> None:
    with pytest.raises(Unavailable):
        await _held_until_ended(line, server)
    assert await answer(line) == 42


async def test_pool_reconnects_after_a_server_restart() -> None:
    async with database_room.running() as own, pooled(own.postgres.url, size=2) as pool:
        assert await answer(pool) == 42
        process = own.postgres.child.process
        assert process is not None
        process.kill()
        await process.wait()
        # A backend may outlive its server for a moment and still answer.
        gone = await until(lambda: _raised(answer(pool)))
        assert isinstance(gone, Unavailable)
        await own.postgres.start()
        assert await answer(pool) == 42


async def test_dedicated_connection_is_outside_the_pool(line: Pool, cable: Cable) -> None:
    connection = await line.dedicated()
    assert await connection.fetchval("show application_name") == "penstock-notices"
    assert repr(line) == "<Pool 0 busy of at most 2>"
    await connection.close()
    await cable.cut()
    with pytest.raises(Unavailable):
        await line.dedicated()


async def _held_until_ended(pool: Pool, server: Server) -> None:
    async with pool.connection() as connection:
        await server.admin.execute("select pg_terminate_backend($1, 5000)", connection.get_server_pid())
        await connection.fetchval("select 1")


async def _raised(work: Awaitable[object]) -> BaseException | None:
    try:
        await work
    except Exception as exc:
        return exc
    return None
