"""Temporary files in memory. The tests make a thousand databases of 300 files each, which takes a disk five times as long."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")
# A run takes up to 2 GB. The rest is for its processes.
NEEDED_BYTES = 6 * 2**30


def use() -> None:
    """Create temporary files in memory, here and in child processes, unless there is little of it or TMPDIR is set."""
    if "TMPDIR" not in os.environ and _is_suitable():
        os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)


def _is_suitable() -> bool:
    """Whether there is enough memory, for files that may be executed: the tests load libraries that they compile."""
    if not os.access(MEMORY, os.W_OK | os.X_OK):
        return False
    limits = os.statvfs(MEMORY)
    free = min(limits.f_bavail * limits.f_frsize, _available_bytes())
    return free >= NEEDED_BYTES and not limits.f_flag & os.ST_NOEXEC


def _available_bytes() -> int:
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024
