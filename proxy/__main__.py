"""The command line: `penstock COMMAND` once installed, `python -m proxy COMMAND` in a checkout."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from proxy import __version__
from proxy.commands import (
    accounts,
    admin,
    background,
    check,
    compiling,
    dev,
    index,
    init,
    keys,
    migrate,
    operations,
    reseal,
    serve,
    webhooks,
    worker,
)
from proxy.errors import Fault, StartError

COMMANDS = (
    dev,
    init,
    serve,
    check,
    compiling,
    migrate,
    accounts,
    keys,
    admin,
    operations,
    index,
    webhooks,
    reseal,
    worker,
    background,
)


def main(argv: Sequence[str] | None = None) -> int:
    prog = "penstock" if os.path.basename(sys.argv[0]) == "penstock" else "python -m proxy"
    parser = argparse.ArgumentParser(prog=prog, description="Penstock, a self-hosted blockchain access API.")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.register(commands)
    args = parser.parse_args(argv)
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except StartError as exc:
        for fault in exc.faults:
            print(f"penstock: {fault}", file=sys.stderr)
        return 2
    except Fault as exc:
        print(f"penstock: {exc.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        return _on_broken_pipe()


def _on_broken_pipe() -> int:
    """Redirect the buffered output to /dev/null; otherwise the interpreter reports an error when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(main())
