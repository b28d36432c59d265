"""A network of a node that the service does not know, set up as an operator does: `chains add`, settings, `check --connect`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from proxy.settings import load_tables
from tests.flows.test_upstream_branches import CONFIG
from tests.rpc_harness import NetworkHarness
from tests.service import command_here
from tests.web import worker as worker_module
from tests.web.worker import running_worker

MINUTE_S = 60.0


@asynccontextmanager
async def new_network(
    family: str, url: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[NetworkHarness]:
    """The network, served. It is there within a minute."""
    began = time.monotonic()
    words = ("--family", family, "--name", "mine", "--upstream", url, "--directory", str(home / "own"))
    added = await asyncio.to_thread(command_here, "chains", "add", *words)
    assert added.returncode == 0, added.stderr
    file = home / "penstock.toml"
    file.write_text(CONFIG + added.stdout.partition("settings:\n")[2])
    checked = await asyncio.to_thread(command_here, "check", "--offline", "--connect", "--config", str(file))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    row = next(line.split() for line in checked.stdout.splitlines() if line.startswith("mine/mainnet#1"))
    assert row[1] == "up"
    monkeypatch.setattr(worker_module, "TABLES", load_tables(own=str(home / "own")))
    async with running_worker({"mine/mainnet": [url]}) as running:
        harness = NetworkHarness(running, "mine/mainnet")
        await harness.look()
        await harness.shows("up")
        assert time.monotonic() - began < MINUTE_S
        yield harness
