"""Numbers of sockets and subscriptions over hosts on a real Redis."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from proxy.compose.fleet import link_to
from proxy.store.shared_memory import host_memory
from proxy.store.shared_memory.host_memory import HostMemory
from proxy.store.valkey import valkey_link
from proxy.store.valkey.fleet_counts import FleetCounts
from proxy.store.valkey.valkey_link import ValkeyLink
from proxy.tasks import Tasks
from tests.redis_server import redis_server, require_redis
from tests.service import until

MOST = 10
SLOT = 3


class Host:
    def __init__(self, link: ValkeyLink, name: str) -> None:
        self.counts = HostMemory(host_memory.create()).counts
        self.fleet = FleetCounts(link, self.counts, name, lambda: 2)

    async def add(self) -> bool:
        """Count one more subscription, as `SocketCaps` does."""
        place = self.counts.take("subscriptions", SLOT, self.fleet.room("subscriptions", SLOT, MOST))
        if not place:
            return False
        is_within = await self.fleet.is_within("subscriptions", SLOT, MOST, place=place)
        if not is_within:
            self.counts.give_back("subscriptions", SLOT)
        return is_within


async def test_hosts_that_add_at_once_have_no_more_than_the_limit_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_redis()
    monkeypatch.setattr(valkey_link, "LATE_S", 5.0)
    async with redis_server(tmp_path) as redis:
        tasks, link = Tasks(), link_to(redis.url)
        tasks.start("valkey", link.run)
        await until(lambda: link.is_up)
        one, other = Host(link, "one"), Host(link, "other")
        # Nothing was heard of the other host before.
        assert [await one.add() for _ in range(MOST - 4)] == [True] * (MOST - 4)
        added = await asyncio.gather(*(other.add() for _ in range(MOST)))
        assert sum(added) == 4
        added = await asyncio.gather(*(host.add() for _ in range(MOST) for host in (one, other)))
        assert sum(added) == 0
        await tasks.close()
