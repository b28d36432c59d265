"""Every file is valid in each Python version that the package declares, and compiles in those that are installed."""

from __future__ import annotations

import ast
import configparser
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.conventions.source import ROOT

OLDEST = (3, 11)
NEWEST = (3, 14)
VERSIONS = [(3, minor) for minor in range(OLDEST[1], NEWEST[1] + 1)]
ROOMS = ("proxy", "bench", "tests", "deploy", "schemas", "setup.py")


def sources() -> list[Path]:
    return [path for room in ROOMS for path in (sorted((ROOT / room).rglob("*.py")) or [ROOT / room]) if path.is_file()]


FILES = [path for path in sources() if "node_modules" not in path.parts]


def test_declared_version_is_the_oldest() -> None:
    declared = configparser.ConfigParser()
    declared.read(ROOT / "setup.cfg")
    assert declared["options"]["python_requires"] == f">={OLDEST[0]}.{OLDEST[1]}"
    assert declared["mypy"]["python_version"] == f"{OLDEST[0]}.{OLDEST[1]}"
    assert re.search(rf'target-version = "py{OLDEST[0]}{OLDEST[1]}"', (ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: f"{version[0]}.{version[1]}")
def test_every_file_has_the_grammar_of_the_version(version: tuple[int, int]) -> None:
    assert len(FILES) > 600
    parse_all(min(version, sys.version_info[:2]))


@cache
def parse_all(version: tuple[int, int]) -> None:
    """Parse every file with the grammar of a version. No interpreter knows the grammar of a later one."""
    for path in FILES:
        ast.parse(path.read_bytes(), str(path), feature_version=version)


def interpreter(version: tuple[int, int]) -> str | None:
    """The interpreter of a version. A command of that name on PATH may be of pyenv, and only say that it is not selected."""
    name = f"python{version[0]}.{version[1]}"
    on_path = sys.executable if version == sys.version_info[:2] else shutil.which(name)
    of_pyenv = sorted(Path.home().glob(f".pyenv/versions/{version[0]}.{version[1]}.*/bin/{name}"))
    for found in (on_path, *map(str, of_pyenv)):
        if found is not None and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            return found
    return None


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: f"{version[0]}.{version[1]}")
def test_installed_interpreter_compiles_every_file(version: tuple[int, int]) -> None:
    """Also warnings, such as those of an invalid escape or a `return` in `finally`, are errors."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"python{version[0]}.{version[1]} is not installed")
    code = (
        "import pathlib, sys; [compile(pathlib.Path(n).read_bytes(), n, 'exec') for n in sys.stdin.read().splitlines()]"
    )
    names = "\n".join(map(str, FILES))
    subprocess.run([python, "-W", "error", "-c", code], input=names, text=True, check=True)
