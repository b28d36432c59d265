"""Rows that cannot be stored are set aside; the others are written."""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg
import pytest
from prometheus_client import REGISTRY

from proxy.errors import BadValue, InvalidRequest, Unavailable
from proxy.store.postgres.bad_rows import BadRows, storable
from proxy.store.postgres.pool import Pool


class Table:
    """A table of texts that are at most 10 characters long."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.statements = 0

    async def create(self) -> None:
        async with self.pool.connection() as connection:
            await connection.execute("create table texts (text varchar(10) primary key)")

    async def write(self, rows: Sequence[str]) -> None:
        self.statements += 1
        async with self.pool.connection() as connection:
            await connection.execute("insert into texts select unnest($1::text[])", rows)

    async def read(self) -> list[str]:
        async with self.pool.connection() as connection:
            return [row["text"] for row in await connection.fetch('select text from texts order by text collate "C"')]


@pytest.fixture
async def table(pool: Pool) -> Table:
    table = Table(pool)
    await table.create()
    return table


def counted() -> float:
    return REGISTRY.get_sample_value("penstock_rows_set_aside_total", {"kind": "event"}) or 0.0


async def test_bad_rows_are_found_by_halving(table: Table, caplog: pytest.LogCaptureFixture) -> None:
    rows = [f"{number:04}" for number in range(1000)]
    bad = ["with \0", "lone \ud800", "longer than ten"]
    mixed = [*rows[:10], bad[0], *rows[10:500], bad[1], *rows[500:], bad[2]]
    before = counted()
    assert await BadRows("event").write(mixed, table.write) == bad
    assert await table.read() == rows
    assert counted() - before == len(bad)
    assert table.statements < 2 * len(bad) * 11
    assert len(caplog.records) == 1
    assert not any(text in caplog.text for text in bad)


@pytest.mark.parametrize("rows", [[], ["one"], ["one", "two"]])
async def test_good_rows_are_written_by_one_statement(table: Table, rows: list[str]) -> None:
    assert await BadRows("event").write(rows, table.write) == []
    assert (await table.read(), table.statements) == (rows, len(rows) > 0)


async def test_error_of_the_database_is_not_blamed_on_a_row(pool: Pool) -> None:
    async def away(rows: Sequence[str]) -> None:
        raise Unavailable("away")

    with pytest.raises(Unavailable):
        await BadRows("event").write(["a", "b"], away)
    with pytest.raises(asyncpg.UndefinedTableError):  # No table was created.
        await BadRows("event").write(["a", "b"], Table(pool).write)


async def test_single_row_is_skipped_only_if_it_is_bad() -> None:
    async def fail(exc: Exception) -> None:
        raise exc

    bad = BadRows("event")
    for exc in (KeyError("a"), TypeError(), BadValue("b"), ValueError(), asyncpg.ForeignKeyViolationError()):
        assert await bad.attempt(fail(exc)) is False
    for other in (Unavailable("a"), InvalidRequest("b"), TimeoutError(), asyncpg.DiskFullError()):
        with pytest.raises(type(other)):
            await bad.attempt(fail(other))
    assert "5 set aside" in repr(bad)


async def test_value_of_a_request_that_cannot_be_stored_is_the_fault_of_the_client(table: Table) -> None:
    for text in ("\0", "longer than ten"):
        with pytest.raises(BadValue) as caught:
            await table.write([text])
        assert caught.value.status == 400


def test_text_is_made_storable_visibly() -> None:
    assert storable("plain é \N{GRINNING FACE}") == "plain é \N{GRINNING FACE}"
    assert storable("\0a\ud800\udfff") == "\N{REPLACEMENT CHARACTER}a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"
