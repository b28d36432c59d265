"""Whole services that several test files use, one file after the other.

Even at rest a service takes a tenth of a processor. It is therefore stopped as soon as the next test is in another unit (see
scheduling.py), not at the end of the run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests import scheduling
from tests import service as service_room
from tests.service import Service

# The test that runs next in this process, if any.
NEXT = pytest.StashKey[pytest.Item | None]()


class SharedServices:
    """The running services by the name of their fixture."""

    def __init__(self) -> None:
        self._running: dict[str, Service] = {}

    async def get(self, name: str, start: Callable[[], Awaitable[Service]]) -> Service:
        if name not in self._running:
            self._running[name] = await start()
        return self._running[name]

    async def release(self, name: str, request: pytest.FixtureRequest) -> None:
        """The tests of a file have ended. Stop the service if the next file does not use it."""
        following = request.session.stash.get(NEXT, None)
        if following is None or scheduling.unit_at(following.path) != scheduling.unit_at(request.path):
            await service_room.stop(self._running.pop(name))

    async def close(self) -> None:
        """Stop what an aborted run has left."""
        for running in self._running.values():
            await service_room.stop(running)


@pytest.fixture(scope="session")
async def shared_services() -> AsyncIterator[SharedServices]:
    shared = SharedServices()
    yield shared
    await shared.close()
