"""`check`: the effective settings, secrets masked, and every fault at once."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from proxy import settings
from proxy.errors import StartError
from proxy.settings import Settings, Tables


def register(commands: Any) -> None:
    parser = commands.add_parser("check", help="print the effective settings and every fault in them")
    parser.add_argument("--config", type=Path, metavar="FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    found, _ = loaded(args.config)
    for name, value in settings.masked(found):
        print(f"{name} = {value}")
    return 0


def loaded(config: Path | None) -> tuple[Settings, Tables]:
    """Settings and tables, or one StartError with the faults of both."""
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
