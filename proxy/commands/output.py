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
BOLD, PLAIN = "\x1b[1m", "\x1b[0m"
_RED, _GREEN, _YELLOW = "\x1b[31m", "\x1b[32m", "\x1b[33m"
STATE_COLUMNS = ("state", "status")
# States of parts, upstreams, keys and operations, by what a reader should do: nothing, look, or act.
COLOURS = {
    **dict.fromkeys(("up", "active", "included"), _GREEN),
    **dict.fromkeys(("cordoned", "resting", "ahead", "lagging", "unchecked", "on_trial", "paused", "sent"), _YELLOW),
    **dict.fromkeys(
        ("failed", "wrong_chain", "wrong_version", "forked", "distrusted", "open", "silent", "revoked", "disabled"),
        _RED,
    ),
}


def rows(records: Sequence[OutputRow], columns: Sequence[str], *, as_json: bool) -> None:
    if as_json:
        print(_json(list(records)))
    elif not records:
        print("none")
    else:
        _table(records, columns)


def row(record: OutputRow, *, as_json: bool, **extra: Any) -> None:
    whole = {**record, **extra}
    if as_json:
        print(_json(whole))
        return
    shown = {name: value for name, value in whole.items() if name not in HIDDEN}
    width = max(len(name) for name in shown)
    for name, value in shown.items():
        print(f"{name:<{width}}  {_cell(value)}")


def toml_value(value: Any) -> str:
    """The value in TOML, as in a settings file. Strings, numbers and arrays of JSON are TOML's too."""
    if isinstance(value, Mapping):
        pairs = [f"{toml_value(str(name))} = {toml_value(each)}" for name, each in value.items()]
        return f"{{ {', '.join(pairs)} }}"
    return orjson.dumps(value).decode()


def _json(data: Any) -> str:
    return orjson.dumps(data, default=str, option=orjson.OPT_INDENT_2 | orjson.OPT_UTC_Z).decode()


def _table(records: Sequence[OutputRow], columns: Sequence[str]) -> None:
    cells = [list(columns), *([_cell(item[column]) for column in columns] for item in records)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    has_colours = _has_colours()
    for index, line in enumerate(cells):
        padded = [f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)]
        if has_colours and index > 0:
            padded = [
                _coloured(cell) if column in STATE_COLUMNS else cell
                for column, cell in zip(columns, padded, strict=True)
            ]
        text = "  ".join(padded).rstrip()
        print(f"{BOLD}{text}{PLAIN}" if has_colours and index == 0 else text)


def _coloured(cell: str) -> str:
    colour = COLOURS.get(cell.strip())
    return cell if colour is None else f"{colour}{cell}{PLAIN}"


def _has_colours() -> bool:
    """On a terminal, unless its user wants none (no-color.org)."""
    environ = environment()
    return sys.stdout.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


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
