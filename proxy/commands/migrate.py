"""`migrate`: bring the database's schema up to this program's. Safe to run from two places at once."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import asyncpg

from proxy.commands import place
from proxy.errors import StartError
from proxy.store import migrate


def register(commands: Any) -> None:
    parser = commands.add_parser("migrate", help="bring the database's schema up to date")
    place.add_arguments(parser)
    parser.set_defaults(run=lambda args: asyncio.run(run(args)))


async def run(args: argparse.Namespace) -> int:
    found = place.load(args)
    try:
        connection = await asyncpg.connect(found.database.url, timeout=10)
    except (OSError, asyncpg.PostgresError, TimeoutError) as exc:
        raise StartError([f"database.url: cannot connect: {type(exc).__name__}"]) from None
    try:
        applied = await migrate.migrate(connection)
    finally:
        await connection.close()
    print("\n".join(f"applied {name}" for name in applied) or "nothing to do")
    return 0
