"""The order of test files, and the choice for the uncompiled pass."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conventions.source import ROOT
from tests.scheduling import LONG, TOGETHER, place_of, runs_compiled_code, unit_of


def test_every_long_file_exists() -> None:
    assert not [file for file in LONG if not (ROOT / file).is_file()]


def test_long_files_come_first_and_the_longest_before_all() -> None:
    files = [ROOT / "tests/core/test_units.py", *(ROOT / file for file in reversed(LONG))]
    assert sorted(files, key=place_of) == files[::-1]


def test_every_long_unit_is_named_by_its_first_file() -> None:
    assert [unit_of(file) for file in LONG] == [*LONG]
    assert {files[0] for files in TOGETHER} <= {*LONG}


def test_files_of_the_browser_are_one_unit() -> None:
    """Otherwise each process would start a service and Chromium."""
    files = [str(file.relative_to(ROOT)) for file in (ROOT / "tests" / "browser").glob("test_*.py")]
    assert len({unit_of(file) for file in files}) == 1, files


@pytest.mark.parametrize("fixture", ["service", "bundled"])
def test_files_that_share_a_service_are_one_unit(fixture: str) -> None:
    """Otherwise the service would be started once more, for each of them."""
    files = [*(ROOT / "tests" / "flows").glob("test_*.py"), *(ROOT / "tests" / "dev").glob("test_*.py")]
    users = [str(file.relative_to(ROOT)) for file in files if uses(file, fixture)]
    assert len(users) > 1
    assert len({unit_of(file) for file in users}) == 1, users


def test_files_that_share_the_service_of_the_dashboard_are_one_unit() -> None:
    """Otherwise each process would start it."""
    files = (ROOT / "tests" / "dashboard").glob("test_*.py")
    users = [str(file.relative_to(ROOT)) for file in files if uses(file, "service")]
    assert len(users) > 1
    assert len({unit_of(file) for file in users}) == 1, users


def uses(file: Path, fixture: str) -> bool:
    """Whether a test or fixture of the file has this argument, and the file has no such fixture itself."""
    functions = [
        node
        for node in ast.parse(file.read_bytes()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.name.startswith("test_") or "pytest.fixture" in map(ast.unparse, map(called, node.decorator_list)))
    ]
    if fixture in {function.name for function in functions}:
        return False
    return any(fixture == argument.arg for function in functions for argument in function.args.args)


def called(decorator: ast.expr) -> ast.expr:
    return decorator.func if isinstance(decorator, ast.Call) else decorator


@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("tests/core/test_limits.py", True),
        ("tests/store/test_rate_buckets.py", True),
        ("tests/flows/test_cache.py", True),
        ("tests/core/test_units.py", False),
        ("tests/core/test_uris.py", False),
    ],
)
def test_uncompiled_pass_has_the_files_that_import_compiled_modules(file: str, chosen: bool) -> None:
    assert runs_compiled_code(ROOT / file) is chosen
