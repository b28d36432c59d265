"""Fixtures that several flows share, beside the running service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterator

import pytest

from proxy.dev.postgres import Postgres
from tests import service as service_room
from tests.database import Server
from tests.real_harness import real_nodes
from tests.real_nodes import RealNode
from tests.service import Service
from tests.shared_services import SharedServices


@pytest.fixture(scope="session")
def cluster(server: Server) -> Postgres:
    """The database server, for services that run as an operator would run them."""
    return server.postgres


@pytest.fixture(scope="module", params=["hardhat", "geth"])
def nodes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealNode]]:
    """Three nodes of a real chain, which tests may revert."""
    with real_nodes(request.param, 3, tmp_path_factory.mktemp("nodes")) as found:
        yield found


@pytest.fixture(scope="module")
async def bundled(
    request: pytest.FixtureRequest, shared_services: SharedServices, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Service]:
    """The complete service with its bundler."""

    def start() -> Awaitable[Service]:
        return service_room.start(tmp_path_factory.mktemp("bundled"), "--workers", "2", bundler=True)

    yield await shared_services.get("bundled", start)
    await shared_services.release("bundled", request)
