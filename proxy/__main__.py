"""The command line: `penstock COMMAND` once installed, `python -m proxy COMMAND` in a checkout."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from proxy import __version__
from proxy.errors import Fault, StartError

# Shows the traceback of an unexpected error.
TRACEBACK = "PENSTOCK_TRACEBACK"

# The commands, and their modules in `commands/`.
COMMANDS = {
    "dev": "dev",
    "init": "init",
    "import": "importing",
    "serve": "serve",
    "doctor": "doctor",
    "check": "check",
    "compile": "compiling",
    "migrate": "migrate",
    "backup": "backup",
    "restore": "restore",
    "accounts": "accounts",
    "keys": "keys",
    "admin": "admin",
    "audit": "audit",
    "announcements": "announcements",
    "operations": "operations",
    "explain": "explain",
    "logs": "tail",
    "capture": "capture",
    "replay": "call_replay",
    "index": "index",
    "transfers": "transfers",
    "chains": "chains",
    "upstreams": "upstreams",
    "contradictions": "contradictions",
    "cost": "cost",
    "fleet": "fleet",
    "top": "top",
    "clients": "clients",
    "completion": "completion",
    "mcp": "agents",
    "webhooks": "webhooks",
    "reseal": "reseal",
    "preload": "preload",
    "worker": "worker",
    "background": "background",
}


# The overview that `penstock` alone prints: importing every command for it would take a second.
OVERVIEW = """\
usage: {prog} COMMAND [options]

Penstock, a self-hosted blockchain access API.

Try it
  dev            run everything for development: an embedded database, a development chain and the service
  webhooks       receive, verify and forward deliveries on this machine
  clients        write clients in Python and TypeScript for the API
  mcp            serve agents by the Model Context Protocol (MCP)
Set it up
  init           write a settings file with fresh secrets
  import         turn the settings of eRPC, nodecore or proxyd into settings of Penstock
  doctor         measure an upstream from outside, and write its [[upstreams]] block
  check          check the configuration and the database, and print the effective settings
  migrate        update the database schema to this version
  serve          run the service in production with your own database and upstreams
  compile        compile the hot path to machine code, which makes calls faster
  chains         list the known networks, and add a chain of your own
Customers
  accounts       create, list, show, change and delete accounts
  keys           create, list, show, rotate, revoke and change keys
  announcements  show a notice in every dashboard, list and remove notices
Look and repair
  top            show the busiest keys, methods and upstreams, live
  logs           show requests as they happen
  explain        show what happened to a request
  capture        write the calls of clients to a file, to replay them elsewhere
  replay         send the calls of a file again, at the pace at which they arrived
  upstreams      list, try, compare, cordon and uncordon upstreams
  contradictions list and export contradicted replies of upstreams
  cost           show what calls to upstreams cost, or would cost at another provider
  fleet          list the processes of all hosts
  audit          list changes and sign-ins of accounts and operators
  operations     list user operations and their status
Data and secrets
  index          add older blocks to the index of holdings and transfers
  transfers      export the history of transfers to a file
  backup         write the whole database to a file, while the service runs
  restore        fill an empty database from a file that backup wrote
  admin          create, list and revoke operators' tokens for the dashboard
  reseal         rotate the pepper: count the API keys still on the old one, and encrypt stored secrets again
Shell
  completion     print a script that completes commands in a shell

Examples
  {prog} dev                                                 try everything on this machine
  {prog} init --upstream CHAIN/NETWORK=URL                   begin a production set-up
  {prog} check --connect                                     see whether database and upstreams answer
  {prog} accounts create --name Acme --email a@acme.example  add a customer
  {prog} explain REQUEST_ID                                  find out why a request failed

{prog} COMMAND --help describes a command. Settings come from --config FILE, else from PENSTOCK_CONFIG or ./penstock.toml.
"""
# Commands that the service starts itself. They write logs and keep their tracebacks.
INTERNAL = frozenset({"preload", "worker", "background"})
CONFIG_FILE = Path("penstock.toml")


def main(argv: Sequence[str] | None = None) -> int:
    prog = "penstock" if os.path.basename(sys.argv[0]) == "penstock" else "python -m proxy"
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(OVERVIEW.format(prog=prog), end="")
        return 0
    if words[0] not in COMMANDS and not words[0].startswith("-"):
        return _unknown(prog, words[0])
    if words[0] in INTERNAL:
        args = _parsed(prog, words)
        return int(args.run(args))
    try:
        args = _parsed(prog, words)
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except StartError as exc:
        for fault in exc.faults:
            print(f"penstock: {fault}", file=sys.stderr)
        return 2
    except Fault as exc:
        for message in exc.messages:
            print(f"penstock: {message}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, EOFError):
        return 130
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        return _on_broken_pipe()
    except OSError as exc:
        named = f"{exc.filename}: " if exc.filename else ""
        print(f"penstock: {named}{exc.strerror or exc}", file=sys.stderr)
        return 1
    except Exception as exc:
        if _variable(TRACEBACK):
            raise
        name = type(exc).__name__
        print(f"penstock: unexpected error ({name}: {exc}); set {TRACEBACK}=1 to see where", file=sys.stderr)
        return 70


class CommandParser(argparse.ArgumentParser):
    """Reports a mistyped word with the usage of its own command, and with the nearest one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        if option := re.match(r"unrecognized arguments: (--[^ =]+)", message):
            message = f"there is no option {option[1]}" + _hint(option[1], self._option_string_actions)
        elif choice := re.match(r"argument ACTION: invalid choice: '(.*)' \(choose from (.*)\)", message):
            hint = _hint(choice[1], re.findall(r"'([^']+)'", choice[2]))
            message = f"there is no action '{choice[1]}'{hint}" if hint else message
        super().error(message)


def _hint(word: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(word, known, n=1)
    return f": did you mean {near[0]}?" if near else ""


def _parsed(prog: str, words: list[str]) -> argparse.Namespace:
    parser = CommandParser(prog=prog, description="Penstock, a self-hosted blockchain access API.")
    parser.set_defaults(program=prog)
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # Only the command that runs is imported: all of them take longer than most commands run.
    if words[0] in COMMANDS:
        import_module(f"proxy.commands.{COMMANDS[words[0]]}").register(commands)
    args = parser.parse_args(words)
    if words[0] != "dev" and "config" in args and args.config is None and not getattr(args, "data", None):
        args.config = _default_config()
    return args


def _unknown(prog: str, word: str) -> int:
    shown = [name for name in COMMANDS if name not in INTERNAL]
    hint = _hint(word, shown) or f": run {prog} --help for the list"
    print(f"penstock: there is no command {word!r}{hint}", file=sys.stderr)
    return 2


def _default_config() -> Path | None:
    """The settings file of a command that names none."""
    if named := _variable("PENSTOCK_CONFIG"):
        return Path(named)
    return CONFIG_FILE if CONFIG_FILE.is_file() else None


def _variable(name: str) -> str:
    from proxy.settings import environment

    return environment().get(name, "")


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
