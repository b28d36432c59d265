"""One running service, shared by all tests that do not stop or reconfigure it. It ends with the last test here: it reports
every 200 ms, and so takes a tenth of a processor even at rest."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.dashboard.service import DashboardService, start_service
from tests.database import MIGRATED, Server


@pytest.fixture(scope="package")
async def service(server: Server, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DashboardService]:
    name = await server.create(MIGRATED)
    async with start_service(server.url(name), tmp_path_factory.mktemp("dashboard")) as found:
        yield found
    await server.drop(name)
