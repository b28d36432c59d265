"""Reads TOML files into plain data and checks them against their schemas."""

from __future__ import annotations

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
