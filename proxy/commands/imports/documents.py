"""Settings files of other programs as values that know their lines, and remember which of them were read.

Whatever an importer has not read is reported as having no equal, so nothing in a file is passed over in silence.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from proxy.errors import StartError
from proxy.settings.given_files import read_text

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PERIODS_S = {"second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0, "week": 604800.0, "month": 2592000.0}
_DURATION = re.compile(r"([0-9.]+)(ns|us|µs|ms|s|m|h|d)")
_BYTE_UNITS = {"": 1, "b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}
_VARIABLE = re.compile(r"\$\{(\w+)\}|^\$(\w+)$")


class Entry:
    """A value of the file: plain data, or a table or list of entries."""

    def __init__(self, path: str, line: int, value: Any) -> None:
        self.path = path
        self.line = line
        self.value = value
        self.is_read = False

    def __repr__(self) -> str:
        return f"<Entry {self.path} in line {self.line}>"

    def get(self, *names: str) -> Entry | None:
        """The entry at this path. It counts as read if it is plain data. An entry without a value is None."""
        entry: Entry | None = self
        for name in names:
            entry = entry.value.get(name) if entry is not None and isinstance(entry.value, dict) else None
        if entry is None or entry.value is None:
            return None
        return entry if isinstance(entry.value, dict | list) else entry.read()

    def read(self) -> Entry:
        """Mark it, and all within it, as read."""
        self.is_read = True
        for each in self.children():
            each.read()
        return self

    def children(self) -> list[Entry]:
        if isinstance(self.value, dict):
            return list(self.value.values())
        return self.value if isinstance(self.value, list) else []

    def items(self) -> list[tuple[str, Entry]]:
        return list(self.value.items()) if isinstance(self.value, dict) else []

    def unread(self) -> Iterator[Entry]:
        """The entries that nothing has read, each as whole as possible."""
        if self.is_read:
            return
        children = self.children()
        if any(_has_read(each) for each in children):
            for each in children:
                yield from each.unread()
        elif self.value not in (None, "", {}, []):
            yield self

    # Plain data

    @property
    def text(self) -> str:
        return self.value if isinstance(self.value, str) else str(self.value)

    def texts(self) -> list[str]:
        self.read()
        return [each.text for each in self.children()] if isinstance(self.value, list) else [self.text]

    def number(self) -> float:
        if isinstance(self.value, bool) or not isinstance(self.value, int | float | str):
            raise self.fault("must be a number")
        try:
            return float(self.value)
        except ValueError:
            raise self.fault("must be a number") from None

    def integer(self) -> int:
        try:
            return int(self.value, 0) if isinstance(self.value, str) else int(self.number())
        except ValueError:
            raise self.fault("must be a number") from None

    def is_true(self) -> bool:
        return self.value in (True, "true", "yes", 1)

    def seconds(self) -> float:
        """A duration such as 1m30s, a period such as minute, or a number of milliseconds."""
        if isinstance(self.value, int | float):
            return float(self.value) / 1000
        if self.text in _PERIODS_S:
            return _PERIODS_S[self.text]
        parts = _DURATION.findall(self.text)
        if "".join("".join(part) for part in parts) != self.text or not parts:
            raise self.fault(f"must be a duration such as 500ms, not {self.text[:40]!r}")
        return sum(float(number) * _UNITS_S[unit] for number, unit in parts)

    def size(self) -> int:
        match = re.fullmatch(r"([0-9.]+)\s*([kmg]?b?)", self.text.lower())
        if match is None:
            raise self.fault("must be a size such as 10MB")
        return int(
            float(match[1]) * _BYTE_UNITS[match[2] if match[2].endswith("b") or not match[2] else f"{match[2]}b"]
        )

    def plain(self) -> Any:
        self.read()
        if isinstance(self.value, dict):
            return {name: each.plain() for name, each in self.value.items()}
        return [each.plain() for each in self.value] if isinstance(self.value, list) else self.value

    def fault(self, problem: str) -> StartError:
        return StartError([f"line {self.line}: {self.path}: {problem}"])


def _has_read(entry: Entry) -> bool:
    return entry.is_read or any(_has_read(each) for each in entry.children())


def load_document(path: Path, environ: Mapping[str, str]) -> Entry:
    """The file as an entry. Variables such as ${KEY} are replaced if the environment has them."""
    try:
        text = read_text(path)
    except OSError as exc:
        raise StartError([f"{path}: cannot be read: {exc.strerror}"]) from None
    except UnicodeDecodeError:
        raise StartError([f"{path}: is not text in UTF-8"]) from None
    document = _toml(text, path) if path.suffix == ".toml" else _yaml(text, path)
    _replace_variables(document, environ)
    return document


def _yaml(text: str, path: Path) -> Entry:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            raise StartError([f"{path}: the file is empty"])
        return _of_node(node, "", yaml.SafeLoader(""))
    except yaml.MarkedYAMLError as exc:
        line = exc.problem_mark.line + 1 if exc.problem_mark else 1
        raise StartError([f"{path}:{line}: not valid YAML: {exc.problem}"]) from None
    except (yaml.YAMLError, RecursionError) as exc:
        raise StartError([f"{path}: not valid YAML: {exc}"]) from None


def _of_node(node: Any, path: str, loader: Any) -> Entry:
    line = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        loader.flatten_mapping(node)
        pairs = [(str(key.value), key.start_mark.line + 1, value) for key, value in node.value]
        entries = {name: _of_node(value, f"{path}.{name}" if path else name, loader) for name, _, value in pairs}
        for name, at, _ in pairs:
            entries[name].line = at
        return Entry(path, line, entries)
    if isinstance(node, yaml.SequenceNode):
        return Entry(path, line, [_of_node(each, f"{path}[{n}]", loader) for n, each in enumerate(node.value)])
    return Entry(path, line, loader.construct_object(node))


def _toml(text: str, path: Path) -> Entry:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        line = re.search(r"line (\d+)", str(exc))
        raise StartError([f"{path}:{line[1] if line else 1}: not valid TOML: {exc}"]) from None
    return _of_data(data, "", 1, _toml_lines(text))


def _toml_lines(text: str) -> dict[str, int]:
    """The line of each table and key of a TOML file. Keys inside inline tables have the line of the table."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]", line):
            table = _toml_path(header[1])
            lines.setdefault(table, number)
        elif key := re.match(r"\s*([A-Za-z0-9_.\"'$-]+)\s*=", line):
            name = _toml_path(key[1])
            lines.setdefault(f"{table}.{name}" if table else name, number)
    return lines


def _toml_path(text: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in text.split("."))


def _of_data(value: Any, path: str, line: int, lines: Mapping[str, int]) -> Entry:
    line = lines.get(path, line)
    if isinstance(value, dict):
        within = {name: f"{path}.{name}" if path else name for name in value}
        return Entry(path, line, {name: _of_data(value[name], within[name], line, lines) for name in value})
    if isinstance(value, list):
        return Entry(path, line, [_of_data(each, f"{path}[{n}]", line, lines) for n, each in enumerate(value)])
    return Entry(path, line, value)


def _replace_variables(entry: Entry, environ: Mapping[str, str]) -> None:
    for each in entry.children():
        _replace_variables(each, environ)
    if isinstance(entry.value, str):
        entry.value = _VARIABLE.sub(lambda match: environ.get(match[1] or match[2]) or match[0], entry.value)


def unset_variable(text: str) -> str:
    """The name of a variable in the text that the environment does not have, or an empty string."""
    match = _VARIABLE.search(text)
    return (match[1] or match[2]) if match else ""
