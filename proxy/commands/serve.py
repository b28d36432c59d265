"""`serve`: the production service: workers on one port until SIGTERM; SIGHUP reloads."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy.commands import context
from proxy.commands.check import loaded
from proxy.errors import StartError
from proxy.tasks import ROLES, unless_stopped

if TYPE_CHECKING:
    from proxy.processes.supervisor import Supervisor

log = logging.getLogger("penstock.serve")


def register(commands: Any) -> None:
    parser = commands.add_parser("serve", help="run the service on a configured database and upstreams")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings beside the defaults and the environment")
    parser.add_argument("--role", choices=ROLES, default="all", help="what runs here (default: all)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    # Here, so that the other commands do not wait for what they do not need.
    from proxy import telemetry
    from proxy.processes.supervisor import Supervisor

    settings, _ = loaded(args.config)
    listener = telemetry.start_logging(settings.log.level)
    try:
        asyncio.run(_serve(args.config, Supervisor(settings, role=args.role)))
    finally:
        listener.stop()
    return 0


async def _serve(config: Path | None, supervisor: Supervisor) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, _reload, config, supervisor)
    try:
        await unless_stopped(stop, _start(supervisor))
        await stop.wait()
        log.info("draining")
    finally:
        await supervisor.stop()
        # The loop takes its handlers along when it closes: a second signal would then kill a service that stopped well.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))


async def _start(supervisor: Supervisor) -> None:
    await context.check_schema(supervisor.settings.database.url)
    await supervisor.start()
    log.info(
        "serving", extra={"port": supervisor.port, "metrics_port": supervisor.metrics_port, "workers": supervisor.count}
    )


def _reload(config: Path | None, supervisor: Supervisor) -> None:
    try:
        settings, _ = loaded(config)
    except StartError as exc:
        log.error("reload refused: the old settings stay", extra={"faults": exc.faults})
        return
    log.info("reloading")
    supervisor.reload(settings)
