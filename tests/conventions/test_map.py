"""The map in proxy/README.md and the pages of docs/internals name files that are there."""

from __future__ import annotations

import re

from tests.conventions.source import PACKAGE, ROOT

TEXT = (PACKAGE / "README.md").read_text("utf-8")
# Files of every package, and the entry point.
NO_ROOMS = {"README.md", "__init__.py", "__main__.py", "__pycache__", "py.typed"}


def test_every_room_is_in_the_map() -> None:
    rooms = {f"{path.name}/" if path.is_dir() else path.name for path in PACKAGE.iterdir() if path.name not in NO_ROOMS}
    assert not rooms - set(re.findall(r"`([^`\n]+)`", TEXT.partition("## Imports")[0]))


def test_every_file_that_is_named_is_there() -> None:
    """By its path, or inside its own part by its name."""
    tests = [path for room in ("conventions", "simulation") for path in (ROOT / "tests" / room).glob("*.py")]
    paths = (*PACKAGE.rglob("*.*"), *(ROOT / "config").glob("*.toml"), *tests)
    there = [f"/{path.relative_to(ROOT)}" for path in paths]
    pages = [page.read_text("utf-8") for page in sorted((ROOT / "docs" / "internals").glob("*.md"))]
    named = re.findall(r"`([\w/]+\.(?:py|js|toml))`", "".join((TEXT, *pages)))
    assert named
    assert not [name for name in named if not any(path.endswith(f"/{name}") for path in there)]


def test_every_file_that_contributing_names_is_there() -> None:
    """Placeholders are in capitals: `config/chains/NAME.toml`."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    named = {
        name
        for name in re.findall(r"`(\w[\w.-]*/[\w./-]+)`", text)
        if not re.search(r"[A-Z]{4}", name.removesuffix("README.md"))
    }
    assert named
    assert not sorted(name for name in named if not (ROOT / name).exists())
