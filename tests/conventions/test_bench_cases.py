"""The benchmark can run every kind of case."""

from __future__ import annotations

from typing import get_args

from bench.cases import CASES, Kind
from bench.runner import RUNS


def test_every_kind_of_case_can_run() -> None:
    assert RUNS.keys() == {*get_args(Kind)}
    assert {case.kind for case in CASES} <= RUNS.keys()
