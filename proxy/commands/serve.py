"""`serve`: the production service: workers on one port until SIGTERM; SIGHUP reloads."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from pathlib import Path
from typing import Any

import asyncpg

from proxy import telemetry
from proxy.commands.check import loaded
from proxy.errors import StartError
from proxy.store import migrate
from proxy.supervisor import Supervisor

log = logging.getLogger("penstock.serve")


def register(commands: Any) -> None:
    parser = commands.add_parser("serve", help="run the service on a configured database and upstreams")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings beside the defaults and the environment")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    settings, _ = loaded(args.config)
    listener = telemetry.start_logging(settings.log.level)
    try:
        asyncio.run(_serve(args.config, Supervisor(settings)))
    finally:
        listener.stop()
    return 0


async def _serve(config: Path | None, supervisor: Supervisor) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await _check_schema(supervisor.settings.database.url)
    await supervisor.start()
    loop.add_signal_handler(signal.SIGHUP, _reload, config, supervisor)
    log.info(
        "serving", extra={"port": supervisor.port, "metrics_port": supervisor.metrics_port, "workers": supervisor.count}
    )
    await stop.wait()
    log.info("draining")
    await supervisor.stop()


def _reload(config: Path | None, supervisor: Supervisor) -> None:
    try:
        settings, _ = loaded(config)
    except StartError as exc:
        log.error("reload refused: the old settings stay", extra={"faults": exc.faults})
        return
    log.info("reloading")
    supervisor.reload(settings)


async def _check_schema(url: str) -> None:
    """Refuse to serve on a schema that is behind: `migrate` is a step of its own, taken before."""
    try:
        connection = await asyncpg.connect(url, timeout=10)
    except (OSError, asyncpg.PostgresError, TimeoutError) as exc:
        raise StartError([f"database.url: cannot connect: {type(exc).__name__}"]) from None
    try:
        if missing := await migrate.pending(connection):
            raise StartError([f"the database lacks the migrations {', '.join(missing)}: run `python -m proxy migrate`"])
    finally:
        await connection.close()
