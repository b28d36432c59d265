"""`check`: print the effective settings with secrets masked, or every fault in them, and check that the database fits.

With `--connect` it prints a table of what can be reached instead: the database, the cache and each upstream.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from proxy import settings as settings_room
from proxy.commands import connections, output
from proxy.commands.context import CONFIG_HELP, inspect_service
from proxy.settings import Settings, Tables


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "check", help="check the configuration and the database, and print the effective settings"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help=CONFIG_HELP)
    parser.add_argument("--offline", action="store_true", help="check the configuration only")
    parser.add_argument(
        "--connect",
        action="store_true",
        help="try the database, the cache and each upstream: its chain, head, bounds and batches",
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--verbose", action="store_true", help="with --connect: print the effective settings too")
    shown.add_argument("--quiet", action="store_true", help="do not print the effective settings, only what is wrong")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    settings, tables = settings_room.load_with_tables(args.config, environ=settings_room.environment())
    code = asyncio.run(_connect(settings, tables, offline=args.offline)) if args.connect else 0
    if args.verbose or not (args.connect or args.quiet):
        _print_settings(settings)
    if not args.offline:
        asyncio.run(inspect_service(settings))
    return code


def _print_settings(settings: Settings) -> None:
    for name, value in settings_room.masked(settings):
        print(f"{name} = {value}")
    for index, upstream in enumerate(settings.upstreams):
        if not upstream.operator:
            print(f'upstreams.{index}.operator = "{upstream.operated_by}"')


async def _connect(settings: Settings, tables: Tables, *, offline: bool) -> int:
    """Print what can be reached. Returns 1 if something that the service needs cannot."""
    rows = await connections.tried(settings, tables, offline=offline)
    output.rows(rows, connections.COLUMNS, as_json=False)
    return int(not all(connections.is_useful(row) for row in rows))
