"""Fixtures that several flows share, beside the running service."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from proxy.dev.postgres import Postgres


@pytest.fixture(scope="session")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Postgres]:
    """A Postgres of an operator's own; its socket where the path is short enough for one."""
    room = tmp_path_factory.mktemp("cluster")
    with tempfile.TemporaryDirectory(prefix="penstock-test-") as socket_dir:
        running = Postgres(room / "data", Path(socket_dir), room / "log")
        await running.start()
        yield running
        await running.child.stop()
