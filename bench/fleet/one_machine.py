"""Starts every part of the fleet, shows who does what, breaks parts, and stops everything again."""

from __future__ import annotations

import asyncio
import random
import re
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp

from bench.fleet.caller import PACE, FleetCaller
from bench.fleet.database_pair import DatabasePair
from bench.fleet.ledger import FleetLedger
from bench.fleet.programs import NETWORK, PEPPER, FleetPart, balancer, free_ports, service, shared_settings, valkeys
from bench.fleet.socket_watch import SocketWatch
from bench.fleet.traffic import FleetTraffic
from bench.fleet.write_watch import WriteWatch
from proxy.store.postgres import migrate
from proxy.store.postgres.keys import KeyStore
from proxy.store.postgres.pool import Pool
from proxy.tasks import Tasks
from tests.chain_upstream import ChainUpstream, LittleChain
from tests.rpc_upstreams import scripted

# How many of each kind there are.
COUNTS = {"gateway": 3, "follower": 2, "deliverer": 2}
# The parts to break, in proportion.
VICTIMS = ("gateway", "follower", "deliverer", "valkey", "postgres")
# Longest wait for a part to recover, and for the last events.
RECOVERY_S, SETTLE_S = 120.0, 60.0
PAUSE_S = (3.0, 8.0)
# Calls per second, unless others are asked for.
RATE = 400.0
# Keys of the callers. The balancer sends the calls of a key to one gateway, so a single key would leave the others idle.
KEYS = 12


class FleetOnOneMachine:
    def __init__(self, home: Path, *, counts: dict[str, int] | None = None, rate: float = RATE) -> None:
        """`rate`: calls per second."""
        self._home = home
        self._counts = counts or COUNTS
        self._callers = max(1, round(rate / PACE))
        self._tasks = Tasks()
        self._began = time.monotonic()
        self.database = DatabasePair(home)
        self.chain = LittleChain()
        self.ledger = FleetLedger()
        self.parts: list[FleetPart] = []
        self.port = 0
        self._keys: list[str] = []

    def __repr__(self) -> str:
        return f"<FleetOnOneMachine {len(self.parts)} parts, {self.ledger.answered} calls>"

    @property
    def key(self) -> str:
        """One of the callers' keys."""
        return self._keys[0]

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    async def start(self, stack: AsyncExitStack) -> None:
        stack.push_async_callback(self.database.stop)
        await self.database.start()
        (self.upstream,) = await stack.enter_async_context(scripted(1, self.chain, ChainUpstream))  # type: ignore[arg-type]
        self._keys = await self._prepared()
        self.parts = self._parts(self.upstream.url)
        for part in self.parts:
            stack.push_async_callback(part.child.stop)
        stack.push_async_callback(self._tasks.close)
        for kinds in (("valkey",), ("sentinel",), tuple(COUNTS), ("balancer",)):
            await asyncio.gather(*[part.child.start() for part in self.parts if part.kind in kinds])
        for part in self.parts:
            self._tasks.start(part.name, part.child.keep_running)
        self._tasks.start("database", self.database.watch)

    async def run_traffic(self, stack: AsyncExitStack) -> FleetTraffic:
        traffic = FleetTraffic(self.chain, self.ledger, port=self.port, key=self.key)
        await traffic.open()
        stack.push_async_callback(traffic.close)
        self._tasks.start("blocks", traffic.mine)
        self._watch_clients(traffic)
        self._began = time.monotonic()
        return traffic

    def _watch_clients(self, traffic: FleetTraffic) -> None:
        place: dict[str, Any] = {"port": self.port, "key": self.key}
        for number in range(self._callers):
            key = self._keys[number % KEYS]
            self._tasks.start(f"caller {number}", FleetCaller(self.ledger, port=self.port, key=key).run)
        self.writes = WriteWatch(self.ledger, **place)
        self._tasks.start("writes", self.writes.run)
        self._tasks.start("socket", SocketWatch(self.ledger, **place, first=traffic.first_block).run)

    async def _prepared(self) -> list[str]:
        """Migrate the database, and return new keys."""
        pool = Pool(self.database.url, size=1, acquire_timeout_s=5.0)
        await pool.open()
        try:
            async with pool.connection(within_s=5.0) as connection:
                await migrate.migrate(connection)
            store = KeyStore(pool, pepper=PEPPER, plans={"enterprise": KEYS})
            account = await store.create_account(name="Fleet", email="fleet@example.com", plan="enterprise")
            return [(await store.create_key(account["id"], name="fleet", mode="live"))[1] for _ in range(KEYS)]
        finally:
            await pool.close()

    def _parts(self, upstream: str) -> list[FleetPart]:
        ports = free_ports(4 + 2 * sum(self._counts.values()))
        self.port, *watchers = (ports.pop() for _ in range(4))
        text = shared_settings(database=self.database.url, sentinel=watchers[2], upstream=upstream)
        (self._home / "shared.toml").write_text(text)
        services = [
            service(self._home, kind, index + 1, port=ports.pop(), metrics_port=ports.pop())
            for kind, count in self._counts.items()
            for index in range(count)
        ]
        gateways = [part for part in services if part.kind == "gateway"]
        return [*valkeys(self._home, watchers), *services, balancer(self._home, self.port, gateways)]

    # Breaking

    async def break_for(self, seconds: float, traffic: FleetTraffic, rng: random.Random) -> None:
        """Break one part after another, each after the one before has recovered."""
        while self.elapsed_s < seconds:
            await asyncio.sleep(rng.uniform(*PAUSE_S))
            await self.break_one(rng.choice(VICTIMS), traffic, rng)

    async def break_in_turn(self, kills: int, within_s: float, traffic: FleetTraffic, rng: random.Random) -> None:
        """Break a part of each kind in turn, this many times or until the time is over."""
        for number in range(kills):
            if self.elapsed_s > within_s:
                return
            await asyncio.sleep(1.0)
            await self.break_one(VICTIMS[number % len(VICTIMS)], traffic, rng)

    async def break_one(self, kind: str, traffic: FleetTraffic, rng: random.Random) -> None:
        part = None if kind == "postgres" else rng.choice([part for part in self.parts if part.kind == kind])
        place = rng.choice((0, 1))
        role = "primary" if place == self.database.primary else "standby"
        broken, began = self.ledger.begin(part.name if part else role, self.elapsed_s), time.monotonic()
        block = self.chain.head
        await (part.kill() if part else self.database.kill(place))
        try:
            async with asyncio.timeout(RECOVERY_S):
                await self._recovered(part)
                if kind in ("follower", "deliverer", "postgres"):
                    await traffic.event_after(block, RECOVERY_S)
                if kind == "postgres":
                    await self.writes.acknowledged_after(began)
                    broken.writes_s = self.writes.sent_at - began
        except TimeoutError:
            return
        self.ledger.end(broken, self.elapsed_s)

    async def _recovered(self, part: FleetPart | None) -> None:
        """Wait until a gateway or Valkey is back. Followers and deliverers have others that take over."""
        if part is None or part.kind not in ("gateway", "valkey"):
            return
        while not await part.is_ready():  # noqa: ASYNC110 - another process has no event
            await asyncio.sleep(0.05)

    # Showing

    async def table(self) -> list[str]:
        rows = [_row("part", "state", "pid", "does")]
        rows += [_row(part.name, part.runs, part.pid, await self._does(part)) for part in self.parts]
        for index, server in enumerate(self.database.servers):
            role = "primary" if index == self.database.primary else "standby"
            process = server.child.process
            rows.append(_row(f"postgres{index + 1}", self.database.runs(index), process.pid if process else 0, role))
        calls = f"{self.ledger.answered} calls, {self.ledger.failed} failed"
        return [*rows, f"{self.elapsed_s:.0f} s, block {self.chain.head}, {calls}"]

    async def _does(self, part: FleetPart) -> str:
        match part.kind:
            case "gateway":
                return "serves" if await part.serves() else "not ready"
            case "follower":
                return "follows" if await _leads(part) else "waits"
            case "balancer":
                return f"http://127.0.0.1:{part.port}"
            case _:
                return f"port {part.port}"


def _row(name: str, state: str | bool, pid: str | int, does: str) -> str:
    shown = state if isinstance(state, str) else ("up" if state else "down")
    return f"{name:12} {shown:6} {pid:>8}  {does}"


async def _leads(follower: FleetPart) -> bool:
    """Whether this follower holds the network's lock, by its metrics."""
    try:
        timeout = aiohttp.ClientTimeout(total=1.0)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"http://127.0.0.1:{follower.port}/metrics") as response,
        ):
            text = await response.text()
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False
    return bool(re.search(rf'^penstock_follower_leads{{[^}}]*"{NETWORK}"[^}}]*}} 1', text, re.MULTILINE))
