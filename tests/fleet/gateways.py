"""Real gateways on one database: each is a `serve` with workers of its own, as on a host of its own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from proxy.dev.postgres import Postgres
from tests.database import another
from tests.flows import production
from tests.flows.production import Production, settings_text
from tests.flows.upstream import Upstream
from tests.http_client import HttpClient, Reply, fresh_call, post, request, rpc
from tests.redis_server import RedisServer
from tests.service import command_here, owner_of, until

SEPOLIA, LIMITED = "ethereum/sepolia", "ethereum/hoodi"
# Calls per second that the upstream of LIMITED takes.
UPSTREAM_RATE = 20
# Failed authentications that an address may make in a minute.
FAILURES = 200
_serial = itertools.count(1)
HANDSHAKE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec_WebSocket_Version": "13",
    "Sec_WebSocket_Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


@dataclass
class Gateways:
    """Running gateways, and the means to create accounts for them."""

    config: Path
    hosts: list[Production] = field(default_factory=list)

    async def run(self, *words: str) -> Any:
        done = await asyncio.to_thread(command_here, *words, "--config", str(self.config), "--json")
        assert done.returncode == 0, done.stderr
        return orjson.loads(done.stdout)

    async def new_key(self, plan: str, own_rate: int = 0) -> str:
        """A key of a new account. `own_rate`: its own limit of requests per second."""
        email = f"fleet{next(_serial)}@example.com"
        account = await self.run("accounts", "create", "--name", "A", "--email", email, "--plan", plan)
        words = ("--requests-per-second", str(own_rate)) if own_rate else ()
        made = await self.run("keys", "create", "--account", account["id"], *words)
        return str(made["key"])


@dataclass
class Fleet:
    """Gateways that share a Redis. One of their upstreams has a rate limit."""

    gateways: Gateways
    redis: RedisServer
    limited: Upstream

    async def key(self, plan: str, own_rate: int = 0) -> str:
        """A new key that every host knows."""
        made = await self.gateways.new_key(plan, own_rate)
        for host in self.gateways.hosts:
            async with await HttpClient.open(host.port) as client:
                await known_everywhere([client], made)
        return made

    async def volley(self, key: str, count: int, network: str = SEPOLIA) -> list[list[int]]:
        """Make this many calls on every host at the same time, each on its own connection; the statuses by host."""
        return await asyncio.gather(*(self.calls(host, key, count, network) for host in self.gateways.hosts))

    async def calls(
        self, host: Production, key: str, count: int, network: str = SEPOLIA, *, call: Callable[[], bytes] = fresh_call
    ) -> list[int]:
        clients = [await HttpClient.open(host.port) for _ in range(count)]
        data = [post(call(), key=key, network=network) for _ in clients]
        replies = await asyncio.gather(*(client.send(each) for client, each in zip(clients, data, strict=True)))
        for client in clients:
            await client.close()
        return [reply.status for reply in replies]


@asynccontextmanager
async def gateways(
    postgres: Postgres, room: Path, upstream_url: str, *, hosts: int, workers: int, more: str = ""
) -> AsyncIterator[Gateways]:
    """Gateways on a new database. `more` is added to their settings; it ends in the table of the upstream."""
    name = f"fleet_{room.name.replace('-', '_')}"
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(another(postgres.url, name))
        config = room / "penstock.toml"
        config.write_text(_settings(database, upstream_url, workers, more))
        done = await asyncio.to_thread(command_here, "migrate", "--config", str(config))
        assert done.returncode == 0, done.stderr
        found = Gateways(config)
        for number in range(hosts):
            running = production.launch(config, room / f"log{number}", role="gateway")
            stack.push_async_callback(production.stop, running)
            found.hosts.append(running)
        for running in found.hosts:
            await production.ready(running)
        yield found


def _settings(database: str, upstream_url: str, workers: int, more: str) -> str:
    text = settings_text(database, upstream_url, workers=workers)
    return text.replace("[keys]", f"[keys]\nauth_failures_per_minute = {FAILURES}") + more


async def each_worker(running: Production) -> dict[int, HttpClient]:
    """A connection to each worker of a host, by process id."""
    pids = running.worker_pids()
    held: dict[int, HttpClient] = {}
    while len(held) < len(pids):
        client = await HttpClient.open(running.port)
        pid = await until(lambda client=client: owner_of(running.port, client.port, pids))
        if pid in held:
            await client.close()
        else:
            held[pid] = client
    return held


async def known_everywhere(clients: Iterable[HttpClient], key: str) -> None:
    """Wait until the workers of these connections know the key. The requests name an unknown network, so they cost nothing."""
    data = post(rpc("eth_chainId"), key=key, network="dev/nowhere")
    for client in clients:

        async def knows(client: HttpClient = client) -> bool:
            return (await client.send(data)).status not in (401, 429)

        await until(knows, every_s=0.1)


async def open_socket(client: HttpClient, key: str, network: str = SEPOLIA) -> Reply:
    """Send a WebSocket handshake on the connection and return the reply."""
    return await client.send(request("GET", f"/v1/ws/{network}", b"", key=key, **HANDSHAKE))
