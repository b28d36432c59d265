"""The command line: `python -m proxy COMMAND`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from proxy import __version__
from proxy.commands import (
    accounts,
    admin,
    background,
    check,
    dev,
    index,
    keys,
    migrate,
    operations,
    serve,
    webhooks,
    worker,
)
from proxy.errors import Fault, StartError

COMMANDS = (dev, serve, check, migrate, accounts, keys, admin, operations, index, webhooks, worker, background)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m proxy", description="Penstock, a self-hosted blockchain access API."
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.register(commands)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except StartError as exc:
        for fault in exc.faults:
            print(f"penstock: {fault}", file=sys.stderr)
        return 2
    except Fault as exc:
        print(f"penstock: {exc.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
