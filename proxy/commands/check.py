"""`check`: print the effective settings with secrets masked, or every fault in them, and check that the database fits."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from proxy import settings
from proxy.commands.context import CONFIG_HELP, inspect_service
from proxy.errors import StartError
from proxy.settings import Settings, Tables


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "check", help="check the configuration and the database, and print the effective settings"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help=CONFIG_HELP)
    parser.add_argument("--offline", action="store_true", help="check the configuration only")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    found, _ = loaded(args.config)
    for name, value in settings.masked(found):
        print(f"{name} = {value}")
    if not args.offline:
        asyncio.run(inspect_service(found))
    return 0


def loaded(config: Path | None) -> tuple[Settings, Tables]:
    """Load settings and tables, or raise one StartError with the faults of both."""
    faults: list[str] = []
    found, tables = None, None
    try:
        tables = settings.load_tables()
    except StartError as exc:
        faults += exc.faults
    try:
        found = settings.load(config, environ=settings.environment(), tables=tables)
    except StartError as exc:
        faults += exc.faults
    if found is None or tables is None:
        raise StartError(faults)
    return found, tables
