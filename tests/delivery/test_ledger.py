"""The ledger: whatever is killed, every event of the chain arrives, none that did not happen stands, and each has one body.

The service runs as an operator runs it. While the chain grows and turns back, its follower, its deliverer, its workers and its
database are killed with SIGKILL, at random. LEDGER_KILLS says how often, LEDGER_SEED repeats a run.
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

from proxy.store import migrate
from tests import database as database_room
from tests.chain_upstream import ZERO, ChainUpstream, Event, LittleChain, address, erc20, erc721, erc1155
from tests.database import Server, connected
from tests.delivery.ledger import Ledger, expected
from tests.flows import production
from tests.flows.production import PEPPER, Production
from tests.rpc_upstreams import scripted
from tests.service import children, command, until

NETWORK, CHAIN = "dev/mainnet", "dev"
COIN, ART, OTHER = address(100), address(101), address(102)
KILLS = int(os.environ.get("LEDGER_KILLS", "8"))
SEED = int(os.environ.get("LEDGER_SEED", "0")) or random.randrange(1, 10**6)
VICTIMS = ("follower", "deliverer", "worker", "database")
# Deliveries under way at once, in the one deliverer there is: what a death can double.
IN_FLIGHT = 16
# Everything that was killed is a program that starts, on a busy machine; and what was under way waits for its lease to end.
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
[egress]
allow = ["127.0.0.0/8"]
http = true
ports = []
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


def some_events(chance: random.Random) -> list[Event]:
    who = [address(n) for n in range(6)]
    made = []
    for _ in range(chance.randrange(10)):
        sender, recipient = chance.choice([*who, ZERO]), chance.choice(who)
        made.append(
            chance.choice(
                (
                    erc20(COIN, sender, recipient, chance.randrange(1000)),
                    erc20(OTHER, sender, recipient, chance.randrange(1000)),
                    erc721(ART, sender, recipient, chance.randrange(10**9)),
                    erc1155(ART, sender, recipient, chance.randrange(10**9), chance.randrange(1, 9)),
                )
            )
        )
    return made


class Run:
    """One service under fire."""

    def __init__(self, chance: random.Random, chain: LittleChain, server: Server, running: Production) -> None:
        self.chance = chance
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
        return [pid for pid, line in children(self.running.process.pid) if word in line]

    async def kill(self) -> None:
        victim = self.chance.choice(VICTIMS)
        if victim == "database":
            process = self.server.postgres.child.process
            assert process is not None
            process.send_signal(signal.SIGKILL)
            await process.wait()
            await asyncio.sleep(self.chance.random() * 0.5)
            await self.server.postgres.start()
        else:
            await until(lambda: self.pids(victim), within_s=30.0)
            os.kill(self.chance.choice(self.pids(victim)), signal.SIGKILL)
        self.kills.append(victim)

    async def live(self) -> None:
        """The chain grows, and now and then turns back."""
        while not self.over:
            if self.chance.random() < 0.15 and self.chain.head > 8:
                depth = self.chance.randrange(1, 8)
                self.dropped += depth
                self.chain.drop(depth)
                self.chain.mine(*(some_events(self.chance) for _ in range(depth)))
            self.chain.mine(some_events(self.chance))
            # Slowly enough for the follower to have been there: what it never saw it need not take back.
            await asyncio.sleep(0.25)

    async def ask(self, webhooks: list[str]) -> None:
        """Owners send tests through the workers: one that is accepted must arrive."""
        headers = {"X-API-Key": self.running.key}
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=10)) as session:
            while not self.over:
                url = f"http://127.0.0.1:{self.running.port}/v1/webhooks/{self.chance.choice(webhooks)}/test"
                try:
                    async with session.post(url, json={}) as response:
                        said = await response.json()
                        if response.status == 202:
                            self.sent.add(said["event_id"])
                        else:
                            assert response.status in (500, 503), said
                            self.unclear += 1
                except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
                    self.unclear += 1
                await asyncio.sleep(0.2)


@asynccontextmanager
async def receiving(ledger: Ledger) -> AsyncIterator[None]:
    application = web.Application()
    application.router.add_post("/{webhook}", ledger.take)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.05)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    ledger.port = runner.addresses[0][1]
    yield
    await runner.cleanup()


async def subscribed(running: Production, ledger: Ledger) -> list[str]:
    """Three webhooks, made through the API before the first block that matters."""
    wanted: dict[str, dict[str, Any]] = {
        "NEW_BLOCK": {},
        "log": {"addresses": ["0x" + COIN.hex()]},
        "nft_transfer": {"contracts": ["0x" + ART.hex()]},
    }
    made = []
    async with aiohttp.ClientSession(headers={"X-API-Key": running.key}) as session:
        for event_type, config in wanted.items():
            body = {
                "url": f"http://127.0.0.1:{ledger.port}/{event_type}",
                "chain": CHAIN,
                "event_type": event_type,
                "config": config,
            }
            async with session.post(f"http://127.0.0.1:{running.port}/v1/webhooks", json=body) as response:
                said = await response.json()
                assert response.status == 201, said
            ledger.secrets[event_type] = said["signing_secret"]
            made.append(said["id"])
    return made


async def key_of(config: Path) -> str:
    def ask(*words: str) -> Any:
        done = command(*words, "--config", str(config), "--json")
        assert done.returncode == 0, done.stderr
        return orjson.loads(done.stdout)

    named = ("--name", "L", "--email", "l@example.com", "--plan", "enterprise")
    account = await asyncio.to_thread(ask, "accounts", "create", *named)
    return str((await asyncio.to_thread(ask, "keys", "create", "--account", account["id"]))["key"])


@pytest.mark.timeout(120 + KILLS * 15)
async def test_ledger_comes_out_even(tmp_path: Path) -> None:
    print(f"seed {SEED}, {KILLS} kills")
    chance = random.Random(SEED)
    chain, ledger = LittleChain(), Ledger(tmp_path / "ledger", random.Random(SEED))
    async with (
        database_room.running() as server,
        scripted(1, chain, ChainUpstream) as (upstream,),  # type: ignore[arg-type]
        receiving(ledger),
    ):
        async with connected(server.postgres.url) as connection:
            await migrate.migrate(connection)
        config = tmp_path / "config.toml"
        config.write_text(settings(server.postgres.url, upstream.url))
        running = await production.start(config, tmp_path / "log", await key_of(config))
        try:
            webhooks = await subscribed(running, ledger)
            # What was there before somebody asked to be told is not told.
            first = chain.head
            run = Run(chance, chain, server, running)
            async with asyncio.TaskGroup() as group:
                group.create_task(run.live())
                group.create_task(run.ask(webhooks))
                for _ in range(KILLS):
                    await asyncio.sleep(0.3 + chance.random() * 1.5)
                    await run.kill()
                await asyncio.sleep(1.0)
                run.over = True
            wanted = {fact for fact in expected(chain, coin=COIN, art=ART) if fact[0] != "block" or fact[2] > first}

            def is_even() -> bool:
                book = ledger.read()
                return {*book.facts()} == wanted and run.sent <= book.tests

            began = time.monotonic()
            try:
                await until(is_even, within_s=SETTLED_S, every_s=0.5)
            except AssertionError:
                pass  # what is missing, or too much, is said below
            took_s = time.monotonic() - began
        finally:
            code = await production.stop(running)
    book = ledger.read()
    facts = book.facts()
    print(
        f"kills: {run.kills}; {chain.head} blocks, {run.dropped} dropped; "
        f"{len(wanted)} events expected, settled in {took_s:.1f} s"
    )
    print(f"{len(book.bodies)} told, {len(book.taken_back)} taken back, {book.doubled} doubled, {len(run.sent)} tests")
    assert wanted - {*facts} == set(), f"not acknowledged (seed {SEED})"
    assert {*facts} - wanted == set(), f"acknowledged and not expected (seed {SEED})"
    assert max(facts.values(), default=0) == 1, f"told twice under two names (seed {SEED})"
    assert all(len(digests) == 1 for digests in book.digests.values()), f"two bodies under one name (seed {SEED})"
    assert run.sent <= book.tests, f"accepted and not sent (seed {SEED})"
    assert len(book.tests - run.sent) <= run.unclear, f"sent and not asked for (seed {SEED})"
    assert book.doubled <= IN_FLIGHT * len(run.kills), f"more repeated than was under way (seed {SEED})"
    assert code == 0
