"""What a test leaves open: after a failure it is closed at once, so that it fails that test and not the one after it."""

from __future__ import annotations

import gc
import os
import sys

# The interpreter keeps the last exception under these names, and pytest drops it only when the next test begins.
_KEPT = ("last_type", "last_value", "last_traceback", "last_exc")
# Workers that were stopped wait for the collector with the files that they map. Many systems allow a process 1,024 files.
_MANY_FILES = 400


def drop() -> None:
    """Close what only a failure still refers to, and so have its warnings reported now, or what has become much."""
    kept = [name for name in _KEPT if hasattr(sys, name)]
    for name in kept:
        delattr(sys, name)
    if kept or len(os.listdir("/proc/self/fd")) > _MANY_FILES:
        gc.collect()
