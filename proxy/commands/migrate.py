"""`migrate`: apply missing migrations to each database. Safe to run concurrently. `--finish` takes the step after an update."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import asyncpg

from proxy.commands import context
from proxy.errors import StartError
from proxy.settings import MAIN_URL
from proxy.store import migrate
from proxy.store.pool import DatabaseConnection


def register(commands: Any) -> None:
    parser = commands.add_parser("migrate", help="update the database schema to this version")
    context.add_arguments(parser)
    parser.add_argument(
        "--finish",
        action="store_true",
        help="after an update, once no process of the version before runs: take the step that it does not survive",
    )
    parser.set_defaults(run=lambda args: asyncio.run(run(args)))


async def run(args: argparse.Namespace) -> int:
    for name, url in context.load(args).session_urls.items():
        where = "" if name == MAIN_URL else f"{name}: "
        async with context.database(url, name) as connection:
            try:
                lines = await (_finish if args.finish else _migrate)(connection)
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as exc:
                raise StartError([f"{name}: a migration failed and was rolled back: {exc}"]) from None
        print("\n".join(where + each for each in lines))
    return 0


async def _migrate(connection: DatabaseConnection) -> list[str]:
    lines = [f"applied {each}" for each in await migrate.migrate(connection)] or ["the database schema is up to date"]
    if await migrate.needs_finish(connection):
        lines.append("when no process of the version before runs any more: run it again with --finish")
    return lines


async def _finish(connection: DatabaseConnection) -> list[str]:
    is_done = await migrate.finish(connection)
    return ["events and deliveries are in tables by day now" if is_done else "there is nothing to finish"]
