"""Fixtures that several flows share, beside the running service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable

import pytest

from proxy.dev.postgres import Postgres
from tests import service as service_room
from tests.database import Server
from tests.service import Service
from tests.shared_services import SharedServices


@pytest.fixture(scope="session")
def cluster(server: Server) -> Postgres:
    """The database server, for services that run as an operator would run them."""
    return server.postgres


@pytest.fixture(scope="module")
async def bundled(
    request: pytest.FixtureRequest, shared_services: SharedServices, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Service]:
    """The complete service with its bundler."""

    def start() -> Awaitable[Service]:
        return service_room.start(tmp_path_factory.mktemp("bundled"), "--workers", "2", bundler=True)

    yield await shared_services.get("bundled", start)
    await shared_services.release("bundled", request)
