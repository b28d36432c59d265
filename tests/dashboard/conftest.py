"""One running service, shared by all tests that do not stop or reconfigure it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.dashboard.service import DashboardService, start_service
from tests.database import MIGRATED, Server


@pytest.fixture(scope="session")
async def service(server: Server, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DashboardService]:
    name = await server.create(MIGRATED)
    async with start_service(server.url(name), tmp_path_factory.mktemp("dashboard")) as found:
        yield found
    await server.drop(name)
