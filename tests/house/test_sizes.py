"""Files and functions are short enough to be read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.house.source import PACKAGE, ROOT

MOST_LINES_OF_A_FILE = 450
MOST_LINES_OF_A_FUNCTION = 40


def long_functions() -> Iterator[str]:
    for room in ("proxy", "bench", "fleet"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                if (node.end_lineno or 0) - node.lineno >= MOST_LINES_OF_A_FUNCTION:
                    yield f"{path.relative_to(ROOT)}: {node.name}"


def test_no_file_is_long() -> None:
    lines = {path: len(path.read_text("utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert not sorted(str(path.relative_to(ROOT)) for path, count in lines.items() if count > MOST_LINES_OF_A_FILE)


def test_no_function_is_long() -> None:
    assert not [*long_functions()]
