"""`init`: write a first settings file with fresh secrets. Missing answers are requested on a terminal."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Template
from typing import Any

from proxy import settings
from proxy.commands import upstream_option
from proxy.data_files import CONFIG
from proxy.dev.seed import write_private
from proxy.errors import StartError

TEMPLATE = CONFIG / "template.toml"
DATABASE = "postgresql://penstock:password@127.0.0.1/penstock"
_DIRECTORY = "[data_files]\ndirectory = {directory}\n"


def register(commands: Any) -> None:
    about = "write a settings file with fresh secrets"
    parser = commands.add_parser("init", help=about, description=f"{about.capitalize()}.")
    parser.add_argument("file", type=Path, nargs="?", default=Path("penstock.toml"), help="default: penstock.toml")
    parser.add_argument("--database", metavar="URL", help="the Postgres database, such as " + DATABASE)
    upstream_option.add(parser, "a node of a network")
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="your data files, such as chains that `chains add` wrote"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.file.exists():
        raise StartError([f"{args.file} exists already: move it, or name another file"])
    if not args.file.parent.is_dir():
        raise StartError([f"the directory {args.file.parent} does not exist: create it, or name another file"])
    asks = sys.stdin.isatty() and sys.stdout.isatty()
    database = args.database or (asks and _database()) or DATABASE
    upstreams = args.upstream or (list(_upstreams()) if asks else [])
    own = str(args.directory.resolve()) if args.directory else ""
    tables = settings.load_tables(own=own)
    checked = [upstream_option.parse(each, tables) for each in upstreams]
    blocks = [*_blocks(_DIRECTORY, [{"directory": own}] if own else []), *_upstream_blocks(checked)]
    if faults := settings.expanded({"upstreams": checked, "data_files": {"directory": own}})[1]:
        raise StartError([f"--upstream: {fault.partition(': ')[2]}" for fault in faults])
    text = settings_text(args.program, args.file, database, blocks)
    write_private(args.file, text.encode())
    print(f"wrote {args.file}, readable only by you")
    if database == DATABASE:
        print(f"its database is an example: set database.url in {args.file} to the address of yours")
    if not upstreams:
        print("it has no upstreams yet: add [[upstreams]] blocks, as described at its end")
    print(
        f"next: {args.program} migrate --config {args.file}, then {args.program} check --config {args.file} --connect"
    )
    return 0


def settings_text(program: str, file: Path, database: str, blocks: Iterable[str]) -> str:
    return Template(TEMPLATE.read_text("utf-8")).substitute(
        program=program,
        file=file,
        database=json.dumps(database),
        pepper=json.dumps(secrets.token_urlsafe(36)),
        secret_key=json.dumps(secrets.token_urlsafe(36)),
        blocks="\n".join(blocks),
    )


def _blocks(form: str, entries: Iterable[Mapping[str, str]]) -> Iterable[str]:
    return [form.format(**{name: json.dumps(value) for name, value in each.items()}) for each in entries]


def _upstream_blocks(upstreams: Iterable[Mapping[str, str]]) -> Iterable[str]:
    for each in upstreams:
        yield "\n".join(["[[upstreams]]", *(f"{name} = {json.dumps(value)}" for name, value in each.items()), ""])


def _database() -> str:
    return input(f"Postgres URL [{DATABASE}]: ").strip()


def _upstreams() -> Iterable[str]:
    """Lines from the terminal, up to an empty one."""
    print("Upstream nodes, one per line, as CHAIN/NETWORK=URL. An empty line ends the list.")
    while line := input("upstream: ").strip():
        yield line
