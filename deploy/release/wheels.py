"""Builds the package: one wheel for every platform, and one for this platform and Python with the compiled hot path.

    python deploy/release/wheels.py [DIRECTORY]    # `make wheel`

Run by a Python that has the package's requirements. Shows the step and its time, since compiling takes minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from proxy.commands.progress import duration, ticking  # noqa: E402 - the checkout's own, which need not be installed

PIP = ("-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation")
STEPS = {
    "the package for every platform, with the guide": {},
    "the package for this platform, with the compiled hot path": {"PENSTOCK_COMPILE": "1"},
}


def build(source: Path, out: Path) -> list[Path]:
    """Build both wheels of the sources in a directory."""
    shutil.rmtree(source / "build", ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("penstock-*.whl"):
        old.unlink()
    for number, (about, environ) in enumerate(STEPS.items(), 1):
        began, title = time.monotonic(), f"{number} of {len(STEPS)}: {about}"
        print(title, flush=True)
        with ticking(lambda title=title: title):  # type: ignore[misc]
            words = [sys.executable, *PIP, "-w", str(out.resolve()), "."]
            subprocess.run(words, cwd=source, env={**os.environ, **environ}, check=True)
        print(f"   done in {duration(time.monotonic() - began)}", flush=True)
    return sorted(out.glob("penstock-*.whl"))


if __name__ == "__main__":
    for wheel in build(ROOT, Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist")):
        print(f"{wheel.stat().st_size:>12,}  {wheel}")
