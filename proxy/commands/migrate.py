"""`migrate`: apply missing migrations to the database. Safe to run concurrently."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import asyncpg

from proxy.commands import context
from proxy.errors import StartError
from proxy.store import migrate


def register(commands: Any) -> None:
    parser = commands.add_parser("migrate", help="update the database schema to this version")
    context.add_arguments(parser)
    parser.set_defaults(run=lambda args: asyncio.run(run(args)))


async def run(args: argparse.Namespace) -> int:
    found = context.load(args)
    async with context.database(found.database.session_url) as connection:
        try:
            applied = await migrate.migrate(connection)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as exc:
            raise StartError([f"a migration failed and was rolled back: {exc}"]) from None
    print("\n".join(f"applied {name}" for name in applied) or "the database schema is up to date")
    return 0
