"""Runs the programs in tests/clients, which use the service through other libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from proxy.dev.npm_packages import node_binary
from tests import node_programs
from tests.service import ROOT

SCRIPTS = ROOT / "tests" / "clients"
# An HTTP proxy of the environment must not be used for local addresses.
ENVIRONMENT = {**os.environ, "no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}


def run_source(text: str, *, within_s: float) -> str:
    """Run a program for Node.js that is given as text, such as a block of the guide; return its output."""
    command = [str(node_binary()), "--input-type=module"]
    done = subprocess.run(
        command, input=text, env=ENVIRONMENT, cwd=SCRIPTS, capture_output=True, text=True, timeout=within_s, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_script(name: str, task: dict[str, Any], *, within_s: float, package: str = "") -> dict[str, Any]:
    """Run one program with its task on standard input; return its results. `package`: the one with an environment of its own
    that the program needs. Without it, the test is skipped."""
    file = str(SCRIPTS / name)
    command = [sys.executable, "-W", "error", file] if name.endswith(".py") else [str(node_binary()), file]
    if package:
        command = [
            str(node_programs.require(f"{package}/bin/python", made_by=package, needs="a network")),
            file,
        ]
    return run_program(command, task, within_s=within_s)


def run_program(command: Sequence[str], task: dict[str, Any], *, within_s: float) -> dict[str, Any]:
    done = subprocess.run(
        command, input=json.dumps(task), env=ENVIRONMENT, capture_output=True, text=True, timeout=within_s, check=False
    )
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout)
    return results
