"""A fixed set of seeds keeps every rule, and the simulator finds a planted bug."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conventions.source import ROOT
from tests.simulation.mutants import MUTANTS, mutated

# Seeds that once broke a rule, with the reason. A change of the simulation gives every seed another history: then look for
# another seed that finds the planted bug (`--mutants NAME`). Since the last such change, only seed 11 was looked for.
ONCE_FAILED = {
    6: "a call with X-Min-Block got a 503 for a missing block, although the block was there and no upstream took calls",
    10: "X-Min-Block was served by an upstream that reports an impossible head",
    11: "a call with X-Min-Block that hung was repeated at an upstream that was back, without the block; before the last "
    "change, a replay of logs joined the feed at a block that was being removed",
    13: "an impossible head attracted calls, and X-Block-Number named a block that was not reached",
    59: "an upstream of another chain got calls after it refused to name its chain",
    85: "a cached reply from before the block of X-Min-Block followed it",
    238: "the late reply of a batch ended a later attempt at the same upstream",
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
    done = simulate("--seeds", 12, "--processes", 2)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("seed", [seed for seed in ONCE_FAILED if seed > 12])
def test_seed_that_once_failed_keeps_every_rule(seed: int) -> None:
    done = simulate("--seed", seed, "--seeds", 1)
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
