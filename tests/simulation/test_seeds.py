"""A fixed set of seeds keeps every rule, and the simulator finds a planted bug."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conventions.source import ROOT
from tests.simulation.mutants import MUTANTS, kept_seeds, mutated

# The seeds of the first test.
FIXED = 12
# Seeds that find a bug that was real, if it is planted again.
ONCE_FAILED = {
    name: seed for name, seed in kept_seeds().items() if name in MUTANTS and MUTANTS[name].showed and seed > FIXED
}


def simulate(*argv: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.simulation", *map(str, argv)],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_fixed_seeds_keep_every_rule() -> None:
    done = simulate("--seeds", FIXED, "--processes", 2)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ONCE_FAILED)
def test_seed_that_once_failed_keeps_every_rule(name: str) -> None:
    done = simulate("--seed", ONCE_FAILED[name], "--seeds", 1)
    assert done.returncode == 0, done.stdout + done.stderr


def test_planted_bug_is_found() -> None:
    done = simulate("--mutant", "cache-survives-head", "--seeds", 4, "--fail-fast", "--shrinks", 0)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "backwards" in done.stdout


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_has_its_place(name: str) -> None:
    """Adapt the mutant if the code around it has changed."""
    mutant = MUTANTS[name]
    mutated(mutant, Path(ROOT, *mutant.module.split(".")).with_suffix(".py").read_text("utf-8"))
