"""Leases on a real Redis: hosts in one process, each with its own memory, share limits and lose nothing."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from proxy.compose.fleet import account_leases, link_to
from proxy.core.limits import BucketRates
from proxy.store.shared_memory import host_memory, rate_buckets
from proxy.store.shared_memory.host_memory import HostMemory
from proxy.store.shared_memory.lease_records import (
    ALL,
    ANSWERED_AT,
    CELLS,
    DRY_UNTIL,
    EDGE_R,
    EDGE_U,
    FLEET_EDGE,
    MINE,
    READY_R,
    READY_U,
    RECORD_BYTES,
    RESERVE_R,
    RESERVE_U,
    UNTIL,
    Lease,
    LeaseGrant,
)
from proxy.store.shared_memory.leased_buckets import ASK, LeasedBuckets
from proxy.store.valkey import valkey_link
from proxy.store.valkey.lease_client import LATEST_S, LEASE
from proxy.store.valkey.live_hosts import LiveHosts
from proxy.tasks import Tasks
from tests.redis_server import redis_server, require_redis
from tests.service import until

RATE = BucketRates(7, 20, 400)
UNITS = 20
OWN = BucketRates(8, 5, 400)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a reply may take long. That is another test's subject."""
    require_redis()
    monkeypatch.setattr(valkey_link, "LATE_S", 5.0)


async def no_postgres(_: str) -> int:
    return 0


class Host:
    """What a worker has of a host."""

    def __init__(self, url: str, number: int) -> None:
        memory = HostMemory(host_memory.create())
        self.buckets = LeasedBuckets.of_accounts(rate_buckets.create(), memory.fd, alone=number % 2 == 0)
        self.buckets.reserve_rates(RATE, OWN)
        self.link = link_to(url)
        self.leases = account_leases(self.link, self.buckets)
        self.hosts = LiveHosts(self.link, f"host{number}", [self.buckets], memory.hosts, no_postgres)

    async def call(self, *, own: bool = False) -> bool:
        """Whether a call is admitted, after it has waited for a lease if need be."""
        while (wait := self._take(own=own)) == ASK:
            limit = self.leases.lacking(RATE, OWN, 1, UNITS) if own else RATE
            leased = asyncio.Event()
            self.leases.wait(limit.bucket_index, (limit.request_s, UNITS * limit.unit_s), leased.set)
            await leased.wait()
        return wait == 0.0

    def _take(self, *, own: bool) -> float:
        now = time.monotonic()
        if own:
            return self.buckets.take_both(RATE, OWN, now, requests=1, units=UNITS)
        return self.buckets.take(RATE.bucket_index, now, RATE.request_s, UNITS * RATE.unit_s)


@asynccontextmanager
async def hosts(room: Path, count: int) -> AsyncIterator[list[Host]]:
    async with redis_server(room) as redis:
        found, tasks = [Host(redis.url, number) for number in range(count)], Tasks()
        for number, host in enumerate(found):
            tasks.start(f"valkey {number}", host.link.run)
            tasks.start(f"leases {number}", host.leases.run)
            tasks.start(f"presence {number}", host.hosts.run)
        try:
            await until(lambda: all(host.hosts.count == count for host in found))
            yield found
        finally:
            await tasks.close()


async def volley(found: list[Host], calls: int, *, own: bool = False) -> tuple[int, float]:
    """How many of the calls, made on all hosts at once, were admitted, and the time that took."""
    began = time.monotonic()
    admitted = await asyncio.gather(*(host.call(own=own) for _ in range(calls) for host in found))
    return sum(admitted), time.monotonic() - began


@pytest.mark.parametrize("own", [False, True])
async def test_hosts_share_one_limit(tmp_path: Path, own: bool) -> None:
    rate = 5 if own else 20
    async with hosts(tmp_path, 3) as found:
        admitted, took_s = await volley(found, rate, own=own)
        assert rate - 1 <= admitted <= rate * (1 + took_s)


async def test_one_host_gets_what_another_has_leased_and_does_not_use(tmp_path: Path) -> None:
    async with hosts(tmp_path, 2) as (one, other):
        assert await one.call()

        async def gets_all() -> bool:
            await asyncio.sleep(1.2)
            return (await volley([other], 20))[0] == 20

        await until(gets_all)


async def test_tokens_in_advance_are_for_whole_calls(tmp_path: Path) -> None:
    async with hosts(tmp_path, 1) as (host,):
        await until(lambda: host.link.is_up)
        costs, reports = (f"{RATE.request_s:.9g}", f"{RATE.unit_s:.9g}"), ["0"] * 10
        words = ("FCALL", LEASE, "1", "{penstock}:lease:whole", *costs, "0", "0", "1", str(UNITS), *reports)
        replies = await asyncio.gather(*(host.link.ask(*words) for _ in range(25)))
        granted = [reply[:2] for reply in replies]
        assert [1, UNITS] in granted
        assert [0, 0] in granted
        assert all(units == UNITS * requests for requests, units in granted), granted


async def test_valkey_is_not_asked_for_a_limit_that_is_not_used(tmp_path: Path) -> None:
    async with hosts(tmp_path, 1) as (host,):
        await until(lambda: not host.buckets.away)
        assert await host.call()
        assert len(host.leases) == 1
        await until(lambda: len(host.leases) == 0)


async def test_refund_can_be_spent_again(tmp_path: Path) -> None:
    async with hosts(tmp_path, 1) as (host,):
        admitted, took_s = await volley([host], 30)
        assert 20 <= admitted <= 20 * (1 + took_s)
        host.buckets.give_back(RATE.bucket_index, RATE.request_s, UNITS * RATE.unit_s)
        assert await host.call()


def test_numbers_that_are_read_in_place_are_those_of_the_fields() -> None:
    cells = memoryview(bytearray(2 * RECORD_BYTES)).cast("d")
    cells[CELLS:] = memoryview(array("d", range(CELLS)))
    lease = Lease(cells, 1)
    assert (lease.until, lease.fleet_edge, lease.dry_until) == (UNTIL, FLEET_EDGE, DRY_UNTIL)
    assert (lease.requests.ready, lease.requests.reserve, lease.requests.edge) == (READY_R, RESERVE_R, EDGE_R)
    assert (lease.units.ready, lease.units.reserve, lease.units.edge) == (READY_U, RESERVE_U, EDGE_U)
    assert (lease.answered_at, lease.mine, lease.all) == (ANSWERED_AT, MINE, ALL)
    lease.write(cells, 0)
    assert cells[:CELLS].tolist() == [*range(CELLS)]


@pytest.mark.parametrize("behind", [0, 1, 2, -1])
def test_lease_of_an_earlier_epoch_is_kept_after_the_later_one_has_ended(behind: int) -> None:
    """Valkey's clock was set back: its epochs come again."""
    memory = memoryview(bytearray(RECORD_BYTES)).cast("d")
    lease = Lease(memory, 0)
    lease.grant(10.0, LeaseGrant(0.5, 0.5, 10.8, 0.0, 2019, 10, 10.0, 0.5), 0.0)
    lease.grant(11.0, LeaseGrant(0.5, 0.5, 11.8, 0.0, 2019 - behind, 10, 20.0, 0.5), 0.0)
    assert not lease.lacks((0.5, 0.5), 11.5)
    assert lease.lacks((0.5, 0.5), 11.9)


def test_share_of_a_low_limit_admits_whole_calls() -> None:
    host = LeasedBuckets.of_accounts(rate_buckets.create(), host_memory.create(), alone=True)
    slow = BucketRates(9, 2, 40)
    host.reserve_rates(slow, None)
    host.least_share = 1 / 3
    # Two thirds of a call per second: the first one at once, then one every 1.5 seconds.
    times = [100.0 + step / 10 for step in range(61)]
    admitted = [now for now in times if host.take(9, now, slow.request_s, 20 * slow.unit_s) == 0.0]
    assert admitted == pytest.approx([100.0, 101.5, 103.0, 104.5, 106.0])


async def test_host_without_redis_uses_its_share(tmp_path: Path) -> None:
    async with hosts(tmp_path, 2) as (one, other):
        await volley([one], 20)
        for host in (one, other):
            host.buckets.away = True
        began = time.monotonic()
        assert one.buckets.lease(RATE.bucket_index).share(0.5) > 0.9
        assert other.buckets.lease(RATE.bucket_index).share(0.5) == 0.5
        await asyncio.sleep(0.3)
        admitted = sum([await other.call() for _ in range(40)])
        assert 0 < admitted <= 10 * (1 + time.monotonic() - began) + 1


async def test_call_that_a_busy_process_charges_late_waits_for_its_lease(tmp_path: Path) -> None:
    """The limit is far from exceeded, so the call must not be refused. It waits once more at most."""
    async with hosts(tmp_path, 1) as (host,):
        now = time.monotonic()
        assert host.leases.may_wait(now - 0.1)
        assert not host.leases.may_wait(now - LATEST_S)


async def test_call_does_not_wait_for_the_reply_to_another_and_then_for_its_own(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as redis:
        host, tasks = Host(redis.url, 0), Tasks()
        tasks.start("valkey", host.link.run)
        await until(lambda: host.link.is_up)
        await until(lambda: not host.buckets.away)
        redis.freeze()
        leased = [asyncio.Event(), asyncio.Event()]
        for asks, event in enumerate(leased, 1):
            host.leases.wait(RATE.bucket_index, (RATE.request_s, UNITS * RATE.unit_s), event.set)
            await until(lambda asks=asks: host.leases.asked == asks)
        redis.thaw()
        for event in leased:
            await event.wait()
        await tasks.close()
