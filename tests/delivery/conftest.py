"""Fixtures: a database and a receiver for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from proxy.store.pool import Pool
from tests.database import database, empty_database, pool, server
from tests.delivery.scene import Scene, inbox

__all__ = ("database", "empty_database", "pool", "server")


@pytest.fixture
async def scene(pool: Pool) -> AsyncIterator[Scene]:
    async with inbox(servers=21) as found:
        yield Scene(pool, found)
