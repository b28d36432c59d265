"""Fixtures that several flows share, beside the running service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterator

import pytest

from proxy.dev.postgres import Postgres
from tests import service as service_room
from tests.database import Server
from tests.lagging_upstream import LaggingUpstream, lagging_upstreams
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


@pytest.fixture(scope="session")
async def laggards() -> AsyncIterator[list[LaggingUpstream]]:
    async with lagging_upstreams(1, 2) as found:
        yield found


@pytest.fixture(scope="module")
async def followed(
    request: pytest.FixtureRequest,
    shared_services: SharedServices,
    tmp_path_factory: pytest.TempPathFactory,
    laggards: list[LaggingUpstream],
) -> AsyncIterator[Service]:
    """A service whose chain tests may revert. Two more upstreams of its test network are behind the chain."""

    async def start() -> Service:
        more = [word for each in laggards for word in ("--upstream", f"dev/testnet={each.url}")]
        found = await service_room.start(tmp_path_factory.mktemp("followed"), "--workers", "2", *more)
        for each in laggards:
            each.node = found.ready["upstream_url"]
        return found

    yield await shared_services.get("followed", start)
    await shared_services.release("followed", request)


@pytest.fixture(scope="module")
async def bundled(
    request: pytest.FixtureRequest, shared_services: SharedServices, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Service]:
    """The complete service with its bundler."""

    def start() -> Awaitable[Service]:
        return service_room.start(tmp_path_factory.mktemp("bundled"), "--workers", "2", bundler=True)

    yield await shared_services.get("bundled", start)
    await shared_services.release("bundled", request)
