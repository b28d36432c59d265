"""The world of one seed: the real worker between simulated clients and simulated upstreams, in virtual time."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from typing import Any

from proxy.compose.app import App, preload_files
from proxy.compose.fleet import buckets_of
from proxy.core.access import Key, Limits
from proxy.settings import load
from proxy.store.shared_memory import host_memory, rate_buckets
from proxy.store.shared_memory.host_memory import HostMemory
from tests.shipped_tables import TABLES
from tests.simulation import sim_clients
from tests.simulation.block_tree import BlockTree
from tests.simulation.history import History
from tests.simulation.memory_network import CALM, Address, ListeningSocket, MemoryNetwork
from tests.simulation.oracle import CALL_TIMEOUT_S, Account, Oracle
from tests.simulation.outcome import Outcome
from tests.simulation.scenario import KINDS, MANY, ONE, ClientPlan, Scenario, UpstreamPlan, rng_of
from tests.simulation.seams import Seams
from tests.simulation.sim_clients import SimClient, Terms
from tests.simulation.sim_upstream import SimUpstream
from tests.simulation.virtual_loop import VirtualLoop
from tests.web.worker import PEPPER, Worker

GATEWAY: Address = ("10.0.0.1", 8545)
# The accounts: their requests and units per second.
LIMITED = 2
ACCOUNTS = (("large", 100_000, 10_000_000), ("second", 100_000, 10_000_000), ("limited", 20, 100))
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
        stalls = bool(scenario.client_weather.stall) or any(each.weather.stall for each in scenario.upstreams)
        self.oracle = Oracle(self.history, is_calm=scenario.is_calm, stalls=stalls)
        self._trees = {name: BlockTree(name, self.history, self._rng(f"chain {name}")) for name in (MANY, ONE)}
        self._upstreams = [self._upstream(place, plan) for place, plan in enumerate(scenario.upstreams, 1)]
        self.oracle.upstreams.extend(self._upstreams)

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
        self._network.set_weather(GATEWAY, self.scenario.client_weather)
        async with asyncio.TaskGroup() as background:
            tasks = [background.create_task(self._mine(tree)) for tree in self._trees.values()]
            tasks += [background.create_task(upstream.live()) for upstream in self._upstreams]
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

    async def _serve(self, spells: list[asyncio.Task[None]]) -> None:
        gateway = Gateway(self.scenario, self._upstreams)
        keys = [gateway.add_account(self.oracle, name, *limits) for name, *limits in ACCOUNTS]
        await gateway.listen()
        until_s = self._loop.time() + self.scenario.lasts_s
        terms = Terms(
            GATEWAY,
            self.oracle,
            until_s,
            may_leave=not self.scenario.is_calm,
            listens_until_s=until_s + RECOVERS_S + SETTLES_S,
            quorum_on=MANY,
        )
        async with asyncio.TaskGroup() as group:
            for plan in self.scenario.clients:
                group.create_task(self._client(plan, terms).run())
            await asyncio.sleep(self.scenario.lasts_s)
            await self._recover(spells)
        await asyncio.sleep(SETTLES_S)
        self._check_end(gateway, keys)
        await gateway.stop()

    def _client(self, plan: ClientPlan, terms: Terms) -> SimClient:
        kind: type[SimClient] = next(each for each in KINDS if each.__name__ == plan.kind)
        account = self.oracle.accounts[LIMITED if plan.kind == "Flooder" else plan.account]
        return kind(plan.name, account, self._trees[plan.network], terms, self._rng(plan.name))

    async def _recover(self, spells: list[asyncio.Task[None]]) -> None:
        """All faults end. After a while every call succeeds."""
        for task in spells:
            task.cancel()
        for upstream in self._upstreams:
            upstream.heal()
        self._network.set_weather(GATEWAY, CALM)
        await asyncio.sleep(RECOVERS_S)
        self.oracle.healed()
        terms = Terms(GATEWAY, self.oracle, self._loop.time() + 1.0, may_leave=False)
        async with asyncio.TaskGroup() as group:
            for place, tree in enumerate(self._trees.values()):
                probe = sim_clients.Reader(
                    f"probe {101 + place}", self.oracle.accounts[0], tree, terms, self._rng("probe")
                )
                group.create_task(probe.run())

    def _check_end(self, gateway: Gateway, keys: list[Key]) -> None:
        executed: Counter[str] = Counter()
        for upstream in self._upstreams:
            executed.update(upstream.executed)
        self.oracle.check_writes(executed)
        self.oracle.check_limits()
        for account, key in zip(self.oracle.accounts, keys, strict=True):
            self.oracle.check_usage(account, sum(tally.units for tally in key.tallies.values()))
        for leftover in gateway.leftovers():
            self.oracle.violate("leftover", leftover)


class Gateway:
    """The product's own composition of a worker, without a database."""

    def __init__(self, scenario: Scenario, upstreams: list[SimUpstream]) -> None:
        blocks = [
            {
                "network": upstream.tree.name,
                "url": f"http://{upstream.address[0]}:{upstream.address[1]}/",
                "operator": upstream.name.replace(" ", "-"),
                "archive": not upstream.nature.pruned,
            }
            for upstream in upstreams
        ]
        over = {
            "database": {"url": "postgresql://nobody@127.0.0.1:1/nothing"},
            "keys": {"pepper": PEPPER},
            "log": {"access": False},
            "server": {"drain_s": 1.0},
            "rpc": {"call_timeout_s": CALL_TIMEOUT_S, "lag_s": 4.0, "depth": scenario.depth},
            "upstreams": blocks,
        }
        settings = load(environ={}, overrides=over)
        self._buckets_fd = rate_buckets.create()
        self._memory = HostMemory(host_memory.create())
        self._app = App(
            settings, TABLES, buckets_of(settings, self._buckets_fd, self._memory, alone=True), memory=self._memory
        )
        self._worker = Worker(self._app, GATEWAY[1], self._buckets_fd)

    def __repr__(self) -> str:
        return f"<Gateway {self._worker!r}>"

    @staticmethod
    def preload() -> None:
        """Do what the supervisor does before it forks workers."""
        preload_files()

    def add_account(self, oracle: Oracle, name: str, requests: int, units: int) -> Key:
        key = self._worker.add_key(name, limits=Limits(requests, units, 0))
        mark = f"{0xACC00000 + len(oracle.accounts):08x}"
        oracle.accounts.append(Account(name, self._worker.keys[name], mark, requests, units))
        return key

    async def listen(self) -> None:
        await self._app.plane.track_heads()
        await self._app.listen(ListeningSocket(GATEWAY))  # type: ignore[arg-type]

    async def stop(self) -> None:
        await self._app.stop()
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


class _ErrorLines(logging.Handler):
    """An error in the log is a fault of the program."""

    def __init__(self, oracle: Oracle) -> None:
        super().__init__(logging.ERROR)
        self._oracle = oracle

    def emit(self, record: logging.LogRecord) -> None:
        reason = record.exc_info[1] if record.exc_info else vars(record).get("reason", "")
        if "another chain" not in record.getMessage():
            self._oracle.violate("error", f"the log says: {record.getMessage()} {reason!r}")
