"""Limits of upstreams that hosts lease from a real Redis: calls are charged when they are sent, with or without a token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from proxy.compose.fleet import UpstreamLimits
from proxy.store.postgres.pool import Pool
from proxy.store.shared_memory import host_memory
from proxy.store.shared_memory.host_memory import HostMemory
from proxy.store.valkey import valkey_link
from proxy.store.valkey.upstream_leases import LeasedRate
from proxy.tasks import Tasks
from tests.redis_server import redis_server, require_redis
from tests.service import until

PER_SECOND = 4.5


def no_database() -> Pool:
    return Pool("postgresql://nobody@127.0.0.1:1/nothing", size=1, acquire_timeout_s=1.0)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    require_redis()
    monkeypatch.setattr(valkey_link, "LATE_S", 5.0)


@asynccontextmanager
async def hosts(room: Path, count: int) -> AsyncIterator[list[LeasedRate]]:
    """The limit of one upstream, on this many hosts."""
    async with redis_server(room) as redis:
        found = [
            (UpstreamLimits(redis.url, HostMemory(host_memory.create()), no_database()), Tasks()) for _ in range(count)
        ]
        for limits, tasks in found:
            limits.start(tasks)
        rates = [limits.leases.rate("mark", PER_SECOND) for limits, _ in found]
        await until(lambda: not any(limits.leases.buckets.away for limits, _ in found))
        try:
            yield rates
        finally:
            for _, tasks in found:
                await tasks.close()


async def call(rate: LeasedRate) -> bool:
    """Whether a call was sent, after it has waited for a lease if need be."""
    while not rate.admits(time.monotonic()):
        if not rate.waits(time.monotonic()):
            return False
        leased = asyncio.Event()
        rate.when_leased(leased.set)
        await leased.wait()
    rate.take(time.monotonic())
    return True


async def test_hosts_share_the_limit_of_an_upstream(tmp_path: Path) -> None:
    async with hosts(tmp_path, 3) as rates:
        began = time.monotonic()
        sent = sum(await asyncio.gather(*(call(rate) for _ in range(6) for rate in rates)))
        assert 3 <= sent <= PER_SECOND * (1 + time.monotonic() - began)


async def test_call_without_a_token_delays_those_of_all_hosts(tmp_path: Path) -> None:
    async with hosts(tmp_path, 2) as (one, other):
        began = time.monotonic()
        for _ in range(3 * int(PER_SECOND)):
            one.take(time.monotonic())

        async def is_paid() -> bool:
            return await call(one)

        await until(is_paid)
        # Twelve calls were sent and one more: the bucket had tokens for four of them.
        assert time.monotonic() - began >= (3 * int(PER_SECOND) + 1) / PER_SECOND - 1.0 - 0.05
        assert await until(lambda: call(other))
