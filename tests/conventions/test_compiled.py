"""Compiled modules stay within what the compiler supports, and are never older than their sources."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from proxy import compiled
from proxy.commands import compiling
from tests.conventions.source import ROOT, modules

SMALL = ("proxy.core.limits", "proxy.store.shared_memory.rate_buckets")
# Constructs that mypyc translates differently: coroutines and generators share one exception, and groups are unsupported.
BEYOND = (ast.AsyncFunctionDef, ast.Await, ast.Yield, ast.YieldFrom, ast.TryStar)
# It makes a plain property of the one; and takes the other for bytes, as its stub says.
NOT_THERE = {"cached_property"}
NOT_KEPT = {"Raw"}


def beyond_the_compiler(module: str) -> list[str]:
    """The places of a module that mypyc does not translate, or translates to something else."""
    nodes = [*ast.walk(modules()[module])]
    annotated = [each for node in nodes if isinstance(node, ast.AnnAssign) for each in ast.walk(node.annotation)]
    found = [node.lineno for node in nodes if isinstance(node, BEYOND)]
    found += [node.lineno for node in nodes if isinstance(node, ast.Name) and node.id in NOT_THERE]
    found += [node.lineno for node in annotated if isinstance(node, ast.Attribute) and node.attr in NOT_KEPT]
    return [f"{module}:{line}" for line in sorted(found)]


def test_compiled_modules_keep_to_what_the_compiler_can_do() -> None:
    assert not [place for module in compiled.MODULES for place in beyond_the_compiler(module)]


def plain_heirs() -> list[str]:
    """Classes of plain modules whose base is a class of a compiled one. Such a class cannot be created."""
    found = []
    for name, tree in modules().items():
        if name in compiled.MODULES:
            continue
        imports = [
            node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module in compiled.MODULES
        ]
        compiled_names = {alias.asname or alias.name for node in imports for alias in node.names}
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        is_protocol = [each for each in classes if "Protocol" in map(ast.unparse, each.bases)]
        found += [
            f"{name}:{each.name}"
            for each in classes
            if each not in is_protocol and compiled_names & {*map(ast.unparse, each.bases)}
        ]
    return found


def test_no_plain_class_has_a_compiled_base() -> None:
    assert not plain_heirs()


def test_what_was_compiled_of_these_sources_is_in_use() -> None:
    is_there = compiled.Finder(compiled.directory()).is_whole()
    assert compiled.in_use() is (is_there and compiled.SOURCE_ONLY not in os.environ)


def test_compiled_modules_are_the_ones_that_run() -> None:
    files = {module: str(importlib.import_module(module).__file__) for module in compiled.MODULES}
    assert {file.endswith(compiled.SUFFIX) for file in files.values()} == {compiled.in_use()}, files


def test_directory_is_another_after_any_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "b.py").write_text("")
    directories = [compiled.directory()]
    (tmp_path / "a.py").write_text("x = 2")
    directories.append(compiled.directory())
    (tmp_path / "a.py").rename(tmp_path / "c.py")
    directories.append(compiled.directory())
    assert len(set(directories)) == 3


def test_compiled_form_of_a_wheel_is_beside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "ROOT", tmp_path / "proxy")
    assert tmp_path not in compiled.root().parents
    (tmp_path / compiled.DIRECTORY).mkdir()
    assert compiled.root() == tmp_path / compiled.DIRECTORY


def test_sources_run_on_request() -> None:
    code = (
        "from proxy import compiled; import proxy.wire.http1 as it; print(compiled.in_use(), it.__file__, sep=chr(10))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={compiled.SOURCE_ONLY: "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["False", str(ROOT / "proxy" / "wire" / "http1.py")]


def compile_small(root: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command, for two small modules and without optimisation, in a place where nothing is compiled yet."""
    code = (
        "import pathlib, sys; from proxy import compiled; from proxy.__main__ import main; "
        "from proxy.commands import compiling; compiling._LEVELS['MYPYC_OPT_LEVEL'] = '0'; "
        f"compiled.MODULES = {SMALL!r}; compiled.root = lambda: pathlib.Path(sys.argv[1]); sys.exit(main(['compile']))"
    )
    argv = [sys.executable, "-c", code, str(root)]
    return subprocess.run(argv, cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("library", "module"), [("cut", "cut"), ("cut", ""), ("", "cut")])
def test_what_cannot_be_loaded_is_not_used(library: str, module: str, tmp_path: Path) -> None:
    """Files of another machine, or emptied by a crash: the sources run instead."""
    code = (
        "import pathlib, sys; from proxy import compiled; place = pathlib.Path(sys.argv[1]); "
        "[place.joinpath(name + compiled.SUFFIX).write_text(sys.argv[3]) for name in compiled.MODULES]; "
        "place.joinpath('it__mypyc' + compiled.SUFFIX).write_text(sys.argv[2]); "
        "compiled.root = compiled.directory = lambda: place; compiled.use(); "
        "import proxy.wire.http1 as it; print(it.__file__)"
    )
    environ = {name: value for name, value in os.environ.items() if name != compiled.SOURCE_ONLY}
    argv = [sys.executable, "-c", code, str(tmp_path), library, module]
    done = subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) not in done.stdout


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_the_sources_run_and_say_so(compiler: str, tmp_path: Path) -> None:
    """`false` is one that compiles nothing."""
    done = compile_small(tmp_path, CC=compiler)
    assert done.returncode == 2
    assert "runs from its sources" in done.stderr
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(any(compiling.missing()), reason="there is no compiler here")
def test_what_is_compiled_stands_under_its_mark_and_nothing_beside_it(tmp_path: Path) -> None:
    done = compile_small(tmp_path)
    assert done.returncode == 0, done.stderr
    (directory,) = tmp_path.iterdir()
    assert directory.name == compiled.directory().name
    assert compiled.Finder(directory).files.keys() > set(SMALL)
    assert "compiling" not in compile_small(tmp_path).stdout
    # A crash of the machine has left an empty file: it is compiled again.
    library = next(file for name, file in compiled.Finder(directory).files.items() if name not in SMALL)
    library.write_bytes(b"")
    assert "compiling" in compile_small(tmp_path).stdout
    assert [*tmp_path.iterdir()] == [directory]
    assert library.stat().st_size
