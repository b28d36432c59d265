"""A process for simulations: fixed hashes, the program's sources, and the seams in place before the program is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# Compiled modules use real sets, whose order depends on addresses.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PENSTOCK_SOURCE": "1"}


def prepared(argv: Sequence[str]) -> None:
    """Start this program again with the environment that a simulation needs, unless it has it."""
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.environ.update(ENVIRONMENT)
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *argv[1:]])
