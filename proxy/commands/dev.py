"""`dev`: the whole service on this machine, on embedded defaults."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from proxy import settings


def register(commands: Any) -> None:
    parser = commands.add_parser("dev", help="run everything on this machine: database, chain and service")
    parser.add_argument("--port", type=int, help="port of the API (default: server.port)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="where state is kept (default: .penstock)")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="worker processes (default: 1)")
    parser.add_argument("--fresh", action="store_true", help="forget all earlier state")
    parser.add_argument(
        "--upstream", action="append", default=[], metavar="CHAIN/NETWORK=URL", help="a real upstream; repeatable"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings beside the defaults")
    parser.add_argument("--ready-file", type=Path, metavar="PATH", help="written as one JSON object when all is ready")
    parser.add_argument(
        "--no-contracts",
        dest="contracts",
        action="store_false",
        help="leave the dev chain empty (and without a bundler)",
    )
    parser.add_argument("--no-bundler", dest="bundler", action="store_false", help="do not start a bundler")
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
    print("Penstock", flush=True)
    asyncio.run(DevService(options, Display()).run())
    return 0
