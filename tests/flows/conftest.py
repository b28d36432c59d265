"""Fixtures that several flows share, beside the running service."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from proxy.dev.postgres import Postgres


@pytest.fixture(scope="session")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Postgres]:
    """A Postgres server as an operator would run it. Its socket is in a directory with a short path: the length is limited."""
    directory = tmp_path_factory.mktemp("cluster")
    with tempfile.TemporaryDirectory(prefix="penstock-test-") as socket_dir:
        running = Postgres(directory / "data", Path(socket_dir), directory / "log")
        await running.start()
        yield running
        await running.child.stop()
