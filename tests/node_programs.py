"""Programs of real nodes and clients that `make` builds once for all work trees, and the end of nodes' processes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest

BUILT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
# Nodes write their state when they are told to end.
_END_S = 20


def find(name: str) -> Path | None:
    """The program on PATH, or the one that `make` built."""
    found = shutil.which(name) or (BUILT / name if (BUILT / name).exists() else None)
    return Path(found) if found else None


def require(name: str, needs: str = "Go", *, made_by: str = "") -> Path:
    """The program. Skips the test without it. `made_by`: the target of `make` that builds it, if that has another name."""
    found = find(name)
    if found is None:
        pytest.skip(f"{name} is not installed: build it with `make {made_by or name}`, which needs {needs}")
    return found


def end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Tell all of them to end, and wait for each."""
    running = [*processes]
    for process in running:
        process.terminate()
    for process in running:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        process.kill()
