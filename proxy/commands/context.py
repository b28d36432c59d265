"""Settings and database connections of commands: from a file, the environment, or the running development service."""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import asyncpg
import orjson

from proxy import settings as settings_room
from proxy.compose.upstream_ids import renewed_ids
from proxy.core.action_changes import changed_members
from proxy.errors import StartError
from proxy.services.accounts.action_log import Action, ActionLog, Actor
from proxy.settings import MAIN_URL, Settings, shared_database
from proxy.store.postgres import migrate, peppers
from proxy.store.postgres.actions import ActionStore
from proxy.store.postgres.keys import KeyStore
from proxy.store.postgres.pool import COMMAND_S, DatabaseConnection, Pool
from proxy.store.postgres.secrets import vault_of
from proxy.store.postgres.sessions import SessionStore

log = logging.getLogger("penstock.database")

# Written by `dev` while it runs: its database and keys, for the other commands.
RUNNING = "running.json"
# Written beside it: the development chain's URL, accounts and contracts, for `webhooks trigger`.
CHAIN = "devchain.json"
CONNECT_S = 10.0
# Missing migrations that are named one by one. A new database lacks all of them.
MOST_NAMED = 3
ADDRESS = re.compile(r"0x[0-9a-fA-F]{40}")
# The author of changes by commands, in the log of actions and in cordons.
COMMAND_LINE = Actor("operator", "command line")
_pool_of_command: ContextVar[Pool] = ContextVar("pool_of_command")
CONFIG_HELP = "a TOML file with settings; it overrides config/default.toml, the environment overrides both"


class CannotConnect(StartError):
    """A database does not answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help=CONFIG_HELP)
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="the data directory of a running `dev` service (default: .penstock)"
    )


def address(text: str) -> str:
    """The type of an argument that is an address."""
    if not ADDRESS.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an address: use 0x and 40 hex digits")
    return text.lower()


def new_file(text: str) -> Path:
    """The type of an argument that is a file to write, for commands that write it after long work."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a directory: name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"the directory {path.parent} does not exist: create it, or name another file")
    return path


# As long as a pepper must be.
NO_PEPPER = "-" * 32


def load(args: argparse.Namespace) -> Settings:
    """Return the effective settings; without a file or DATABASE_URL, those of the running development service."""
    environ = settings_room.environment()
    if _names_a_database(args, environ):
        return settings_room.load(args.config, environ=environ)
    return settings_room.load(environ=environ, overrides=_running(args.data or settings_room.data_directory()))


def load_for_database(args: argparse.Namespace) -> Settings:
    """Like `load`, for commands that only need the addresses of databases: a host that is being set up may have no pepper yet.
    It is then NO_PEPPER."""
    environ = settings_room.environment()
    if _names_a_database(args, environ):
        return settings_room.load(args.config, environ=environ, defaults={"keys": {"pepper": NO_PEPPER}})
    return load(args)


def load_with_tables(args: argparse.Namespace) -> tuple[Settings, settings_room.Tables]:
    """Like `load`, with the data files. The networks in a file are checked too."""
    environ = settings_room.environment()
    if _names_a_database(args, environ):
        return settings_room.load_with_tables(args.config, environ=environ)
    settings = load(args)
    return settings, tables_of(settings)


def _names_a_database(args: argparse.Namespace, environ: Mapping[str, str]) -> bool:
    return args.config is not None or "DATABASE_URL" in environ or "PENSTOCK_DATABASE__URL" in environ


def _running(data: Path) -> dict[str, Any]:
    try:
        return dict(orjson.loads((data / RUNNING).read_bytes()))
    except (OSError, orjson.JSONDecodeError):
        raise StartError(
            [
                f"no database: no development service is running in {data}. Start one with `make run`, name its directory "
                "with --data, or configure a database with --config FILE or DATABASE_URL"
            ]
        ) from None


def tables_of(settings: Settings) -> settings_room.Tables:
    return settings_room.tables_for(settings)


@asynccontextmanager
async def database(url: str, name: str = MAIN_URL) -> AsyncIterator[DatabaseConnection]:
    """Open one connection. Errors include the name of the setting and not the URL, which contains a password."""
    try:
        connection = await asyncpg.connect(url, timeout=CONNECT_S)
    except (asyncpg.InterfaceError, ValueError):
        raise StartError([f"{name}: is not a valid Postgres URL"]) from None
    except (OSError, asyncpg.PostgresError) as exc:
        raise CannotConnect([f"{name}: cannot connect: {_reason(exc)}"]) from None
    try:
        yield connection
    finally:
        await connection.close()


# Reasons for which Postgres refuses a connection, and what to do. Its own words may contain the user or the database.
_REASONS: dict[type[Exception], str] = {
    asyncpg.InvalidPasswordError: "the password is wrong",
    asyncpg.InvalidAuthorizationSpecificationError: "Postgres refuses this user: check the user, the password and pg_hba.conf",
    asyncpg.InvalidCatalogNameError: "the database does not exist: create it with createdb",
    asyncpg.TooManyConnectionsError: "Postgres has no free connection: raise its max_connections",
    asyncpg.CannotConnectNowError: "Postgres is starting or stopping: try again shortly",
    socket.gaierror: "the host name is not known: check the host",
    ConnectionRefusedError: "nothing listens there: check the host and port, and that Postgres is running",
    FileNotFoundError: "there is no such socket: check the directory, and that Postgres is running",
    TimeoutError: f"no reply within {CONNECT_S:.0f} s: check the host and the firewall",
}


def _reason(exc: Exception) -> str:
    known = next((words for kind, words in _REASONS.items() if isinstance(exc, kind)), None)
    return known or f"{type(exc).__name__}: check that Postgres is running and that the URL is right"


async def check_database(settings: Settings) -> None:
    """Raise StartError if the database does not fit this version or the pepper. A new pepper is recorded."""
    async with database(settings.database.session_url) as connection:
        await _check_schema(connection)
        upstream_ids = renewed_ids(settings, tables_of(settings)) if settings.keys.previous_pepper else {}
        await peppers.admit(connection, settings.keys.pepper, settings.keys.previous_pepper, upstream_ids)


async def check_service(settings: Settings) -> None:
    """Like `check_database`; also raise StartError if the signing secrets of webhooks cannot be decrypted, or if the other
    databases do not fit. Those may be away: the service works without them."""
    await inspect_main(settings)
    await check_indexes(settings, may_be_away=True)
    await check_database(settings)


async def inspect_service(settings: Settings) -> None:
    """Like `check_service`, but change nothing, and all databases must answer."""
    await inspect_main(settings)
    await check_indexes(settings)


async def inspect_main(settings: Settings) -> None:
    async with database(settings.database.session_url) as connection:
        await _check_schema(connection)
        await peppers.check(connection, settings.keys.pepper, settings.keys.previous_pepper)
        await peppers.check_vault(connection, vault_of(settings))


async def check_indexes(settings: Settings, *, may_be_away: bool = False) -> None:
    """Raise StartError if one of [[databases]] lacks migrations, or is the main database or another of them."""
    async with AsyncExitStack() as stack:
        opened = []
        for name, url in settings.session_urls.items() if settings.databases else ():
            try:
                connection = await stack.enter_async_context(database(url, name))
            except CannotConnect as exc:
                if not may_be_away:
                    raise
                log.warning("starting without a database", extra={"reason": str(exc)})
                continue
            opened.append((name, connection))
            await _check_schema(connection, "the database" if name == MAIN_URL else f"{name}: the database")
        await _refuse_shared_databases(opened)


async def _refuse_shared_databases(opened: Iterable[tuple[str, DatabaseConnection]]) -> None:
    """Different addresses may lead to one database: it grants this lock only to the first."""
    lock = secrets.randbits(62)
    for name, connection in opened:
        if not await connection.fetchval("select pg_try_advisory_lock($1)", lock):
            raise StartError([shared_database(name)])


async def _check_schema(connection: DatabaseConnection, which: str = "the database") -> None:
    """Migrations are applied only by `migrate`."""
    if missing := await migrate.pending(connection):
        few = ", ".join(missing) if len(missing) <= MOST_NAMED else f"{missing[0]} to {missing[-1]}"
        raise StartError([f"{which} lacks the migrations {few}: run `penstock migrate`"])


def own_pool(settings: Settings, *, size: int) -> Pool:
    """A pool for a command, which waits longer than a request may."""
    return Pool.of(
        settings.database, size=size, acquire_timeout_s=5.0, request_timeout_s=COMMAND_S, application="penstock-cli"
    )


@asynccontextmanager
async def opened(args: argparse.Namespace) -> AsyncIterator[tuple[Settings, Pool]]:
    """Yield the settings and a pool for a database whose schema is up to date."""
    settings = load(args)
    await check_database(settings)
    pool = own_pool(settings, size=2)
    await pool.open()
    token = _pool_of_command.set(pool)
    try:
        yield settings, pool
    finally:
        _pool_of_command.reset(token)
        await pool.close()


async def record(
    operation: str,
    *,
    account: str | None = None,
    subject: str = "",
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> None:
    """Record a change by the running command in the log of actions. `operation`: that of the API with the same effect. `before`
    and `after`: the object that was changed, as the command prints it, without secrets."""
    done = Action(operation, subject, "", *changed_members(before, after))
    await ActionLog(ActionStore(_pool_of_command.get())).record(account, COMMAND_LINE, done)


def keys_of(settings: Settings, pool: Pool) -> KeyStore:
    plans = {name: plan.keys for name, plan in tables_of(settings).plans.items()}
    return KeyStore(pool, pepper=settings.keys.pepper, previous_pepper=settings.keys.previous_pepper, plans=plans)


@asynccontextmanager
async def key_store(args: argparse.Namespace) -> AsyncIterator[KeyStore]:
    async with opened(args) as (settings, pool):
        yield keys_of(settings, pool)


@asynccontextmanager
async def session_store(args: argparse.Namespace) -> AsyncIterator[tuple[SessionStore, Settings]]:
    async with opened(args) as (settings, pool):
        yield SessionStore(pool, pepper=settings.keys.pepper, previous_pepper=settings.keys.previous_pepper), settings


def add_action(
    actions: Any,
    name: str,
    about: str,
    act: Callable[[Any, argparse.Namespace], Awaitable[None]],
    store: Any = key_store,
) -> argparse.ArgumentParser:
    """Add a subcommand that runs `act` with the opened store."""
    parser: argparse.ArgumentParser = actions.add_parser(name, help=about, description=f"{about.capitalize()}.")
    add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=lambda args: asyncio.run(_with_store(args, act, store)))
    return parser


async def _with_store(
    args: argparse.Namespace, act: Callable[[Any, argparse.Namespace], Awaitable[None]], opened: Any
) -> int:
    async with opened(args) as store:
        await act(store, args)
    return 0
