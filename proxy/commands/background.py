"""`background`: run a background process beside the workers. Only the supervisor starts it."""

from __future__ import annotations

import argparse
from typing import Any


def register(commands: Any) -> None:
    parser = commands.add_parser("background")
    parser.add_argument("part")
    parser.add_argument("--memory-fd", type=int, required=True, help="the memory that all processes of the host share")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from proxy.compose import background

    return background.main(args.part, args.memory_fd)
