"""One seed gives one history, byte for byte: after others in one process, in a forked one and in a fresh one, with any
allocator and any seed of hashes."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.conventions.source import ROOT

# One with upstreams that announce their heads, one with readers that do not read, a fleet with faults, and one without any.
FIRST, COUNT = "1", "4"


def digests(*argv: str, **environ: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", "--seed", FIRST, "--seeds", COUNT, "--digests", *argv],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_same_seed_gives_the_same_history() -> None:
    forked = digests("forked")
    assert len(forked) == int(COUNT)
    assert digests("here") == forked
    # Another allocator puts objects at other addresses, and other hashes give sets of strings another order.
    assert digests("forked", "--hash-seed", "7", PYTHONMALLOC="malloc") == forked
