"""One running service for all tests that leave it as it was."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.dashboard.service import Desk, desk_on
from tests.database import MIGRATED, Server, database, pool, server

__all__ = ("database", "pool", "server")


@pytest.fixture(scope="session")
async def desk(server: Server, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Desk]:
    name = await server.create(MIGRATED)
    async with desk_on(server.url(name), tmp_path_factory.mktemp("desk")) as found:
        yield found
    await server.drop(name)
