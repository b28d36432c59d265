"""Whichever process is killed, every event of the chain is delivered, false ones are corrected, and each has one body.

The service runs as in production. While the chain grows and reorganises, its follower, deliverer, workers and database are
killed with SIGKILL at random. AUDIT_KILLS sets the number of kills, AUDIT_SEED repeats a run.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from tests import database as database_room
from tests.chain_upstream import ZERO, ChainUpstream, Event, LittleChain, address, erc20, erc721, erc1155
from tests.database import Server, connected
from tests.delivery.audit import RecordingReceiver, expected
from tests.flows import production
from tests.flows.production import OPEN_EGRESS, PEPPER, Production
from tests.rpc_upstreams import scripted
from tests.service import command_here, processes_named, until

NETWORK, CHAIN = "dev/mainnet", "dev"
COIN, ART, OTHER = address(100), address(101), address(102)
KILLS = int(os.environ.get("AUDIT_KILLS", "8"))
SEED = int(os.environ.get("AUDIT_SEED", "0")) or random.randrange(1, 10**6)
VICTIMS = ("follower", "deliverer", "worker", "database")
# Concurrent deliveries of the only deliverer: the most that one kill can duplicate.
IN_FLIGHT = 16
# Killed programs have to start again on a busy machine, and interrupted deliveries wait for their leases to expire.
SETTLED_S = 90.0


def settings(database_url: str, upstream_url: str) -> str:
    return f"""
[server]
port = 0
workers = 2
drain_s = 5.0
[metrics]
port = 0
[database]
url = "{database_url}"
[keys]
pepper = "{PEPPER}"
{OPEN_EGRESS}
[follower.start]
"{NETWORK}" = 0
[webhooks]
in_flight = {IN_FLIGHT}
per_receiver = 8
timeout_s = 2.0
[[upstreams]]
network = "{NETWORK}"
url = "{upstream_url}"
"""


def some_events(rng: random.Random) -> list[Event]:
    holders = [address(n) for n in range(6)]
    made = []
    for _ in range(rng.randrange(10)):
        sender, recipient = rng.choice([*holders, ZERO]), rng.choice(holders)
        made.append(
            rng.choice(
                (
                    erc20(COIN, sender, recipient, rng.randrange(1000)),
                    erc20(OTHER, sender, recipient, rng.randrange(1000)),
                    erc721(ART, sender, recipient, rng.randrange(10**9)),
                    erc1155(ART, sender, recipient, rng.randrange(10**9), rng.randrange(1, 9)),
                )
            )
        )
    return made


class Run:
    """One service whose processes are killed."""

    def __init__(self, rng: random.Random, chain: LittleChain, server: Server, running: Production) -> None:
        self.rng = rng
        self.chain = chain
        self.server = server
        self.running = running
        self.kills: list[str] = []
        self.sent: set[str] = set()
        self.unclear = 0
        self.dropped = 0
        self.over = False

    def pids(self, victim: str) -> list[int]:
        word = "worker" if victim == "worker" else f"background {victim}"
        return processes_named(word, self.running.process.pid)

    async def kill(self) -> None:
        victim = self.rng.choice(VICTIMS)
        if victim == "database":
            process = self.server.postgres.child.process
            assert process is not None
            process.send_signal(signal.SIGKILL)
            await process.wait()
            await asyncio.sleep(self.rng.random() * 0.5)
            await self.server.postgres.start()
        else:
            await until(lambda: self.pids(victim), within_s=30.0)
            os.kill(self.rng.choice(self.pids(victim)), signal.SIGKILL)
        self.kills.append(victim)

    async def grow_chain(self) -> None:
        """Extend the chain, sometimes after a reorganisation."""
        while not self.over:
            if self.rng.random() < 0.15 and self.chain.head > 8:
                depth = self.rng.randrange(1, 8)
                self.dropped += depth
                self.chain.drop(depth)
                self.chain.mine(*(some_events(self.rng) for _ in range(depth)))
            self.chain.mine(some_events(self.rng))
            # Slowly enough for the follower to index the blocks before they are dropped.
            await asyncio.sleep(0.25)

    async def send_tests(self, webhooks: list[str]) -> None:
        """Send test events through the workers. Every accepted one must arrive."""
        headers = {"X-API-Key": self.running.key}
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=10)) as session:
            while not self.over:
                url = f"http://127.0.0.1:{self.running.port}/v1/webhooks/{self.rng.choice(webhooks)}/test"
                try:
                    async with session.post(url, json={}) as response:
                        reply = await response.json()
                        if response.status == 202:
                            self.sent.add(reply["event_id"])
                        else:
                            assert response.status in (500, 503), reply
                            self.unclear += 1
                except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
                    self.unclear += 1
                await asyncio.sleep(0.2)


@asynccontextmanager
async def receiving(receiver: RecordingReceiver) -> AsyncIterator[None]:
    application = web.Application()
    application.router.add_post("/{webhook}", receiver.receive)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.05)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    receiver.port = runner.addresses[0][1]
    yield
    await runner.cleanup()


async def subscribed(running: Production, receiver: RecordingReceiver) -> list[str]:
    """Create three webhooks through the API."""
    configs: dict[str, dict[str, Any]] = {
        "NEW_BLOCK": {},
        "log": {"addresses": ["0x" + COIN.hex()]},
        "nft_transfer": {"contracts": ["0x" + ART.hex()]},
    }
    made = []
    async with aiohttp.ClientSession(headers={"X-API-Key": running.key}) as session:
        for event_type, config in configs.items():
            body = {
                "url": f"http://127.0.0.1:{receiver.port}/{event_type}",
                "chain": CHAIN,
                "event_type": event_type,
                "config": config,
            }
            async with session.post(f"http://127.0.0.1:{running.port}/v1/webhooks", json=body) as response:
                reply = await response.json()
                assert response.status == 201, reply
            receiver.secrets[event_type] = reply["signing_secret"]
            made.append(reply["id"])
    return made


async def key_of(config: Path) -> str:
    def cli_json(*words: str) -> Any:
        done = command_here(*words, "--config", str(config), "--json")
        assert done.returncode == 0, done.stderr
        return orjson.loads(done.stdout)

    named = ("--name", "L", "--email", "l@example.com", "--plan", "enterprise")
    account = await asyncio.to_thread(cli_json, "accounts", "create", *named)
    return str((await asyncio.to_thread(cli_json, "keys", "create", "--account", account["id"]))["key"])


async def is_followed(database_url: str, head: int) -> bool:
    """Whether the follower has written this block."""
    query = "select exists (select from followed_networks where network = $1 and block >= $2)"
    async with connected(database_url) as connection:
        return bool(await connection.fetchval(query, NETWORK, head))


@pytest.mark.timeout(120 + KILLS * 15)
async def test_every_event_is_delivered_despite_kills(tmp_path: Path) -> None:
    print(f"seed {SEED}, {KILLS} kills")
    rng = random.Random(SEED)
    chain, receiver = LittleChain(), RecordingReceiver(tmp_path / "receiver", random.Random(SEED))
    async with (
        database_room.running() as server,
        scripted(1, chain, ChainUpstream) as (upstream,),  # type: ignore[arg-type]
        receiving(receiver),
    ):
        config = tmp_path / "config.toml"
        config.write_text(settings(server.postgres.url, upstream.url))
        running = await production.start(config, tmp_path / "log", await key_of(config))
        try:
            # Blocks that are followed before the webhooks exist create no events.
            first = chain.head
            await until(lambda: is_followed(server.postgres.url, first))
            webhooks = await subscribed(running, receiver)
            run = Run(rng, chain, server, running)
            async with asyncio.TaskGroup() as group:
                group.create_task(run.grow_chain())
                group.create_task(run.send_tests(webhooks))
                for _ in range(KILLS):
                    await asyncio.sleep(0.3 + rng.random() * 1.5)
                    await run.kill()
                await asyncio.sleep(1.0)
                run.over = True
            expected_facts = {
                fact for fact in expected(chain, coin=COIN, art=ART) if fact[0] != "block" or fact[2] > first
            }

            def is_complete() -> bool:
                received = receiver.read()
                return {*received.facts()} == expected_facts and run.sent <= received.tests

            began = time.monotonic()
            try:
                await until(is_complete, within_s=SETTLED_S, every_s=0.5)
            except AssertionError:
                pass  # the assertions below name the difference
            took_s = time.monotonic() - began
        finally:
            code = await production.stop(running)
    received = receiver.read()
    facts = received.facts()
    print(
        f"kills: {run.kills}; {chain.head} blocks, {run.dropped} dropped; "
        f"{len(expected_facts)} events expected, settled in {took_s:.1f} s"
    )
    print(
        f"{len(received.bodies)} received, {len(received.withdrawn)} withdrawn, "
        f"{received.duplicates} duplicates, {len(run.sent)} tests"
    )
    assert expected_facts - {*facts} == set(), f"not acknowledged (seed {SEED})"
    assert {*facts} - expected_facts == set(), f"acknowledged and not expected (seed {SEED})"
    assert max(facts.values(), default=0) == 1, f"delivered twice under two ids (seed {SEED})"
    assert all(len(digests) == 1 for digests in received.digests.values()), f"two bodies with one id (seed {SEED})"
    assert run.sent <= received.tests, f"accepted and not sent (seed {SEED})"
    assert len(received.tests - run.sent) <= run.unclear, f"sent but not requested (seed {SEED})"
    assert received.duplicates <= IN_FLIGHT * len(run.kills), (
        f"more duplicates than concurrent deliveries (seed {SEED})"
    )
    assert code == 0
