"""The source as data: the modules of `proxy/` and what each of them imports, read without running any of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "proxy"


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, ast.Module]:
    """Every module by its dotted name."""
    return {name_of(path): ast.parse(path.read_bytes(), str(path)) for path in sorted(PACKAGE.rglob("*.py"))}


def ring_of(module: str) -> str:
    """The room that a module is in: `core` for proxy.core.access, `compose` for proxy.compose.app."""
    return module.split(".")[1] if "." in module else ""


@cache
def imports_of(module: str) -> tuple[str, ...]:
    """All imports of a module, including those in functions and for type checkers. Modules of ours by their full names."""
    return tuple(_imports_of(module))


def _imports_of(module: str) -> Iterator[str]:
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute, so that a reader and this test can follow them"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in modules() else str(node.module)
