"""Installs Debian's packages that benchmarks and tests use, without starting them as services."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

POLICY = Path("/usr/sbin/policy-rc.d")


def install(*packages: str) -> str:
    """Install packages, if that is possible without asking: as root on Debian. Returns the reason if they were not."""
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        return f"needs root on Debian; by hand: apt-get install {shlex.join(packages)}"
    with _no_services():
        fault = _apt("install", *packages)
        if fault:  # The package lists may be missing or old.
            _apt("update")
            fault = _apt("install", *packages)
    return fault


def _apt(command: str, *packages: str) -> str:
    """Run apt-get. Returns the reason if it failed, else an empty string."""
    flags = ["-y", "-qq", "--no-install-recommends"] if packages else ["-qq"]
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(["apt-get", command, *flags, *packages], env=env, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason given"])[-1]


@contextlib.contextmanager
def _no_services() -> Iterator[None]:
    """Keep Debian from starting installed programs as system services, by means of policy-rc.d."""
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()
