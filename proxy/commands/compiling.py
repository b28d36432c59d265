"""`compile`: translate the hot path to machine code, for this interpreter and these sources (proxy/compiled.py)."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from proxy import compiled, settings
from proxy.errors import StartError

# What nobody compiled anew for so long is of sources that are gone.
FORGET_S = 86_400.0
# To debug machine code nobody needs us; and what level 3 adds is time to compile.
_LEVELS = {"MYPYC_OPT_LEVEL": "2", "MYPYC_DEBUG_LEVEL": "0"}


def register(commands: Any) -> None:
    parser = commands.add_parser("compile", help="translate the hot path to machine code: calls cost less")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    place = compiled.place()
    if not _is_good(place):
        if faults := [*missing()]:
            raise StartError([f"the hot path runs from its sources: {fault}" for fault in faults])
        print("compiling the hot path: a minute ...", flush=True)
        try:
            _compile(place)
        except OSError as exc:
            raise StartError([f"the hot path runs from its sources: {exc}"]) from None
    print("the hot path is compiled")
    return 0


def missing() -> Iterator[str]:
    """What it takes to compile and is not here."""
    if find_spec("mypyc") is None or find_spec("setuptools") is None:
        yield "to compile it takes mypy and setuptools (pip install mypy setuptools)"
    compiler = str(settings.environment().get("CC") or sysconfig.get_config_var("CC")).split()[0]
    if not shutil.which(compiler):
        yield f"to compile it takes a C compiler, and {compiler} is not on PATH (on Debian: apt-get install gcc)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        yield "to compile it takes Python's headers (on Debian: apt-get install python3-dev)"


def _compile(place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as directory:
        bench, built = Path(directory, "bench"), Path(directory, "built")
        _translate(bench)
        built.mkdir(mode=0o755)
        for file in bench.rglob(f"*{compiled.SUFFIX}"):
            if (inside := file.relative_to(bench)).parts[0] != "build":
                file.rename(built / ".".join(inside.parts))
        _try(built)
        _settle(built)
        # What cannot be used makes way, and so does what is of other sources and old: all at once, as it came.
        for other in place.parent.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if other.stat().st_mtime < time.time() - FORGET_S or (other == place and not _is_good(place)):
                    other.rename(Path(directory, other.name))
        if not place.exists():  # else somebody was quicker, and has made the same
            built.rename(place)


def _translate(bench: Path) -> None:
    shutil.copytree(compiled.ROOT, bench / "proxy", ignore=shutil.ignore_patterns("__pycache__", "static"))
    sources = [f"{name.replace('.', '/')}.py" for name in compiled.MODULES]
    argv = [sys.executable, "-m", "mypyc", "--config-file=", "--ignore-missing-imports", *sources]
    _run(argv, cwd=bench, env={**settings.environment(), **_LEVELS})


def _settle(directory: Path) -> None:
    """On the disk, before it has its name: a name that outlives a crash must not stand for empty files."""
    for path in (*directory.iterdir(), directory):
        opened = os.open(path, os.O_RDONLY)
        os.fsync(opened)
        os.close(opened)


def _is_good(built: Path) -> bool:
    try:
        _try(built)
    except StartError:
        return False
    return True


def _try(built: Path) -> None:
    """What cannot be imported must not stand in the sources' way."""
    code = (
        "import importlib, pathlib, sys; from proxy import compiled; "
        "finder = compiled.Finder(pathlib.Path(sys.argv[1])); sys.meta_path.insert(0, finder); finder.load(); "
        "[importlib.import_module(name) for name in sys.argv[2:]]; "
        "sys.exit(not {*sys.argv[2:]} < finder.files.keys())"
    )
    _run(
        [sys.executable, "-c", code, str(built), *compiled.MODULES],
        cwd=compiled.ROOT.parent,
        env={**settings.environment(), compiled.SOURCE_ONLY: "1"},
    )


def _run(argv: list[str], *, cwd: Path, env: dict[str, str]) -> None:
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise StartError([f"the hot path could not be compiled and runs from its sources:\n{done.stdout}{done.stderr}"])
