"""Run pytest with the given words. The few tests that fail beside others run once more, alone.

Many real processes share the cores, and a test may starve. A test that fails alone too fails the run, and more than `FEW`
failures fail it at once. A test that passes only alone is named at the end, so that it can be made steady.
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


def main(words: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "pytest", *words, "-o", f"cache_dir={cache}"]
        status = subprocess.call(command)
        if status != pytest.ExitCode.TESTS_FAILED:
            return status
        failed = sorted(orjson.loads(Path(cache, "v/cache/lastfailed").read_bytes()))
        if len(failed) > FEW:
            return status
        print(f"running {len(failed)} failed tests again, alone:", *failed, sep="\n  ", flush=True)
        status = subprocess.call([*command, PROCESSES, "0", "--last-failed"])
        if status == pytest.ExitCode.OK:
            print("these tests failed beside others and passed alone:", *failed, sep="\n  ", flush=True)
        return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
