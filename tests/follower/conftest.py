"""Database fixtures for the tests of the follower."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.database import database, empty_database, pool, server
from tests.follower.stage import Stage, staged

__all__ = ("database", "empty_database", "pool", "server")


@pytest.fixture
async def stage(database: str) -> AsyncIterator[Stage]:
    async with staged(database) as found:
        yield found
