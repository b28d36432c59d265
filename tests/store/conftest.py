"""A breakable connection to the database server."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.database import Server
from tests.store.cable import Cable


@pytest.fixture
async def cable(server: Server) -> AsyncIterator[Cable]:
    with tempfile.TemporaryDirectory(prefix="penstock-") as directory:
        found = Cable(Path(directory), server.sockets)
        await found.plug()
        yield found
        await found.cut()
