"""Limits that all workers of a host share: an upstream's rate, failed authentications, sockets and subscriptions."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterable

import pytest

from tests.database import Server
from tests.fleet.gateways import FAILURES, Gateways, each_worker, gateways, known_everywhere, open_socket
from tests.flows.production import Production
from tests.flows.upstream import Upstream
from tests.http_client import HttpClient, fresh_call, post
from tests.service import until

SEPOLIA = "ethereum/sepolia"
WORKERS = 3
UPSTREAM_RATE = 5
# Limits of the free plan.
SOCKETS = 20
MORE = f"""
requests_per_second = {UPSTREAM_RATE}
"""


@pytest.fixture(scope="module")
async def shared(
    server: Server, upstream_server: Upstream, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateways]:
    room = tmp_path_factory.mktemp("shared-on-host")
    async with gateways(server.postgres, room, upstream_server.url, hosts=1, workers=WORKERS, more=MORE) as found:
        yield found


@pytest.fixture
def host(shared: Gateways, upstream: Upstream) -> Production:
    return shared.hosts[0]


async def test_upstream_rate_holds_for_all_workers_together(
    shared: Gateways, host: Production, upstream: Upstream
) -> None:
    key = await shared.new_key("enterprise")
    clients = await each_worker(host)
    await known_everywhere(clients.values(), key)
    before, began = upstream.calls, time.monotonic()
    for _ in range(UPSTREAM_RATE):
        calls = [each.send(post(fresh_call(), key=key, network=SEPOLIA)) for each in clients.values()]
        await asyncio.gather(*calls)
    sent, took_s = upstream.calls - before, time.monotonic() - began
    # Workers that send at the same moment may each send one call more.
    assert 0 < sent <= UPSTREAM_RATE * (1 + took_s) + WORKERS
    await close(clients.values())


async def test_failed_authentications_are_counted_over_all_workers(host: Production) -> None:
    clients = await each_worker(host)
    wrong = post(fresh_call(), key="svc_live_wrong", network=SEPOLIA)
    began = time.monotonic()
    statuses = [(await each.send(wrong)).status for _ in range(FAILURES) for each in clients.values()]
    allowed = FAILURES * (1 + (time.monotonic() - began) / 60) + 1
    assert statuses.count(401) <= allowed
    assert set(statuses) == {401, 429}
    await close(clients.values())


async def test_sockets_are_counted_over_all_workers_and_those_of_a_killed_worker_are_not(
    shared: Gateways, host: Production
) -> None:
    key = await shared.new_key("free")
    clients = await each_worker(host)
    await known_everywhere(clients.values(), key)
    found = await open_sockets(host, key)
    assert len(found) == SOCKETS
    victim = next(iter(clients))
    os.kill(victim, signal.SIGKILL)
    await until(lambda: len(host.worker_pids()) == WORKERS and victim not in host.worker_pids(), within_s=40.0)
    await until(clients[victim].reader.at_eof)
    alive = [client for client in found if not client.reader.at_eof()]
    more = await open_sockets(host, key)
    assert len(alive) + len(more) == SOCKETS
    await close([*clients.values(), *found, *more])


async def open_sockets(host: Production, key: str) -> list[HttpClient]:
    """Open sockets until one is refused. The kernel spreads them over the workers."""
    found: list[HttpClient] = []
    while True:
        client = await HttpClient.open(host.port)
        reply = await open_socket(client, key)
        if reply.status == 429:
            await client.close()
            return found
        assert reply.status == 101, reply
        found.append(client)


async def close(clients: Iterable[HttpClient]) -> None:
    for client in clients:
        await client.close()
