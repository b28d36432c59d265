"""Prints rows as a table or as JSON."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from proxy.settings import environment

OutputRow = Mapping[str, Any]
# Internal columns that help no reader. JSON contains them.
HIDDEN = frozenset({"slot"})


def rows(found: Sequence[OutputRow], columns: Sequence[str], *, as_json: bool) -> None:
    if as_json:
        print(_json(list(found)))
    elif not found:
        print("none")
    else:
        _table(found, columns)


def row(found: OutputRow, *, as_json: bool, **extra: Any) -> None:
    whole = {**found, **extra}
    if as_json:
        print(_json(whole))
        return
    shown = {name: value for name, value in whole.items() if name not in HIDDEN}
    width = max(len(name) for name in shown)
    for name, value in shown.items():
        print(f"{name:<{width}}  {_cell(value)}")


def _json(data: Any) -> str:
    return orjson.dumps(data, default=str, option=orjson.OPT_INDENT_2 | orjson.OPT_UTC_Z).decode()


def _table(found: Sequence[OutputRow], columns: Sequence[str]) -> None:
    cells = [list(columns), *([_cell(item[column]) for column in columns] for item in found)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(columns))]
    for place, line in enumerate(cells):
        text = "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        print(f"\x1b[1m{text}\x1b[0m" if place == 0 and _has_colours() else text)


def _has_colours() -> bool:
    """On a terminal, unless its user wants none (no-color.org)."""
    found = environment()
    return sys.stdout.isatty() and not found.get("NO_COLOR") and found.get("TERM") != "dumb"


def _cell(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case datetime.datetime():
            return value.astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        case list():
            return ",".join(map(str, value)) or "all"
        case _:
            return str(value)
