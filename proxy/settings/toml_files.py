"""Reads TOML files into plain data and checks them against their schemas."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from proxy.errors import StartError
from proxy.settings.given_files import read_text
from proxy.settings.schemas import schema_faults

# The kinds of files that have a name inside, which is that of the file.
_NAMED = ("chain", "family")
_HEADER = re.compile(r"\s*(\[\[?)\s*([^\]]+?)\s*\]")
# A quoted key, such as a route, or one of names that are joined by dots.
# A part of a name between its dots, which may be quoted.
_STEP = re.compile(r"""\"([^\"]*)\"|'([^']*)'|([^\s."']+)""")
_KEY = re.compile(r"""\s*("[^"]+"|'[^']+'|[\w\-."']+)\s*=""")


@lru_cache(maxsize=8)
def _parsed(text: str) -> dict[str, Any]:
    """Settings are loaded again with the same files, and parsing takes far longer than reading."""
    return tomllib.loads(text)


def read(path: Path) -> dict[str, Any]:
    """A new copy of the file's data."""
    try:
        # The schemas have no dates, so TOML dates become text and are checked like any other value.
        return dict(msgspec.to_builtins(_parsed(read_text(path))))
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
    wrong = [with_line(path, fault) for fault in schema_faults(schema, data)]
    if schema in _NAMED and data.get("name", path.stem) != path.stem:
        wrong.append(f"{path.name}: name: must be {path.stem}, like the file's name")
    faults += wrong
    return {} if wrong else data


def with_line(path: Path, fault: str) -> str:
    """A fault with the file and the line that it is about. `fault` begins with the name of a key and a colon."""
    line = line_of(read_text(path, replaced=True), fault.partition(": ")[0])
    return f"{path.name}: {fault}" if line is None else f"{path.name}: {fault} (line {line})"


def line_of(text: str, name: str) -> int | None:
    """The line of a key such as `upstreams.0.url`, or of the innermost table or value around it that has one."""
    lines = text.splitlines()
    keys = [(number, ".".join(key)) for number, key in _keys(lines)]
    around = [(number, key) for number, key in keys if f"{name}.".startswith(f"{key}.")]
    if not around:
        # A table of a list has a number, which the fault about the whole list has not.
        return next((number for number, key in keys if key.startswith(f"{name}.")), None)
    line, key = max(around, key=lambda each: (len(each[1]), -each[0]))
    # A member of an inline table has no key of its own: it is on this line or one of the next.
    inner = name[len(key) + 1 :].split(".") if lines[line - 1].lstrip()[:1] != "[" else []
    for step in inner:
        if step and not step.isdecimal():
            rest = range(line - 1, len(lines))
            line = next((index + 1 for index in rest if re.search(rf"\b{re.escape(step)}\b", lines[index])), line)
    return line


def _keys(lines: list[str]) -> Iterator[tuple[int, list[str]]]:
    """The keys and table headers of a file, in full, with their lines. Tables of a list are counted from 0."""
    table: list[str] = []
    counts: Counter[str] = Counter()
    for number, line in enumerate(lines, 1):
        if header := _HEADER.match(line):
            table = _steps(header[2])
            if header[1] == "[[":
                table, counts[header[2]] = [*table, str(counts[header[2]])], counts[header[2]] + 1
            yield number, table
        elif key := _KEY.match(line):
            yield number, table + _steps(key[1])


def _steps(name: str) -> list[str]:
    return ["".join(step) for step in _STEP.findall(name)]
