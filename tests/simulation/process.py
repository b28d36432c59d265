"""A process for simulations: fixed hashes, and the seams in place before the program is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

COMPILED, HASH_SEED = "--compiled", "--hash-seed"


def prepared(argv: Sequence[str]) -> None:
    """Start this program again with the environment that a simulation needs, unless it has it. Planted bugs are changes of the
    sources, so the sources run unless the compiled program is asked for."""
    hash_seed = argv[argv.index(HASH_SEED) + 1] if HASH_SEED in argv else "0"
    expected = {"PYTHONHASHSEED": hash_seed, "PENSTOCK_SOURCE": None if COMPILED in argv else "1"}
    if any(os.environ.get(name) != value for name, value in expected.items()):
        for name, value in expected.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *argv[1:]])
