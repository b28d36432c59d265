"""The command line: `penstock COMMAND` once installed, `python -m proxy COMMAND` in a checkout."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from proxy import __version__
from proxy.errors import Fault, StartError

# The commands, and their modules in `commands/`.
COMMANDS = {
    "dev": "dev",
    "init": "init",
    "serve": "serve",
    "check": "check",
    "compile": "compiling",
    "migrate": "migrate",
    "backup": "backup",
    "restore": "restore",
    "accounts": "accounts",
    "keys": "keys",
    "admin": "admin",
    "announcements": "announcements",
    "operations": "operations",
    "explain": "explain",
    "logs": "tail",
    "index": "index",
    "chains": "chains",
    "upstreams": "upstreams",
    "contradictions": "contradictions",
    "fleet": "fleet",
    "top": "top",
    "completion": "completion",
    "webhooks": "webhooks",
    "reseal": "reseal",
    "preload": "preload",
    "worker": "worker",
    "background": "background",
}


def main(argv: Sequence[str] | None = None) -> int:
    prog = "penstock" if os.path.basename(sys.argv[0]) == "penstock" else "python -m proxy"
    parser = argparse.ArgumentParser(prog=prog, description="Penstock, a self-hosted blockchain access API.")
    parser.set_defaults(program=prog)
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    words = sys.argv[1:] if argv is None else argv
    # The other commands are needed only for the usage. Importing them takes longer than most commands run.
    for name in words[:1] if words and words[0] in COMMANDS else COMMANDS:
        import_module(f"proxy.commands.{COMMANDS[name]}").register(commands)
    args = parser.parse_args(words)
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


def _use_environment() -> None:
    """In a checkout, run in `.venv`, which `make run` creates, if this interpreter does not have the packages."""
    python = Path(__file__).parent.parent / ".venv" / "bin" / "python"
    if find_spec("msgspec") is None and python.exists() and Path(sys.prefix) != python.parent.parent:
        os.execv(python, [str(python), "-m", "proxy", *sys.argv[1:]])


if __name__ == "__main__":
    _use_environment()
    sys.exit(main())
