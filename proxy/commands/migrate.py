"""`migrate`: apply missing migrations to each database. Safe to run concurrently."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import asyncpg

from proxy.commands import context
from proxy.errors import StartError
from proxy.settings import MAIN_URL
from proxy.store.postgres import migrate


def register(commands: Any) -> None:
    parser = commands.add_parser("migrate", help="update the database schema to this version")
    context.add_arguments(parser)
    parser.set_defaults(run=lambda args: asyncio.run(run(args)))


async def run(args: argparse.Namespace) -> int:
    for name, url in context.load_for_database(args).session_urls.items():
        where = "" if name == MAIN_URL else f"{name}: "
        async with context.database(url, name) as connection:
            try:
                applied = await migrate.migrate(connection)
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as exc:
                raise StartError([f"{name}: a migration failed and was rolled back: {exc}"]) from None
        lines = [f"applied {each}" for each in applied] or ["the database schema is up to date"]
        print("\n".join(where + each for each in lines))
    return 0
