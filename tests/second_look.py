"""Run pytest with the given words. The few tests that fail beside others run once more, alone.

Many real processes share the cores, and a test may starve. A test that fails alone too fails the run, and more than `FEW`
failures fail it at once. A test that passes only alone is named at the end and added to `tests/unsteady.txt`: the next run
reads that file, and a test that is named there gets no second look. Repair such a test, then remove its line.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import orjson
import pytest

from tests.forked_run import PROCESSES

FEW = 5
UNSTEADY = Path(__file__).with_name("unsteady.txt")


def main(words: Sequence[str], unsteady: Path = UNSTEADY) -> int:
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "pytest", *words, "-o", f"cache_dir={cache}"]
        status = subprocess.call(command)
        if status != pytest.ExitCode.TESTS_FAILED:
            return status
        failed = sorted(orjson.loads(Path(cache, "v/cache/lastfailed").read_bytes()))
        if len(failed) > FEW:
            return status
        if again := sorted(names_in(unsteady) & set(failed)):
            print(f"these tests of {unsteady.name} failed beside others again:", *again, sep="\n  ", flush=True)
            return status
        print(f"running {len(failed)} failed tests again, alone:", *failed, sep="\n  ", flush=True)
        status = subprocess.call([*command, PROCESSES, "0", "--last-failed"])
        if status == pytest.ExitCode.OK:
            print(
                f"these tests failed beside others and passed alone (see {unsteady.name}):",
                *failed,
                sep="\n  ",
                flush=True,
            )
            unsteady.write_text("".join(f"{name}\n" for name in sorted(names_in(unsteady) | set(failed))))
        return status


def names_in(unsteady: Path) -> set[str]:
    """Tests that have passed only alone in an earlier run."""
    return set(unsteady.read_text().splitlines()) if unsteady.exists() else set()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
