"""Fixtures: one running service for all tests that do not harm it; those that do start their own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests import service as service_room
from tests.service import Service


@pytest.fixture(scope="session")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    """The whole service with two workers, shared by every test that leaves it as it was."""
    running = await service_room.start(tmp_path_factory.mktemp("penstock"), "--workers", "2")
    yield running
    await service_room.stop(running)
