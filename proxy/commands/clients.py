"""`clients`: write clients in Python and TypeScript that are generated from the API spec."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from proxy.settings import SCHEMAS
from proxy.web import api_spec
from proxy.web.docs.client_code import LANGUAGES, client_module


def register(commands: Any) -> None:
    parser = commands.add_parser("clients", help="write clients in Python and TypeScript for the API")
    parser.add_argument("--directory", type=Path, default=Path(), metavar="DIR", help="write to here (default: .)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    document = api_spec.load(SCHEMAS).document
    args.directory.mkdir(parents=True, exist_ok=True)
    for kind in LANGUAGES.values():
        path = args.directory / kind.file
        path.write_text(client_module(document, kind, SCHEMAS), "utf-8")
        print(path)
    return 0
