"""What a failed test leaves open fails that test, not the one after it."""

from __future__ import annotations

import gc
import sys

# The interpreter keeps the last exception under these names, and pytest drops it only when the next test begins.
_KEPT = ("last_type", "last_value", "last_traceback", "last_exc")


def drop() -> None:
    """Close what only the failure still refers to, and so have its warnings reported now."""
    kept = [name for name in _KEPT if hasattr(sys, name)]
    for name in kept:
        delattr(sys, name)
    if kept:
        gc.collect()
