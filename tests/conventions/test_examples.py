"""Property tests run the same examples every time, whichever other modules are loaded."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import PROFILE

NUMBERS = st.lists(st.integers(0, 10**9), min_size=20)
# Numbers that no other module has.
CONSTANTS = [*range(700_000_001, 700_001_000)]


def examples() -> list[list[int]]:
    seen: list[list[int]] = []

    @settings(max_examples=50)
    @given(NUMBERS)
    def collect(numbers: list[int]) -> None:
        seen.append(numbers)

    collect()
    return seen


@pytest.mark.skipif(PROFILE != "steady", reason="this profile looks for other examples")
def test_examples_do_not_depend_on_the_modules_that_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = examples()
    (tmp_path / "loaded_later.py").write_text(f"CONSTANTS = {CONSTANTS!r}\n")
    monkeypatch.syspath_prepend(tmp_path)
    import_module("loaded_later")
    after = examples()
    del sys.modules["loaded_later"]
    assert after == before
