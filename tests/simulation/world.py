"""The world of one seed: the real worker between simulated clients and simulated upstreams, in virtual time."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextvars import copy_context
from typing import Any

from proxy.compose.app import App, preload_files
from proxy.compose.fleet import buckets_of, host_id
from proxy.core.access import Key, Limits
from proxy.settings import load
from proxy.store.shared_memory import host_memory, rate_buckets
from proxy.store.shared_memory.host_memory import HostMemory
from tests.shipped_tables import TABLES
from tests.simulation import sim_clients
from tests.simulation.block_tree import BlockTree
from tests.simulation.history import History
from tests.simulation.memory_network import CALM, Address, ListeningSocket, MemoryNetwork, host_of_task
from tests.simulation.oracle import CALL_TIMEOUT_S, Account, Bounds, Oracle
from tests.simulation.outcome import Outcome
from tests.simulation.scenario import (
    ALL_KINDS,
    COMMON_ACCOUNTS,
    HOARDING_ACCOUNTS,
    MANY,
    ONE,
    ClientPlan,
    Scenario,
    UpstreamPlan,
    rng_of,
)
from tests.simulation.seams import Seams, skew_ns
from tests.simulation.sim_clients import SimClient, Terms, address_of
from tests.simulation.sim_fleet import VALKEY, FleetTrouble
from tests.simulation.sim_upstream import SimUpstream
from tests.simulation.sim_valkey import SimValkey
from tests.simulation.virtual_loop import VirtualLoop
from tests.web.worker import PEPPER, Worker

PORT = 8545
# The accounts: their requests and units per second.
LIMITED, MODEST = 2, 3
ACCOUNTS = (
    ("large", 100_000, 10_000_000),
    ("second", 100_000, 10_000_000),
    ("limited", 20, 100),
    ("modest", 100_000, 10_000_000),
)
assert len(ACCOUNTS) == COMMON_ACCOUNTS
# A fleet's limit is lower: then calls above it are soon more than what gateways without Valkey may add.
FLEET_LIMIT = 5
# Accounts that only clients of one kind use.
OWN_ACCOUNT = {"Flooder": LIMITED, "Modest": MODEST}
# The connections to an upstream where there is a crowd.
FEW_CONNECTIONS = 8
# After the faults have ended, for how long the service may recover, and how many calls must then succeed.
RECOVERS_S = 25.0
PROBES = 5
# Clients have given everything back this long after they left.
SETTLES_S = 5.0


class World:
    def __init__(self, scenario: Scenario, seams: Seams) -> None:
        seams.begin(scenario.seed)
        self.scenario = scenario
        self.history = History(seams.clock)
        self._network = MemoryNetwork(self.history, seams.descriptors, self._rng("network"))
        self._loop = VirtualLoop(seams.clock, self._network, self._rng("threads"))
        self._clock = seams.clock
        self.oracle = Oracle(self.history, bounds_of(scenario))
        self._trees = {name: BlockTree(name, self.history, self._rng(f"chain {name}")) for name in (MANY, ONE)}
        self._upstreams = [self._upstream(place, plan) for place, plan in enumerate(scenario.upstreams, 1)]
        self.oracle.upstreams.extend(each for each in self._upstreams if not each.nature.on_trial)
        self._valkey = SimValkey(VALKEY, self._network, seams.clock, CALM)
        self._trouble = FleetTrouble(
            scenario.fleet, self._valkey, self._network, self.oracle, self._rng("trouble of the fleet")
        )
        self._gateways: list[Gateway] = []

    def __repr__(self) -> str:
        return f"<World of seed {self.scenario.seed}>"

    def _rng(self, part: str) -> Any:
        return rng_of(self.scenario.seed, part)

    def _upstream(self, place: int, plan: UpstreamPlan) -> SimUpstream:
        return SimUpstream(
            plan.name,
            (f"10.2.0.{place}", 80),
            self._trees[plan.network],
            self._network,
            self._rng(plan.name),
            nature=plan.nature,
            habits=plan.habits,
            weather=plan.weather,
            spells=plan.spells,
        )

    def run(self) -> Outcome:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(self._on_loop_error)
        errors = _ErrorLines(self.oracle)
        logging.getLogger("penstock").addHandler(errors)
        began_s = self._loop.time()
        try:
            self._loop.run_until_complete(self._main())
        finally:
            logging.getLogger("penstock").removeHandler(errors)
            asyncio.set_event_loop(None)
            self._loop.close()
        return Outcome(
            self.scenario.seed,
            self.history.digest,
            tuple(self.oracle.violations),
            self.oracle.outcomes,
            self.history.coverage,
            self.oracle.calls,
            self._loop.time() - began_s,
            self._loop.turns,
        )

    def _on_loop_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.oracle.violate("error", f"the event loop caught {context.get('exception')!r}: {context['message']}")

    async def _main(self) -> None:
        for upstream in self._upstreams:
            upstream.open()
        for address in self._addresses:
            self._network.set_weather(address, self.scenario.client_weather)
        async with asyncio.TaskGroup() as background:
            tasks = [background.create_task(self._mine(tree)) for tree in self._trees.values()]
            tasks += [background.create_task(upstream.live()) for upstream in self._upstreams]
            tasks.append(background.create_task(self._pause()))
            await self._serve(tasks[len(self._trees) :])
            for task in tasks:
                task.cancel()

    async def _mine(self, tree: BlockTree) -> None:
        rng, plan = self._rng(f"blocks {tree.name}"), self.scenario
        while True:
            await asyncio.sleep(plan.block_time_s * rng.uniform(0.8, 1.2))
            if rng.random() < plan.reorg:
                tree.reorganise(self.history.now_s)
            else:
                tree.grow(self.history.now_s)

    async def _pause(self) -> None:
        """Now and then the machine is busy with other work, and nothing here runs: everything that is due happens late."""
        rng, shortest_s, longest_s = self._rng("pauses"), *self.scenario.busy_s
        while longest_s:
            await asyncio.sleep(rng.expovariate(1.0))
            self.history.fault("machine", "machine busy")
            self._clock.advance(rng.uniform(shortest_s, longest_s))

    @property
    def _addresses(self) -> list[Address]:
        return [(f"10.0.0.{1 + place}", PORT) for place in range(self.scenario.fleet.hosts)]

    async def _serve(self, spells: list[asyncio.Task[None]]) -> None:
        self._gateways = self._built_gateways()
        for gateway in self._gateways:
            await gateway.listen()
        until_s = self._loop.time() + self.scenario.lasts_s
        async with asyncio.TaskGroup() as group:
            for plan in self.scenario.clients:
                group.create_task(self._client(plan, until_s).run())
            trouble = group.create_task(
                self._trouble.live(
                    [each.address[0] for each in self._gateways],
                    [each.address for each in self._upstreams],
                    [address_of(plan.name) for plan in self.scenario.clients] or [address_of("client 0")],
                )
            )
            await asyncio.sleep(self.scenario.lasts_s)
            await self._recover([*spells, trouble])
        await asyncio.sleep(SETTLES_S)
        self._check_end()
        for gateway in self._gateways:
            await gateway.stop()

    def _built_gateways(self) -> list[Gateway]:
        fleet = self.scenario.fleet
        limits_url = ""
        if fleet.hosts > 1:
            self._valkey.open()
            self.oracle.fleet_began()
            limits_url = self._valkey.url
        found = [
            Gateway.on_host(address, skew_s, self.scenario, self._upstreams, limits_url)
            for address, skew_s in zip(self._addresses, fleet.skews_s, strict=True)
        ]
        more = [(f"reader {number}", *ACCOUNTS[0][1:]) for number in range(HOARDING_ACCOUNTS * self.scenario.hoards)]
        for name, limit, units in (*ACCOUNTS, *more):
            requests = min(limit, FLEET_LIMIT) if name == "limited" and fleet.hosts > 1 else limit
            texts = {gateway.add_account(name, Limits(requests, units, 0)) for gateway in found}
            mark = f"{0xACC00000 + len(self.oracle.accounts):08x}"
            self.oracle.accounts.append(Account(name, texts.pop(), mark, requests, units))
            assert not texts, "the key of an account is the same on all gateways"
        for gateway in found:
            gateway.watch_valkey(self.oracle)
        return found

    def _client(self, plan: ClientPlan, until_s: float) -> SimClient:
        terms = Terms(
            self._addresses[plan.gateway],
            self.oracle,
            until_s,
            may_leave=not self.scenario.is_calm,
            listens_until_s=until_s + RECOVERS_S + SETTLES_S,
            quorum_on=MANY,
            crowd=self.scenario.crowd,
        )
        kind: type[SimClient] = next(each for each in ALL_KINDS if each.__name__ == plan.kind)
        account = self.oracle.accounts[OWN_ACCOUNT.get(plan.kind, plan.account)]
        return kind(plan.name, account, self._trees[plan.network], terms, self._rng(plan.name))

    async def _recover(self, spells: list[asyncio.Task[None]]) -> None:
        """All faults end. After a while every call succeeds."""
        for task in spells:
            task.cancel()
        for upstream in self._upstreams:
            upstream.heal()
        for address in self._addresses:
            self._network.set_weather(address, CALM)
        self._network.mend_all()
        if self.scenario.fleet.hosts > 1:
            self._valkey.heal(CALM)
        await asyncio.sleep(RECOVERS_S)
        self.oracle.healed()
        place = 100
        async with asyncio.TaskGroup() as group:
            for address in self._addresses:
                terms = Terms(address, self.oracle, self._loop.time() + 1.0, may_leave=False)
                for tree in self._trees.values():
                    place += 1
                    probe = sim_clients.Reader(
                        f"probe {place}", self.oracle.accounts[0], tree, terms, self._rng("probe")
                    )
                    group.create_task(probe.run())
                    for account in self.oracle.accounts:
                        place += 1
                        audit = sim_clients.Auditor(f"audit {place}", account, tree, terms, self._rng("audit"))
                        group.create_task(audit.run())

    def _check_end(self) -> None:
        executed: Counter[str] = Counter()
        for upstream in self._upstreams:
            executed.update(upstream.executed)
            if upstream.nature.on_trial:
                self.oracle.check_trial(upstream)
        self.oracle.check_writes(executed)
        self.oracle.check_repeats()
        self.oracle.check_limits()
        for place, account in enumerate(self.oracle.accounts):
            self.oracle.check_usage(account, sum(gateway.units_of(place) for gateway in self._gateways))
        for gateway in self._gateways:
            for leftover in gateway.leftovers():
                self.oracle.violate("leftover", f"{gateway.address[0]} holds {leftover}")
            if self.scenario.fleet.hosts > 1 and gateway.hosts != self.scenario.fleet.hosts:
                self.oracle.violate("recovers", f"{gateway.address[0]} counts {gateway.hosts} hosts")


class Gateway:
    """The product's own composition of a worker, without a database, on a host of its own."""

    def __init__(self, address: Address, scenario: Scenario, upstreams: list[SimUpstream], limits_url: str) -> None:
        """`limits_url`: the Valkey that several gateways share; empty if there is one gateway only."""
        self.address, self._context = address, copy_context()
        few = {"connections": FEW_CONNECTIONS} if scenario.crowd else {}
        blocks = [{**block, **few} for upstream in upstreams for block in _settings_of(upstream)]
        over = {
            "database": {"url": "postgresql://nobody@127.0.0.1:1/nothing"},
            "keys": {"pepper": PEPPER},
            "log": {"access": False},
            "server": {"drain_s": 1.0},
            "rpc": {"call_timeout_s": CALL_TIMEOUT_S, "lag_s": 4.0, "depth": scenario.depth},
            "upstreams": blocks,
            "valkey": {"limits_url": limits_url},
        }
        settings = load(environ={}, overrides=over)
        self._buckets_fd = rate_buckets.create()
        self._memory = HostMemory(host_memory.create())
        self._app = App(
            settings, TABLES, buckets_of(settings, self._buckets_fd, self._memory, alone=True), memory=self._memory
        )
        self._worker = Worker(self._app, address[1], self._buckets_fd)
        self._keys: list[Key] = []

    def __repr__(self) -> str:
        return f"<Gateway {self._worker!r}>"

    @classmethod
    def on_host(
        cls, address: Address, skew_s: float, scenario: Scenario, upstreams: list[SimUpstream], limits_url: str
    ) -> Gateway:
        """A gateway whose tasks belong to this host: they connect from it, and see its clock."""

        def build() -> Gateway:
            host_of_task.set(address[0])
            skew_ns.set(round(skew_s * 1e9))
            host_id.cache_clear()  # The identity of a host is that of its process, and this process is several hosts.
            return cls(address, scenario, upstreams, limits_url)

        return copy_context().run(build)

    @staticmethod
    def preload() -> None:
        """Do what the supervisor does before it forks workers."""
        preload_files()

    def add_account(self, name: str, limits: Limits) -> str:
        """Returns the text of its key."""
        self._keys.append(self._worker.add_key(name, limits=limits))
        return self._worker.keys[name]

    def watch_valkey(self, oracle: Oracle) -> None:
        if (fleet := self._app.fleet) is not None:
            fleet.link.on_change.append(lambda: oracle.valkey_changed(self.address[0], is_up=fleet.link.is_up))

    @property
    def hosts(self) -> int:
        """How many hosts it knows, itself included."""
        return self._app.fleet.hosts() if self._app.fleet is not None else 1

    def units_of(self, place: int) -> int:
        """The units that were charged to an account."""
        return sum(tally.units for tally in self._keys[place].tallies.values())

    async def listen(self) -> None:
        await self._on_host(self._listen())

    async def _listen(self) -> None:
        if self._app.fleet is not None:
            await self._app.pool.open()
            await self._app.fleet.start(self._app.networks)
        await self._app.plane.track_heads()
        await self._app.listen(ListeningSocket(self.address))  # type: ignore[arg-type]

    async def _on_host(self, work: Coroutine[Any, Any, None]) -> None:
        await asyncio.get_running_loop().create_task(work, context=self._context.copy())

    async def stop(self) -> None:
        await self._on_host(self._app.stop())
        os.close(self._buckets_fd)
        os.close(self._memory.fd)

    def leftovers(self) -> list[str]:
        """Everything that is held although no client is connected."""
        app = self._app
        healths = [each.health for route in app.networks.routes.values() for each in route.every_upstream]
        counts = {
            "bytes of memory": self._worker.held_bytes,
            "connections": len(app.limiter.connections),
            "calls in flight": sum(health.inflight for health in healths),
            "flights that can be joined": sum(len(route.state.flights) for route in app.networks.routes.values()),
        }
        return [f"{count} {name}" for name, count in counts.items() if count]


def bounds_of(scenario: Scenario) -> Bounds:
    return Bounds(
        scenario.is_calm,
        stalls=bool(scenario.client_weather.stall) or any(each.weather.stall for each in scenario.upstreams),
        takes_s=max(each.habits.takes_s[1] for each in scenario.upstreams),
        places=FEW_CONNECTIONS if scenario.crowd else 0,
        hoards=scenario.hoards,
        pauses_s=scenario.busy_s[1],
    )


def _settings_of(upstream: SimUpstream) -> Iterator[dict[str, Any]]:
    """The settings of an upstream, and those of the stream that it has on another port."""
    common = {"network": upstream.tree.name, "operator": upstream.name.replace(" ", "-")}
    host, port = upstream.address
    trial = {"shadow": 0.5, "requests_per_second": 50} if upstream.nature.on_trial else {}
    yield {**common, "url": f"http://{host}:{port}/", "archive": not upstream.nature.pruned, **trial}
    if upstream.nature.streams:
        yield {**common, "url": f"ws://{host}:{upstream.stream_address[1]}/"}


class _ErrorLines(logging.Handler):
    """An error in the log is a fault of the program."""

    def __init__(self, oracle: Oracle) -> None:
        super().__init__(logging.ERROR)
        self._oracle = oracle

    def emit(self, record: logging.LogRecord) -> None:
        reason = record.exc_info[1] if record.exc_info else vars(record).get("reason", "")
        if "another chain" not in record.getMessage():
            self._oracle.violate("error", f"the log says: {record.getMessage()} {reason!r}")
