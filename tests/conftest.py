"""Shared fixtures: one database server and one running service for all tests that leave them as they were. Other tests start
their own."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests import forked_run, leftovers, memory_disk, prepared_cluster, scheduling
from tests import service as service_room
from tests.certificates import authority
from tests.database import database, empty_database, pool, server
from tests.flows.upstream import HOODI, Upstream, echo
from tests.forked_run import pytest_runtestloop
from tests.service import Service
from tests.shared_services import NEXT, SharedServices, shared_services

__all__ = ("authority", "database", "empty_database", "pool", "pytest_runtestloop", "server", "shared_services")

memory_disk.use()

# The same examples in every run, and no verdict that depends on the load of the machine. Hypothesis also draws constants that
# it finds in the loaded modules of the project: examples would depend on the other tests of the process, and on whether modules
# are compiled. HYPOTHESIS_PROFILE=search looks for other examples, with these constants.
settings.register_profile(
    "steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.register_profile("search", max_examples=2000, deadline=None)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "steady")
settings.load_profile(PROFILE)
if PROFILE == "steady":
    vars(providers)["is_local_module_file"] = lambda _: False

# Tests send bad keys by the hundred, all from one address.
# Only the development chain is followed, so that the call counts of other upstreams come from tests alone.
PATIENT = {
    "PENSTOCK_KEYS__AUTH_FAILURES_PER_MINUTE": "1000000",
    "PENSTOCK_FOLLOWER__NETWORKS": '["dev/mainnet", "dev/testnet"]',
}


COMPILED_ONLY = "--compiled-only"
# Tests read the day again within this time.
NEAR_MIDNIGHT_S = 45
DAY_S = 86_400


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(COMPILED_ONLY, action="store_true", help="run only test files that import compiled modules")
    forked_run.add_option(parser)


def pytest_configure() -> None:
    prepared_cluster.begin()


def pytest_unconfigure() -> None:
    prepared_cluster.end()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if is_test and config.getoption(COMPILED_ONLY) and not scheduling.runs_compiled_code(collection_path):
        return True
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Thousands of tests and their modules stay until the end: the garbage collector need not visit them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start long files first, and run files that share a service one after the other."""
    items.sort(key=lambda item: scheduling.place_of(item.path))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Wait if the day is about to end: quotas, usage and their resets would span two days."""
    left_s = DAY_S - time.time() % DAY_S
    if left_s < NEAR_MIDNIGHT_S:
        time.sleep(left_s + 1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    item.session.stash[NEXT] = nextitem
    leftovers.drop()


@pytest.fixture(scope="session")
async def upstream_server() -> AsyncIterator[Upstream]:
    server = Upstream()
    await server.open()
    yield server
    await server.close()


@pytest.fixture(scope="session")
async def faulty_server() -> AsyncIterator[Upstream]:
    server = Upstream(HOODI)
    await server.open()
    yield server
    await server.close()


@pytest.fixture
def upstream(upstream_server: Upstream) -> Upstream:
    """The upstream of ethereum/sepolia with its default replies."""
    upstream_server.act = echo
    return upstream_server


@pytest.fixture
def faulty(faulty_server: Upstream) -> Upstream:
    """The upstream of ethereum/hoodi, for tests that make it fail."""
    faulty_server.act = echo
    return faulty_server


@pytest.fixture(scope="module")
async def service(
    request: pytest.FixtureRequest,
    shared_services: SharedServices,
    tmp_path_factory: pytest.TempPathFactory,
    upstream_server: Upstream,
    faulty_server: Upstream,
) -> AsyncIterator[Service]:
    """The whole service with four workers, shared by every test that leaves it as it was."""

    def start() -> Awaitable[Service]:
        return service_room.start(
            tmp_path_factory.mktemp("penstock"),
            *("--workers", "4", "--upstream", f"ethereum/sepolia={upstream_server.url}"),
            *("--upstream", f"ethereum/hoodi={faulty_server.url}"),
            env=PATIENT,
        )

    yield await shared_services.get("service", start)
    await shared_services.release("service", request)
