"""`worker`: run one worker process. Internal: only the supervisor starts it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def register(commands: Any) -> None:
    parser = commands.add_parser("worker")
    parser.add_argument("--listen-fds", type=int, nargs="+", required=True, help="the listening sockets of all workers")
    parser.add_argument("--place", type=int, default=0, help="the index of this worker's own socket among them")
    parser.add_argument("--buckets-fd", type=int, required=True)
    parser.add_argument("--memory-fd", type=int, required=True, help="the memory that all processes of the host share")
    parser.add_argument("--alone", action="store_true", help="the only worker: use the buckets without locks")
    parser.add_argument("--copies", type=Path, help="the directory for copies of what was read from Postgres")
    parser.add_argument(
        "--predecessor", type=int, default=0, help="the process id of the worker that this one replaces"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from proxy.processes import worker
    from proxy.processes.listening_sockets import ListeningSockets
    from proxy.store.postgres.local_copy import CopyDirectory

    copies = CopyDirectory(args.copies, args.predecessor) if args.copies else None
    sockets = ListeningSockets(args.listen_fds, args.place)
    shared = worker.SharedFiles(args.buckets_fd, args.memory_fd)
    return worker.main(sockets, shared, alone=args.alone, copies=copies)
