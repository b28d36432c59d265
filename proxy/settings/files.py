"""TOML on the disk -> plain data."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from proxy.errors import StartError
from proxy.settings.schemas import schema_faults


def read(path: Path) -> dict[str, Any]:
    try:
        # TOML has dates, the schemas know none: as text they are checked like any other value.
        return dict(msgspec.to_builtins(tomllib.loads(path.read_text("utf-8"))))
    except OSError as exc:
        raise StartError([f"{path}: cannot be read: {exc.strerror}"]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise StartError([f"{path}: not valid TOML: {exc}"]) from None


def checked(schema: str, path: Path, faults: list[str]) -> dict[str, Any]:
    """The file's data; empty, and its faults added to the others, where it has any."""
    try:
        data = read(path)
    except StartError as exc:
        faults += exc.faults
        return {}
    found = [f"{path.name}: {fault}" for fault in schema_faults(schema, data)]
    if schema == "chain" and data.get("name", path.stem) != path.stem:
        found.append(f"{path.name}: name: must be {path.stem}, as the file's name is")
    faults += found
    return {} if found else data
