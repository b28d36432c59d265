"""`check`: print the effective settings with secrets masked, or every fault in them, and check that the database fits.

With `--connect` each upstream is asked for its chain and its newest block too.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

from proxy import settings
from proxy.commands.context import CONFIG_HELP, inspect_service
from proxy.compose.networks import NetworkBuilder
from proxy.core.fleet import state_of
from proxy.errors import StartError
from proxy.services.rpc.tracker import Tracker
from proxy.settings import Settings, Tables
from proxy.store.windows import SHARED_HEAD_NUMBERS
from proxy.telemetry import Tallies
from proxy.wire.write_buffer import WriteBuffer

# States of an upstream that could not take calls.
_USELESS = frozenset(("wrong_chain", "forked", "silent", "unchecked"))


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "check", help="check the configuration and the database, and print the effective settings"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help=CONFIG_HELP)
    parser.add_argument("--offline", action="store_true", help="check the configuration only")
    parser.add_argument("--connect", action="store_true", help="ask each upstream for its chain and its newest block")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    found, tables = loaded(args.config)
    for name, value in settings.masked(found):
        print(f"{name} = {value}")
    if not args.offline:
        asyncio.run(inspect_service(found))
    return asyncio.run(_connect(found, tables)) if args.connect else 0


async def _connect(found: Settings, tables: Tables) -> int:
    """Print the state of each upstream. Returns 1 if one could not take calls."""
    write_buffer = WriteBuffer(asyncio.get_running_loop())
    builder = NetworkBuilder(found, tables, write_buffer, tally=Tallies().of, shared_heads=[0] * SHARED_HEAD_NUMBERS)
    networks = builder.networks()
    trackers = [Tracker(route) for route in networks.routes.values()]
    for tracker in trackers:
        tracker.withhold()
    await asyncio.gather(*[tracker.look() for tracker in trackers])
    healths = [upstream.health for route in networks.routes.values() for upstream in route.upstreams]
    states = {health.label: state_of(health, time.monotonic()) for health in healths}
    for health in healths:
        print(f"{health.label}: {states[health.label]}, head {health.head or 'unknown'}")
    await networks.close()
    return int(not _USELESS.isdisjoint(states.values()))


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
