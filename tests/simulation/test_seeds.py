"""A fixed set of seeds keeps every rule, and so do those that found a real bug; the simulator finds a planted one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from proxy import compiled
from tests.conventions.source import ROOT
from tests.simulation.mutants import MUTANTS, kept_seeds, mutated
from tests.simulation.process import COMPILED

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


@pytest.mark.timeout(600)
def test_fixed_seeds_and_those_that_once_failed_keep_every_rule() -> None:
    """In one process, which imports the program once, and with the compiled program, if there is one."""
    seeds = [*range(1, FIXED + 1), *sorted({*ONCE_FAILED.values()})]
    done = simulate("--seed", *seeds, "--processes", 2, *([COMPILED] if compiled.in_use() else []))
    assert done.returncode == 0, f"{ONCE_FAILED}\n{done.stdout}{done.stderr}"
    assert f"{len(seeds)} seeds, " in done.stdout


def test_planted_bug_is_found() -> None:
    done = simulate("--mutant", "cache-survives-head", "--seeds", 4, "--fail-fast", "--shrinks", 0)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "backwards" in done.stdout


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_has_its_place(name: str) -> None:
    """Adapt the mutant if the code around it has changed."""
    mutant = MUTANTS[name]
    mutated(mutant, Path(ROOT, *mutant.module.split(".")).with_suffix(".py").read_text("utf-8"))
