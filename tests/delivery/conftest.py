"""A receiver for each test, beside its database."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from proxy.store.postgres.pool import Pool
from tests.delivery.harness import DeliveryHarness, inbox


@pytest.fixture
async def harness(pool: Pool) -> AsyncIterator[DeliveryHarness]:
    async with inbox(servers=21) as found:
        yield DeliveryHarness(pool, found)
