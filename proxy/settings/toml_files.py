"""Reads TOML files into plain data and checks them against their schemas."""

from __future__ import annotations

import re
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from proxy.errors import StartError
from proxy.settings.schemas import schema_faults


@lru_cache(maxsize=8)
def _parsed(text: str) -> dict[str, Any]:
    """Settings are loaded again with the same files, and parsing takes far longer than reading."""
    return tomllib.loads(text)


def read(path: Path) -> dict[str, Any]:
    """A new copy of the file's data."""
    try:
        # The schemas have no dates, so TOML dates become text and are checked like any other value.
        return dict(msgspec.to_builtins(_parsed(path.read_text("utf-8"))))
    except OSError as exc:
        raise StartError([f"{path}: cannot be read: {exc.strerror}"]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise StartError([f"{path}: not valid TOML: {exc}"]) from None


def line_of(text: str, name: str, index: int, key: str) -> int | None:
    """The line of a key in the nth table of a list such as [[upstreams]], or of the table itself. None if there is none."""
    table = None
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(rf"\s*\[\[\s*{re.escape(name)}\s*\]\]", line):
            if table is not None:
                return table
            table, index = (number, 0) if index == 0 else (None, index - 1)
        elif table is not None and re.match(r"\s*\[", line):
            return table
        elif table is not None and re.match(rf"\s*{re.escape(key)}\s*=", line):
            return number
    return table


def checked(schema: str, path: Path, faults: list[str]) -> dict[str, Any]:
    """Return the file's data; if it has faults, add them to `faults` and return nothing."""
    try:
        data = read(path)
    except StartError as exc:
        faults += exc.faults
        return {}
    found = [f"{path.name}: {fault}" for fault in schema_faults(schema, data)]
    if schema == "chain" and data.get("name", path.stem) != path.stem:
        found.append(f"{path.name}: name: must be {path.stem}, like the file's name")
    faults += found
    return {} if found else data
