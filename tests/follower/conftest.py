"""Database fixtures for the tests of the follower."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.database import database, empty_database, pool, server
from tests.follower.event_harness import EventHarness, event_harness

__all__ = ("database", "empty_database", "pool", "server")


@pytest.fixture
async def harness(database: str) -> AsyncIterator[EventHarness]:
    async with event_harness(database) as harness:
        yield harness
