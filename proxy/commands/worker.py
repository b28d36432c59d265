"""`worker`: run one worker process. Internal: only the supervisor starts it."""

from __future__ import annotations

import argparse
from typing import Any


def register(commands: Any) -> None:
    parser = commands.add_parser("worker")
    parser.add_argument("--listen-fd", type=int, required=True)
    parser.add_argument("--windows-fd", type=int, required=True)
    parser.add_argument("--alone", action="store_true", help="the only worker: use the windows without locks")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from proxy.processes import worker

    return worker.main(listen_fd=args.listen_fd, windows_fd=args.windows_fd, alone=args.alone)
