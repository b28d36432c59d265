"""Builds what makes many hosts act as one service, if a Valkey for limits is configured."""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
from typing import Any

from proxy import telemetry
from proxy.data_files import SCHEMAS
from proxy.services.rpc.head_exchange import HeadExchange
from proxy.services.rpc.networks import Networks
from proxy.settings import Settings
from proxy.store.postgres.fleet import FleetStore
from proxy.store.postgres.pool import Pool
from proxy.store.shared_memory.host_memory import HOST, HostMemory
from proxy.store.shared_memory.leased_buckets import LeasedBuckets
from proxy.store.shared_memory.rate_buckets import RateBuckets, SharedBuckets, UnsharedBuckets
from proxy.store.valkey.fleet_counts import FleetCounts
from proxy.store.valkey.fleet_failures import FleetFailures
from proxy.store.valkey.lease_client import LeaseClient
from proxy.store.valkey.live_hosts import LiveHosts
from proxy.store.valkey.upstream_leases import UpstreamLeases
from proxy.store.valkey.valkey_address import TAG, address_of
from proxy.store.valkey.valkey_link import ValkeyLink
from proxy.tasks import Tasks

# A worker starts without Valkey if it does not answer within this time.
START_S = 1.0
MEASURE_S = 1.0
FUNCTIONS = SCHEMAS / "valkey" / "functions.lua"


def buckets_of(settings: Settings, fd: int, memory: HostMemory, *, alone: bool) -> RateBuckets:
    """The buckets of accounts and keys: of this host, or of all hosts."""
    if settings.valkey.limits_url:
        return LeasedBuckets.of_accounts(fd, memory.fd, alone=alone)
    return (UnsharedBuckets if alone else SharedBuckets)(fd)


@functools.cache
def host_id() -> str:
    """The identity of this host. A process without a supervisor counts as one."""
    return os.environ.get(HOST) or secrets.token_hex(8)


def link_to(url: str) -> ValkeyLink:
    return ValkeyLink(address_of(url), FUNCTIONS.read_text())


def account_leases(link: ValkeyLink, buckets: LeasedBuckets) -> LeaseClient:
    return LeaseClient(link, buckets, lambda bucket_index: f"{TAG}:lease:{bucket_index}")


class UpstreamLimits:
    """The limits of upstreams over all hosts, for a process that serves no clients."""

    def __init__(self, url: str, memory: HostMemory, pool: Pool) -> None:
        self._link = link_to(url)
        self.leases = UpstreamLeases(self._link, memory)
        self._hosts = LiveHosts(self._link, "", [self.leases.buckets], memory.hosts, FleetStore(pool).count_others)

    def __repr__(self) -> str:
        return f"<UpstreamLimits {self.leases!r}>"

    def hosts(self) -> int:
        return self._hosts.count

    def start(self, tasks: Tasks) -> None:
        tasks.start("valkey for upstreams", self._link.run)
        tasks.start("upstream leases", self.leases.client.run)
        tasks.start("hosts", self._hosts.run)


class FleetFeature:
    def __init__(
        self, settings: Settings, buckets: LeasedBuckets, memory: HostMemory, pool: Pool, tasks: Tasks
    ) -> None:
        self._tasks = tasks
        self.link = link_to(settings.valkey.limits_url)
        self.host = host_id()
        self.heads = HeadExchange(self.link, self.host, tasks)
        self.leases = account_leases(self.link, buckets)
        self.upstreams = UpstreamLeases(self.link, memory)
        shared = [buckets, self.upstreams.buckets]
        self._hosts = LiveHosts(self.link, self.host, shared, memory.hosts, FleetStore(pool).count_others)
        self.counts = FleetCounts(self.link, memory.counts, self.host, self.hosts)
        per_minute = settings.keys.auth_failures_per_minute
        self.failures = FleetFailures(self.link, memory.addresses, self.host, per_minute)

    def __repr__(self) -> str:
        return f"<FleetFeature {self.leases!r}>"

    def hosts(self) -> int:
        return self._hosts.count

    def report(self) -> dict[str, Any]:
        """The state of this worker's connection to Valkey, for operators."""
        return {
            "state": "up" if self.link.is_up else "away",
            "round_trip_ms": round(self.link.round_trip_s * 1000, 3),
            "hosts": self.hosts(),
            "leases": len(self.leases) + len(self.upstreams.client),
            "asked": self.leases.asked + self.upstreams.client.asked,
        }

    async def _measure(self) -> None:
        """A supervised loop."""
        asked = 0
        while True:
            report = self.report()
            telemetry.valkey_up.set(self.link.is_up)
            telemetry.valkey_round_trip_seconds.set(self.link.round_trip_s)
            telemetry.fleet_hosts.set(report["hosts"])
            telemetry.leases_held.set(report["leases"])
            telemetry.lease_asks_total.inc(report["asked"] - asked)
            asked = report["asked"]
            await asyncio.sleep(MEASURE_S)

    async def start(self, networks: Networks) -> None:
        tasks = self._tasks
        tasks.start("valkey", self.link.run)
        await self.link.until_up(START_S)
        await self._hosts.renew()
        await self.heads.start({name: route.state for name, route in networks.routes.items()})
        tasks.start("leases", self.leases.run)
        tasks.start("upstream leases", self.upstreams.client.run)
        tasks.start("presence", self._hosts.run)
        tasks.start("fleet counts", self.counts.run)
        tasks.start("fleet failures", self.failures.run)
        tasks.start("fleet metrics", self._measure)
