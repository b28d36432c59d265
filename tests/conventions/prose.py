"""The project's prose as data: every comment, docstring and Markdown paragraph with its place."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.conventions.source import ROOT

CODE = ("proxy", "bench", "tests")
CONFIG = ("*.toml", "*.cfg", "Makefile", ".editorconfig", "*.yml", "*.yaml", "*.conf", "*.sql")
SKIPPED = {".git", ".venv", "node_modules", "__pycache__", ".penstock", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`[^`]*`")
# A string or a comment, the first that begins. A character after a backslash never ends a string, nor does it in raw ones.
_STRING_OR_COMMENT = re.compile(
    r"""("{3}|'{3})(?:\\.|(?!\1).)*\1 | "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' | (?P<comment>\#[^\n]*)""",
    re.DOTALL | re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Passage:
    """One comment block, docstring or paragraph, and the line on which it begins."""

    file: str
    line: int
    text: str


def passages() -> Iterator[Passage]:
    for file in files():
        name = str(file.relative_to(ROOT))
        text = file.read_text("utf-8")
        found = (
            _of_python(text)
            if file.suffix == ".py"
            else _of_markdown(text)
            if file.suffix == ".md"
            else _of_config(text)
        )
        for line, words in found:
            yield Passage(name, line, words)


def files() -> list[Path]:
    """Python files of the three packages; Markdown and configuration files everywhere."""
    found: list[Path] = []
    for path, rooms, names in os.walk(ROOT):
        rooms[:] = {*rooms} - SKIPPED
        directory = Path(path).relative_to(ROOT)
        found += [ROOT / directory / name for name in names if _is_ours(directory / name)]
    return sorted(found)


def _is_ours(file: Path) -> bool:
    if file.suffix == ".py":
        return file.parts[0] in CODE
    return file.suffix == ".md" or any(file.match(pattern) for pattern in CONFIG)


def _of_python(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            words := ast.get_docstring(node)
        ):
            yield node.body[0].lineno, words
    yield from _joined([*comments_of(text)])


def comments_of(text: str) -> Iterator[tuple[int, int, str]]:
    """Line, column and text of every comment, as the tokenizer finds them, in an eighth of its time."""
    line, last = 1, 0
    for found in _STRING_OR_COMMENT.finditer(text):
        line += text.count("\n", last, found.start())
        last = found.start()
        if found["comment"]:
            yield line, last - text.rfind("\n", 0, last) - 1, found["comment"]


def _of_config(text: str) -> Iterator[tuple[int, str]]:
    """Whole lines of comments: a `#` or `--` after a value may be a part of it."""
    lines = [
        (number, len(line) - len(line.lstrip()), re.sub(r"^\s*(#|--)", "#", line))
        for number, line in enumerate(text.splitlines(), 1)
        if line.lstrip().startswith(("#", "-- "))
    ]
    yield from _joined(lines)


def _joined(comments: list[tuple[int, int, str]]) -> Iterator[tuple[int, str]]:
    """Comments on consecutive lines of one column are one passage."""
    block: list[str] = []
    first = last = column = -1
    for line, indent, words in comments:
        if block and not (line == last + 1 and indent == column):
            yield first, "\n".join(block)
            block = []
        if not block:
            first = line
        block.append(words.lstrip("#! "))
        last, column = line, indent
    if block:
        yield first, "\n".join(block)


def _of_markdown(text: str) -> Iterator[tuple[int, str]]:
    plain = _FENCE.sub(lambda found: "\n" * found[0].count("\n"), text)
    line = 1
    for part in re.split(r"(\n\s*\n)", plain):
        if part.strip():
            yield line, part
        line += part.count("\n")


def words_in(text: str) -> int:
    return len(re.findall(r"[^\W\d_][\w'’-]*", _INLINE.sub("", text)))


def sentences(text: str) -> list[str]:
    """The sentences of a passage. List items, headings and table cells count as sentences."""
    parts = re.split(r"(?<=[.!?])[\s*_)\"”]+|\n\s*\n|^\s*(?:[-*+]|\d+\.)\s+|^\s*#+\s+|\|", text, flags=re.MULTILINE)
    return [part.strip() for part in parts if part and part.strip()]
