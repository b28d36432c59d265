"""The order of test files, and the choice for the uncompiled pass."""

from __future__ import annotations

import pytest

from tests.house.source import ROOT
from tests.scheduling import LONG, place_of, runs_compiled_code


def test_every_long_file_exists() -> None:
    assert not [file for file in LONG if not (ROOT / file).is_file()]


def test_long_files_come_first_and_the_longest_before_all() -> None:
    files = [ROOT / "tests/core/test_units.py", *(ROOT / file for file in reversed(LONG))]
    assert sorted(files, key=place_of) == files[::-1]


@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("tests/core/test_limits.py", True),
        ("tests/store/test_windows.py", True),
        ("tests/flows/test_cache.py", True),
        ("tests/core/test_units.py", False),
        ("tests/core/test_uris.py", False),
    ],
)
def test_uncompiled_pass_has_the_files_that_import_compiled_modules(file: str, chosen: bool) -> None:
    assert runs_compiled_code(ROOT / file) is chosen
