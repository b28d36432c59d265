"""`compile`: translate the hot path to machine code for this interpreter and these sources (see proxy/compiled.py)."""

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
from proxy.commands.progress import ticking
from proxy.errors import StartError

# Builds older than this are removed: their sources are most likely gone.
MAX_AGE_S = 86_400.0
# No debug symbols. Level 3 only takes longer to compile.
_LEVELS = {"MYPYC_OPT_LEVEL": "2", "MYPYC_DEBUG_LEVEL": "0"}


def register(commands: Any) -> None:
    parser = commands.add_parser("compile", help="compile the hot path to machine code, which makes calls faster")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    directory = compiled.directory()
    if not _is_usable(directory):
        if faults := [*missing()]:
            raise StartError([f"the hot path was not compiled and runs from its sources: {fault}" for fault in faults])
        print("compiling the hot path, which takes one to three minutes ...", flush=True)
        try:
            with ticking(lambda: "compiling"):
                _compile(directory)
        except OSError as exc:
            raise StartError([f"the hot path was not compiled and runs from its sources: {exc}"]) from None
    print("the hot path is compiled")
    return 0


def missing() -> Iterator[str]:
    """The tools that compiling needs and that are missing."""
    if find_spec("mypyc") is None or find_spec("setuptools") is None:
        yield "compiling needs mypy and setuptools: run pip install mypy setuptools"
    compiler = str(settings.environment().get("CC") or sysconfig.get_config_var("CC")).split()[0]
    if not shutil.which(compiler):
        yield f"compiling needs a C compiler, and {compiler} is not on PATH: on Debian, run apt-get install gcc"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        yield "compiling needs Python's headers: on Debian, run apt-get install python3-dev"


def _compile(directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
        work, built = Path(temporary, "work"), Path(temporary, "built")
        _translate(work)
        built.mkdir(mode=0o755)
        for file in work.rglob(f"*{compiled.SUFFIX}"):
            if (inside := file.relative_to(work)).parts[0] != "build":
                file.rename(built / ".".join(inside.parts))
        _try(built)
        _sync(built)
        # Remove a build that cannot be used, and old builds of other sources, each by one rename.
        for other in directory.parent.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if other.stat().st_mtime < time.time() - MAX_AGE_S or (
                    other == directory and not _is_usable(directory)
                ):
                    other.rename(Path(temporary, other.name))
        if not directory.exists():  # Otherwise another process has made the same build meanwhile.
            built.rename(directory)


def _translate(work: Path) -> None:
    shutil.copytree(compiled.ROOT, work / "proxy", ignore=shutil.ignore_patterns("__pycache__", "static"))
    sources = [f"{name.replace('.', '/')}.py" for name in compiled.MODULES]
    argv = [sys.executable, "-m", "mypyc", "--config-file=", "--ignore-missing-imports", *sources]
    environment = settings.environment()
    # Looking for faults in 46 MB of generated code took half of the compiler's time.
    flags = f"{environment.get('CFLAGS', '')} -w".strip()
    _run(argv, cwd=work, env={**environment, **_LEVELS, "CFLAGS": flags})


def _sync(directory: Path) -> None:
    """Flush the files to disk before they get their final name, so that a crash cannot leave empty files under it."""
    for path in (*directory.iterdir(), directory):
        opened = os.open(path, os.O_RDONLY)
        os.fsync(opened)
        os.close(opened)


def _is_usable(built: Path) -> bool:
    try:
        _try(built)
    except StartError:
        return False
    return True


def _try(built: Path) -> None:
    """Import every module in a new process. Raises StartError: a broken build must not replace the sources."""
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
        raise StartError([f"compiling the hot path failed, and it runs from its sources:\n{done.stdout}{done.stderr}"])
