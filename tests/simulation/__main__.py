"""Runs seeds: `python -m tests.simulation --help`."""

from __future__ import annotations

import sys

from tests.simulation.process import prepared

if __name__ == "__main__":
    prepared(sys.argv)
    from tests.simulation.runner import main

    sys.exit(main(sys.argv[1:]))
