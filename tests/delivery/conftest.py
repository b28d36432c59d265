"""Fixtures: a database and a receiver for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from proxy.store.pool import Pool
from tests.database import database, empty_database, pool, server
from tests.delivery.harness import DeliveryHarness, inbox

__all__ = ("database", "empty_database", "pool", "server")


@pytest.fixture
async def harness(pool: Pool) -> AsyncIterator[DeliveryHarness]:
    async with inbox(servers=21) as found:
        yield DeliveryHarness(pool, found)
