"""`dev`: run the whole service on this machine with an embedded database and chain."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from proxy import settings
from proxy.commands import upstream_option
from proxy.commands.context import CONFIG_HELP


def register(commands: Any) -> None:
    about = "run everything for development: an embedded database, a development chain and the service"
    parser = commands.add_parser("dev", help=about, description=f"{about.capitalize()}.")
    parser.add_argument("--port", type=int, help="port of the API (default: the setting server.port)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="directory for all data (default: .penstock)")
    parser.add_argument(
        "--workers", type=int, metavar="N", help="number of worker processes (default: the setting, or 1)"
    )
    parser.add_argument("--fresh", action="store_true", help="delete the data of earlier runs first")
    upstream_option.add(parser, "add an upstream for a public network")
    parser.add_argument("--config", type=Path, metavar="FILE", help=CONFIG_HELP)
    parser.add_argument(
        "--ready-file",
        type=Path,
        metavar="PATH",
        help="when ready, write URLs, keys and contracts to this file as JSON",
    )
    parser.add_argument(
        "--no-contracts",
        dest="contracts",
        action="store_false",
        help="deploy no contracts on the development chain (implies --no-bundler)",
    )
    parser.add_argument("--no-bundler", dest="bundler", action="store_false", help="do not start the bundler")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from proxy.dev.display import Display
    from proxy.dev.run import DevService, Options

    options = Options(
        data=args.data or settings.data_directory(),
        port=args.port,
        workers=args.workers,
        fresh=args.fresh,
        upstreams=args.upstream,
        config=args.config,
        ready_file=args.ready_file,
        contracts=args.contracts,
        bundler=args.bundler,
    )
    print("Starting Penstock", flush=True)
    asyncio.run(DevService(options, Display(sys.stdout)).run())
    return 0
