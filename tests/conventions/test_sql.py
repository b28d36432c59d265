"""Every query prepares, schema.sql equals the migrated database, and migrations are safe to run under traffic."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import asyncpg
import pytest

from proxy.settings import SCHEMAS
from proxy.store.postgres import migrate, sql
from tests.database import MIGRATED, Server, connected

REVIEWED = SCHEMAS / "sql" / "schema.sql"
FILES = sorted(sql.QUERIES.glob("*.sql"))
QUERIES = {f"{path.stem}.{name}": text for path in FILES for name, text in sql.parse(path.read_text("utf-8")).items()}

# Statements that a process of the previous version may not survive: they remove, rename or retype something that it uses, or
# demand a value that it does not write.
UNSAFE = re.compile(
    r"\bdrop\b|\brename\b|\btruncate\b|\balter\s+(column\s+)?\w+\s+(set\s+data\s+)?type\b|\bset\s+not\s+null\b"
    r"|\badd\s+(column\s+)?(?!constraint\b)\w+\s(?![^;,]*\bdefault\b)[^;,]*\bnot\s+null\b",
    re.IGNORECASE,
)
# Bodies of functions: the migration does not run them.
BODIES = re.compile(r"(?<=\bas )\$\$.*?\$\$", re.DOTALL)
# A later release may contract: the line gives the reason and the version that stopped using it.
DECLARED = re.compile(r"^-- contract: (?=.*\b\d+\.\d+\.\d+\b).+$", re.MULTILINE)

# Queries that describe a schema, one row per object, without column order, object ids and the names that the server gives to
# `not null`, which differ between databases.
CATALOG = {
    "relations": """
        select relname, relkind::text, relpersistence::text, relrowsecurity, reloptions
        from pg_class where relnamespace = 'public'::regnamespace""",
    "columns": """
        select c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity::text,
            a.attgenerated::text, a.attcollation::regcollation::text, pg_get_expr(d.adbin, d.adrelid)
        from pg_attribute a join pg_class c on c.oid = a.attrelid
        left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
        where c.relnamespace = 'public'::regnamespace and c.relkind in ('r', 'p', 'v', 'm')
            and a.attnum > 0 and not a.attisdropped""",
    "constraints": """
        select conrelid::regclass::text, nullif(conname, case contype when 'n' then conname end), contype::text,
            pg_get_constraintdef(oid), convalidated
        from pg_constraint where connamespace = 'public'::regnamespace""",
    "indexes": "select indexname, indexdef from pg_indexes where schemaname = 'public'",
    "functions": "select proname, pg_get_functiondef(oid) from pg_proc where pronamespace = 'public'::regnamespace",
    "triggers": """
        select tgname, pg_get_triggerdef(t.oid), tgenabled::text
        from pg_trigger t where not tgisinternal""",
    "sequences": """
        select sequencename, data_type::text, start_value, min_value, max_value, increment_by, cycle, cache_size
        from pg_sequences where schemaname = 'public'""",
    "types": """
        select t.typname, t.typtype::text,
            array(select enumlabel::text from pg_enum where enumtypid = t.oid order by enumsortorder)
        from pg_type t where t.typnamespace = 'public'::regnamespace and t.typtype in ('e', 'd', 'r')""",
    "views": "select viewname, definition from pg_views where schemaname = 'public'",
    "policies": "select tablename, policyname, qual, with_check from pg_policies where schemaname = 'public'",
    "extensions": "select extname from pg_extension",
    "schemas": "select nspname from pg_namespace where nspname !~ '^pg_'",
}
# Partitions have the columns of their table.
TABLES = """
    select array_agg(oid::regclass::text) from pg_class
    where relnamespace = 'public'::regnamespace and relkind in ('r', 'p') and not relispartition"""


Catalog = dict[str, list[tuple[object, ...]]]


async def catalog(url: str) -> Catalog:
    async with connected(url) as connection:
        return {
            part: sorted((tuple(row) for row in await connection.fetch(query)), key=repr)
            for part, query in CATALOG.items()
        }


@pytest.fixture
async def reviewed(empty_database: str) -> Catalog:
    """The catalog of a database created from schema.sql alone."""
    async with connected(empty_database) as connection:
        await connection.execute(REVIEWED.read_text("utf-8"))
    return await catalog(empty_database)


async def test_reviewed_schema_equals_all_migrations_applied(reviewed: Catalog, database: str) -> None:
    migrated = await catalog(database)
    for part in CATALOG:
        assert reviewed[part] == migrated[part], part


async def test_catalog_comparison_detects_differences(reviewed: Catalog, database: str) -> None:
    """A changed column, check, default, index, sequence, trigger or function shows up."""
    async with connected(database) as connection:
        await connection.execute("""
            alter table keys alter column hint drop not null, alter column scopes drop default, add extra text;
            alter table accounts drop constraint accounts_requests_per_day_check;
            drop index keys_of_account;
            alter sequence key_slots increment 2;
            drop trigger keys_notice on keys;
            alter function stamp_change() security definer;
        """)
    changed = await catalog(database)
    differing = {part for part in CATALOG if reviewed[part] != changed[part]}
    assert differing == {"relations", "columns", "constraints", "indexes", "functions", "triggers", "sequences"}


@pytest.fixture(scope="module")
async def migrated(server: Server) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """A shared connection for tests that change nothing."""
    name = await server.create(MIGRATED)
    async with connected(server.url(name)) as connection:
        yield connection
    await server.drop(name)


async def returned_columns(connection: asyncpg.Connection[asyncpg.Record]) -> dict[str, list[str]]:
    statements = {name: await connection.prepare(text) for name, text in QUERIES.items()}
    return {name: [column.name for column in statement.get_attributes()] for name, statement in statements.items()}


@pytest.mark.parametrize("name", QUERIES)
async def test_query_prepares_on_a_migrated_database(migrated: asyncpg.Connection[asyncpg.Record], name: str) -> None:
    statement = await migrated.prepare(QUERIES[name])
    numbers = {int(number) for number in re.findall(r"\$(\d+)", QUERIES[name])}
    assert numbers == set(range(1, len(statement.get_parameters()) + 1))


async def test_query_returns_the_same_columns_after_an_update_has_added_some(database: str) -> None:
    """A statement that was prepared before a migration, and returns all columns of a table, fails after it inside a
    transaction."""
    async with connected(database) as connection:
        before = await returned_columns(connection)
        for table in await connection.fetchval(TABLES):
            await connection.execute(f"alter table {table} add column added_by_an_update text")
        after = await returned_columns(connection)
    assert not [name for name in QUERIES if before[name] != after[name]], "name the columns instead of `*`"


def test_every_query_file_is_loaded_by_its_name() -> None:
    loaded = {name for name, value in vars(sql).items() if isinstance(value, SimpleNamespace)}
    assert loaded == {path.stem for path in FILES}


def test_every_query_is_used() -> None:
    code = "\n".join(path.read_text("utf-8") for path in (sql.QUERIES.parents[2] / "proxy").rglob("*.py"))
    assert not [name for name in QUERIES if f"sql.{name}" not in code]


def test_no_sql_is_built_by_formatting() -> None:
    """Values are parameters: no braces or percent placeholders, and no second statement."""
    for name, text in QUERIES.items():
        assert not re.search(r"\{[a-z_]+\}|%s|%\(", text), name
        assert ";" not in re.sub(r"--.*", "", text), name


@pytest.mark.parametrize("path", migrate.files(), ids=lambda path: path.stem)
def test_migration_starts_with_a_comment_and_has_no_transaction_statements(path: Path) -> None:
    text = path.read_text("utf-8")
    assert text.startswith("-- ")
    assert re.fullmatch(r"\d{4}_[a-z0-9_]+", path.stem)
    assert not re.search(r"^\s*(begin|commit|rollback)\s*(transaction|work)?\s*;", text, re.IGNORECASE | re.MULTILINE)


def unsafe_statements(migration: str) -> list[str]:
    """Return the statements that could break a process of the previous version, unless the file declares a contraction."""
    if DECLARED.search(migration):
        return []
    statements = BODIES.sub("", re.sub(r"--.*", "", migration))
    return [match[0] for match in UNSAFE.finditer(statements)]


def test_every_migration_after_the_first_is_safe_while_the_previous_version_serves() -> None:
    found = {path.name: unsafe_statements(path.read_text("utf-8")) for path in migrate.files()[1:]}
    assert not {name: statements for name, statements in found.items() if statements}


@pytest.mark.parametrize(
    "statement",
    [
        "drop table keys",
        "DROP FUNCTION gas_move(text)",
        "alter table keys drop column hint",
        "alter table keys\n    drop constraint keys_mode_check",
        "alter table keys rename to api_keys",
        "alter table keys rename column hint to tail",
        "alter table keys alter column slot type integer",
        "alter table keys alter slot set data type integer",
        "alter table keys alter column expires_at set not null",
        "alter table keys add column kind text not null",
        "alter table keys add kind text default null, add column age integer not null",
        "truncate usage_batches",
    ],
)
def test_contraction_is_refused_unless_the_file_declares_it(statement: str) -> None:
    assert unsafe_statements(f"-- A change.\n{statement};\n")
    assert unsafe_statements(f"-- A change.\n-- contract: tidy up\n{statement};\n")
    assert not unsafe_statements(f"-- A change.\n-- contract: 1.1.0 stopped using it\n{statement};\n")


@pytest.mark.parametrize(
    "statement",
    [
        "create table things (id text primary key, name text not null)",
        "alter table keys add column kind text",
        "alter table keys add column kind text not null default 'plain', add column age integer",
        "create index keys_by_kind on keys (kind)",
        "-- Does not drop a thing, nor rename it.",
        "create or replace function f(kind text) returns text language sql as $$ select kind $$",
    ],
)
def test_expansion_is_accepted(statement: str) -> None:
    assert not unsafe_statements(statement)


def test_duplicate_query_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="used twice"):
        sql.parse("-- one\nselect 1;\n-- one\nselect 2;\n")


def test_query_ends_at_the_next_name() -> None:
    text = "-- A heading, in words.\n\n-- one\n-- Its purpose.\nselect 1;\n\n-- two\nselect\n  2;\n"
    assert sql.parse(text) == {"one": "-- Its purpose.\nselect 1", "two": "select\n  2"}
    assert sql.parse("") == {}
