"""`serve`: run the production service. SIGTERM drains and stops it, SIGHUP reloads the settings."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy import compiled
from proxy.commands import context
from proxy.errors import StartError
from proxy.settings import Settings, environment, load_with_tables
from proxy.tasks import ROLES, Tasks, unless_stopped

if TYPE_CHECKING:
    from proxy.processes.supervisor import Supervisor

log = logging.getLogger("penstock.serve")


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="run the service in production with your own database and upstreams",
        description="Run the service in production. SIGTERM drains and stops it, SIGHUP reloads the settings.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help=context.CONFIG_HELP)
    parser.add_argument(
        "--role",
        choices=ROLES,
        default="all",
        help="run only the API (gateway), the block indexer (follower) or webhook delivery (deliverer); default: all",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    # Imported here, so that other commands start faster.
    from proxy import telemetry
    from proxy.processes.supervisor import Supervisor

    settings, _ = load_with_tables(args.config, environ=environment())
    listener = telemetry.start_logging(settings.log.level)
    try:
        wanted = settings.server.max_connections
        settings = _within_file_limit(settings)
        asyncio.run(_serve(args.config, Supervisor(settings, role=args.role), wanted))
    finally:
        listener.stop()
    return 0


def _within_file_limit(settings: Settings) -> Settings:
    from proxy.processes import file_limit

    return file_limit.fitted(settings, file_limit.raise_limit())


def _warn_if_lowered(wanted: int, settings: Settings) -> None:
    from proxy.processes import file_limit

    most = settings.server.max_connections
    if most < wanted:
        needed = file_limit.reserved_files(settings) + wanted
        log.warning(
            "server.max_connections lowered to fit the limit on open files",
            extra={"files": needed - wanted + most, "needed_files": needed, "wanted": wanted, "max_connections": most},
        )


async def _serve(config: Path | None, supervisor: Supervisor, wanted: int) -> None:
    """`wanted`: `server.max_connections` before it was lowered."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    hangup = asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, hangup.set)
    compiling = Tasks()
    try:
        await unless_stopped(stop, _start(supervisor, wanted))
        compiling.start("compiler", lambda: _compile(supervisor))
        await unless_stopped(stop, _reload_on(hangup, config, supervisor))
        log.info("draining")
    finally:
        await compiling.close()
        await supervisor.stop()
        # Closing the loop removes its signal handlers: without this, a second signal would kill a service that stops cleanly.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))


async def _start(supervisor: Supervisor, wanted: int) -> None:
    await context.check_service(supervisor.settings)
    _warn_if_lowered(wanted, supervisor.settings)
    await supervisor.start()
    about = {"port": supervisor.port, "metrics_port": supervisor.metrics_port, "workers": supervisor.count}
    log.info("serving", extra={**about, "compiled": compiled.in_use()})


async def _compile(supervisor: Supervisor) -> None:
    """Replace the processes by compiled ones once the hot path is compiled."""
    from proxy.processes.background_compiler import compile_once

    if await compile_once():
        supervisor.reload(supervisor.settings)


async def _reload_on(hangup: asyncio.Event, config: Path | None, supervisor: Supervisor) -> None:
    while True:
        await hangup.wait()
        hangup.clear()
        await _reload(config, supervisor)


async def _reload(config: Path | None, supervisor: Supervisor) -> None:
    """Replace the settings, unless they are faulty or do not fit the database."""
    try:
        settings, _ = load_with_tables(config, environ=environment())
        wanted = settings.server.max_connections
        settings = _within_file_limit(settings)
        await context.check_service(settings)
        _warn_if_lowered(wanted, settings)
        log.info("reloading")
        supervisor.reload(settings)
    except StartError as exc:
        log.error("reload refused: keeping the old settings", extra={"faults": exc.faults})
