"""`preload`: import the code of the supervisor's processes and fork them. Internal: only the supervisor starts it."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from typing import Any


def register(commands: Any) -> None:
    parser = commands.add_parser("preload")
    parser.add_argument("modules", nargs="+")
    parser.add_argument("--control-fd", type=int, required=True, help="the connection to the supervisor")
    parser.add_argument("--fds", type=int, nargs="*", default=(), help="the files that processes may inherit")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from proxy.__main__ import main
    from proxy.processes.fork_server import ForkServer, preload

    preload(args.modules)
    words = ForkServer(socket.socket(fileno=args.control_fd), args.fds).run()
    if words is None:
        return 0
    code = main(words)
    sys.stderr.flush()
    # The end of the interpreter would write to all shared memory, and wait for threads that look up slow hosts.
    os._exit(code)
