"""The number of hosts: counted in Valkey, kept in the host's memory, and counted in Postgres while Valkey is away."""

from __future__ import annotations

from pathlib import Path

from proxy.compose.fleet import link_to
from proxy.store.postgres.fleet import FleetStore
from proxy.store.postgres.pool import Pool
from proxy.store.shared_memory import host_memory
from proxy.store.shared_memory.host_memory import HostMemory
from proxy.store.shared_memory.leased_buckets import LeasedBuckets
from proxy.store.shared_memory.rate_buckets import create
from proxy.store.valkey.live_hosts import LiveHosts
from proxy.tasks import Tasks
from tests.redis_server import redis_server, require_redis
from tests.service import until

NOWHERE = "valkey://127.0.0.1:1"


async def no_postgres(_: str) -> int:
    return 0


async def test_worker_that_starts_while_valkey_is_away_has_the_number_that_the_host_knew(tmp_path: Path) -> None:
    require_redis()
    memory = HostMemory(host_memory.create())
    async with redis_server(tmp_path) as redis:
        tasks = Tasks()
        for name in ("one", "other"):
            link = link_to(redis.url)
            tasks.start(f"link {name}", link.run)
            tasks.start(name, LiveHosts(link, name, [], memory.hosts, no_postgres).run)
        await until(lambda: memory.hosts[0] == 2)
        await tasks.close()
    buckets = LeasedBuckets.of_accounts(create(), memory.fd, alone=True)
    started = LiveHosts(link_to(NOWHERE), "one", [buckets], HostMemory(memory.fd).hosts, no_postgres)
    assert (started.count, buckets.least_share) == (2, 0.5)


async def test_host_that_starts_while_valkey_is_away_counts_the_others_in_postgres(pool: Pool) -> None:
    store = FleetStore(pool)
    for number, (instance, role) in enumerate(
        [("b", "gateway"), ("b", "gateway"), ("c", "gateway"), ("d", "follower")]
    ):
        await store.write_process(str(number), {"host": "same", "instance": instance, "role": role, "pid": number})
    memory = HostMemory(host_memory.create())
    hosts = LiveHosts(link_to(NOWHERE), "a", [], memory.hosts, store.count_others)
    await hosts.renew()
    assert hosts.count == 3
    only_counts = LiveHosts(link_to(NOWHERE), "", [], HostMemory(host_memory.create()).hosts, store.count_others)
    await only_counts.renew()
    assert only_counts.count == 2
