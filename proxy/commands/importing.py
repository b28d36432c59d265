"""`import`: turn the settings of another gateway into settings of Penstock, and list what differs and what has no equal."""

from __future__ import annotations

import argparse
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from proxy import settings
from proxy.commands import output
from proxy.commands.imports import erpc, nodecore, proxyd
from proxy.commands.imports.documents import Entry, load_document
from proxy.commands.imports.result import COLUMNS, ImportResult
from proxy.commands.init import DATABASE
from proxy.dev.seed import write_private
from proxy.errors import StartError

KINDS = {module.__name__.rpartition(".")[2]: module for module in (erpc, nodecore, proxyd)}
_HEADER = (
    "# Settings of Penstock, made by `{program} import {file}`. It contains secrets: only its owner can read it.\n"
)


def register(commands: Any) -> None:
    about = "turn the settings of eRPC, nodecore or proxyd into settings of Penstock"
    parser = commands.add_parser(
        "import",
        help=about,
        description=f"{about.capitalize()}. Prints a row for every setting: mapped, differs, or no equal.",
    )
    parser.add_argument("file", type=Path, help="erpc.yaml, nodecore.yml, or the TOML file of proxyd")
    parser.add_argument("--from", dest="kind", choices=sorted(KINDS), help="whose file it is (default: by its content)")
    parser.add_argument(
        "--network", metavar="NAME", help="the network of a proxyd file, such as CHAIN/NETWORK or its id"
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the settings to this file, which must not exist"
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.write is not None and args.write.exists():
        raise StartError([f"{args.write} exists already: move it, or name another file"])
    document = load_document(args.file, settings.environment())
    result = ImportResult(settings.shipped_tables(), settings.load_providers())
    try:
        _import(document, result, args)
    except StartError as exc:
        raise StartError([re.sub(r"^line (\d+): ", rf"{args.file}:\1: ", fault) for fault in exc.faults]) from None
    result.finish(document)
    if not result.upstreams:
        _print_rows(result, args)
        raise StartError([f"{args.file}: none of its upstreams can be used here, so nothing was written"])
    text = settings_text(args, result)
    missing = _check(text)
    _print_rows(result, args)
    for fault in () if args.json else missing:
        print(f"not on this machine: {fault}")
    if args.write is not None:
        write_private(args.write, text.encode())
    if not args.json:
        _print_summary(result, args)
    return 0


def _import(document: Entry, result: ImportResult, args: argparse.Namespace) -> None:
    kinds = [name for name, module in KINDS.items() if module.is_ours(document)]
    kind = args.kind or (kinds[0] if len(kinds) == 1 else "")
    if kind not in kinds:
        named = KINDS[kind].NAME if kind else "eRPC, nodecore or proxyd"
        raise StartError([f"line 1: this is not a settings file of {named}"])
    if args.network is not None and kind != "proxyd":
        raise StartError([f"--network is only for proxyd: a file of {KINDS[kind].NAME} names its networks"])
    match kind:
        case "erpc":
            erpc.ErpcImport(document, result).run()
        case "nodecore":
            nodecore.NodecoreImport(document, result).run()
        case _:
            proxyd.ProxydImport(document, result, _network(args, result)).run()


def _network(args: argparse.Namespace, result: ImportResult) -> Any:
    if args.network is None:
        raise StartError(["--network NAME is required: a file of proxyd does not say which network its backends serve"])
    network = result.tables.find_network(args.network)
    if network is None:
        raise StartError([f"--network: {settings.no_network(args.network, result.tables)}"])
    return network


# The file


def settings_text(args: argparse.Namespace, result: ImportResult) -> str:
    sections = {
        **result.sections,
        "database": {"url": DATABASE},
        "keys": {"pepper": secrets.token_urlsafe(36)},
        "webhooks": {"secret_key": secrets.token_urlsafe(36)},
    }
    lines = [_HEADER.format(program=args.program, file=args.file)]
    for name in sorted(sections, key=lambda name: (name.partition(".")[0], name)):
        lines += [f"[{name}]", *_pairs(sections[name]), ""]
    for name in ("upstreams", "verify", "replies"):
        for block in getattr(result, name):
            lines += [f"[[{name}]]", *_pairs(block), ""]
    if result.commands:
        lines += ["# API keys to create:", *(f"#   {command}" for command in result.commands)]
    return "\n".join(lines).rstrip() + "\n"


def _pairs(table: Mapping[str, Any]) -> Iterator[str]:
    for name, value in table.items():
        yield f"{name} = {output.toml_value(value)}"


def _check(text: str) -> list[str]:
    """Check the settings as `check --offline` does, before anything is written. Returns the files that are not there: they may
    be on the machine that will run the service."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "penstock.toml"
        write_private(path, text.encode())
        try:
            settings.load_with_tables(path, environ={})
        except StartError as exc:
            faults = [fault.replace(f"{path}:", "line ") for fault in exc.faults]
            if other := [fault for fault in faults if "No such file" not in fault]:
                raise StartError(
                    [f"the result is not valid, so nothing was written: {each}" for each in other]
                ) from None
            return faults
    return []


# What is printed


def _print_rows(result: ImportResult, args: argparse.Namespace) -> None:
    rows = [{"line": row.line, "theirs": row.theirs, "state": row.state, "ours": row.ours} for row in result.rows]
    output.rows(rows, COLUMNS, as_json=args.json)


def _print_summary(result: ImportResult, args: argparse.Namespace) -> None:
    counts = {state: sum(row.state == state for row in result.rows) for state in ("mapped", "differs", "no equal")}
    count = len(result.upstreams)
    print(f"\n{count} upstream{'s' if count != 1 else ''}; " + ", ".join(f"{n} {state}" for state, n in counts.items()))
    if result.commands:
        print("\nkeys to create, once an account exists (`accounts create`):")
        for command in result.commands:
            print(f"  {command}")
        print("without --allow-in-url, a key works in headers alone, which is safer if all its clients can send them")
    if args.write is None:
        print("\nnothing was written: --write penstock.toml writes the settings")
        return
    print(f"\nwrote {args.write}, readable only by you; set its database.url, or the variable DATABASE_URL, then:")
    print(f"  {args.program} migrate --config {args.write}")
    print(f"  {args.program} check --config {args.write} --connect")
