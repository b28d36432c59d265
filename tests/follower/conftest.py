"""A scripted chain and its follower for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.follower.event_harness import EventHarness, event_harness


@pytest.fixture
async def harness(database: str) -> AsyncIterator[EventHarness]:
    async with event_harness(database) as harness:
        yield harness
