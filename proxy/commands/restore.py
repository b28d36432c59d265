"""`restore`: fill an empty database from a backup."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from proxy.commands import context
from proxy.commands.backup import add_file_command, chosen_database, fitting_tools
from proxy.commands.progress import ticking
from proxy.errors import StartError
from proxy.store.postgres import migrate

_TABLES = "select count(*) from pg_class where relkind in ('r', 'p') and relnamespace = 'public'::regnamespace"


def register(commands: Any) -> None:
    about = "fill an empty database from a file that backup wrote"
    add_file_command(commands, "restore", about, needs="pg_restore", run=run)


def run(args: argparse.Namespace) -> int:
    if not args.file.is_file():
        raise StartError([f"{args.file}: there is no such file"])
    settings = context.load_for_database(args)
    url, name = chosen_database(args, settings)
    tools = asyncio.run(fitting_tools(url, name))
    _refuse_newer(args.file, tools.migrations(args.file))
    asyncio.run(_refuse_filled(url, name))
    with ticking(lambda: f"restoring {args.file}"):
        tools.restore(url, args.file)
    print(f"restored {args.file}")
    if missing := asyncio.run(_pending(url, name)):
        print(f"it is from an older version: run {args.program} migrate, which applies {', '.join(missing)}")
    elif args.database is None and settings.keys.pepper == context.NO_PEPPER:
        print("set keys.pepper and webhooks.secret_key to those of the backup before you start the service")
    elif args.database is None:
        asyncio.run(context.inspect_main(settings))
    return 0


def _refuse_newer(file: Path, recorded: list[str]) -> None:
    known = {path.stem for path in migrate.files()}
    if newer := [name for name in recorded if name not in known]:
        raise StartError(
            [f"{file}: is from a newer version, with the migrations {', '.join(newer)}: restore it with that version"]
        )


async def _refuse_filled(url: str, name: str) -> None:
    async with context.database(url, name) as connection:
        if await connection.fetchval(_TABLES):
            raise StartError([f"{name}: the database is not empty: create a new one, and restore into that"])


async def _pending(url: str, name: str) -> list[str]:
    async with context.database(url, name) as connection:
        return await migrate.pending(connection)
