"""Build a background process: work that no request waits for, kept away from the workers so that it slows no call.

The supervisor starts one process for each part of its role, restarts it when it dies, and ends it with itself, as it does
with workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from proxy import settings as settings_room
from proxy.chains.families import family_of
from proxy.compose import gas
from proxy.compose.data import DataFeature
from proxy.compose.delivery import DeliveryFeature
from proxy.compose.fleet import UpstreamLimits, host_id
from proxy.compose.networks import NetworkBuilder
from proxy.compose.smart_wallets import operation_cleanup
from proxy.compose.webhooks import EventFeature
from proxy.core.transfer_history import CATEGORIES, INTERNAL, blocks_per_table
from proxy.processes.worker import report_ready, run_child, watch_steps, watch_supervisor
from proxy.services.budget_leases import Budgets
from proxy.services.bundler.inclusions import InclusionSink
from proxy.services.events.notifications import Notifications
from proxy.services.fleet import Cordons
from proxy.services.follower.block_reader import BlockDemand, BlockReader
from proxy.services.follower.block_tracer import BlockTracer
from proxy.services.follower.network_follower import NetworkFollower
from proxy.services.follower.sinks import FollowerSink, HoldingsSink, NoHoldingsSink, TransfersSink, topics_of
from proxy.services.process_reports import ProcessReports
from proxy.services.readiness import probes
from proxy.services.relays.public_fallback import PublicFallback
from proxy.services.rpc.filter_ids import FilterIds
from proxy.services.rpc.forwarder import Forwarder
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.rpc.networks import Route
from proxy.services.rpc.traces import TraceReader
from proxy.services.rpc.tracker import Tracker, start_tracking
from proxy.services.spending_log import SpendingLog
from proxy.services.wallets import DeploymentSink
from proxy.settings import Settings, Tables
from proxy.store.postgres.blocks import BlockStore
from proxy.store.postgres.fleet import FleetStore
from proxy.store.postgres.index_databases import INDEX, IndexDatabases
from proxy.store.postgres.notices import Notices
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.private_transactions import PrivateTransactionStore
from proxy.store.postgres.spending import SpendingStore
from proxy.store.shared_memory.host_memory import HostMemory
from proxy.tasks import Tasks
from proxy.telemetry import Tallies
from proxy.turn_queue import TurnQueue
from proxy.wire.write_buffer import WriteBuffer

# How often deadlines and hedges of calls are checked, and whether another process has found a new head. No client waits.
SWEEP_S = 0.05
# How often trace jobs are looked for in the database of an index, which sends no notifications.
SPLIT_CHECK_S = 2.0


@dataclass(frozen=True, slots=True)
class FollowerSpec:
    """One follower of a network: its name in lists, the database of its cursor, and its sinks."""

    label: str
    blocks: BlockStore
    sinks: list[FollowerSink]


class Background:
    """Every object of a background process: networks, database, and the features of its part."""

    def __init__(self, settings: Settings, tables: Tables, memory: HostMemory | None = None) -> None:
        """`memory`: what this process shares with the host's workers."""
        self.settings = settings
        self.tables = tables
        self.tasks = Tasks()
        self.pool = Pool.of(settings.database, application="penstock-background")
        self.indexes = IndexDatabases.of(settings, self.pool, application="penstock-background")
        loop = asyncio.get_running_loop()
        url = settings.valkey.limits_url
        self._limits = UpstreamLimits(url, memory, self.pool) if url and memory is not None else None
        # The heads are not shared with the workers: this process serves no clients, so it need not be consistent with them.
        builder = NetworkBuilder(
            settings,
            tables,
            WriteBuffer(loop),
            TurnQueue(loop),
            tally=Tallies().of,
            memory=memory,
            hosts=self._limits.hosts if self._limits else lambda: 1,
            leases=self._limits.leases if self._limits else None,
        )
        states = builder.states()
        self.networks = builder.networks(states)
        table = None if memory is None else memory.polls
        self._trackers = [Tracker(state, table=table) for state in states.values()]
        self.spending = SpendingLog(SpendingStore(self.pool), self.networks.meters(), flush_s=settings.usage.flush_s)
        self.budgets = Budgets(SpendingStore(self.pool), self.networks.metered())
        self.holdings = HoldingsSink()
        self.sinks: list[FollowerSink] = [
            self.holdings,
            DeploymentSink(),
            InclusionSink(tables.chains),
            gas.settlement_sink(settings, tables),
        ]
        self.blocks = BlockStore(self.pool)
        self.internal_calls = InternalCalls(Forwarder(FilterIds(settings.keys.pepper)), self.networks)
        self.data = DataFeature(settings, tables, self.pool, self.internal_calls, index_pools=self.indexes.split_pools)
        self.notices = Notices(self.pool)
        self.notifications = Notifications(self.notices)
        self.delivery: DeliveryFeature | None = None
        self._followers: list[NetworkFollower] = []
        self._report: ProcessReports | None = None

    def __repr__(self) -> str:
        return f"<Background {self.networks!r} {self.tasks!r}>"

    def reader(self, route: Route, sinks: Sequence[FollowerSink] = ()) -> BlockReader:
        """A reader for the blocks that these sinks need, or else all sinks."""
        readers = sinks or self.sinks
        return BlockReader(
            route,
            demand=lambda: BlockDemand(
                topics_of(readers),
                any(sink.transactions for sink in readers),
                any(sink.receipts for sink in readers),
            ),
        )

    def events(self, route: Route) -> EventFeature:
        """The webhook events of one network."""
        data = self.data
        return EventFeature(
            route,
            self.pool,
            self.notifications,
            self.internal_calls,
            tokens=data.contracts,
            nfts=data.nft_metadata,
            plans=self.tables.plans,
            trace_writers=[] if self.indexes.is_split(route.network.id) else [self.transfers(route)],
        )

    def follower_specs(self, route: Route, events: FollowerSink) -> list[FollowerSpec]:
        """One follower for everything, or one in the main database and one in that of the network's index."""
        name = route.network.id
        history = self.transfers(route)
        if not self.indexes.is_split(name):
            return [FollowerSpec(name, self.blocks, [*self.sinks, history, events])]
        others = [NoHoldingsSink() if sink is self.holdings else sink for sink in self.sinks]
        return [
            FollowerSpec(name, self.blocks, [*others, events]),
            FollowerSpec(f"{name}{INDEX}", self.index_blocks(name), [self.holdings, history]),
        ]

    def transfers(self, route: Route) -> TransfersSink:
        """Keeps the history of transfers of a network."""
        given, network = self.settings.follower, route.network
        return TransfersSink(
            [CATEGORIES[each] for each in given.transfer_categories(network.id)],
            span=blocks_per_table(network.facts.block_time_s),
            keep=given.transfer_blocks(network.id),
        )

    def index_blocks(self, network: str) -> BlockStore:
        """The blocks of the database that has the network's index."""
        return BlockStore(self.indexes.pool_of(network)) if self.indexes.is_split(network) else self.blocks

    def follower(self, route: Route, spec: FollowerSpec) -> NetworkFollower:
        given = self.settings.follower
        return NetworkFollower(
            self.reader(route, spec.sinks),
            spec.blocks,
            spec.sinks,
            start=given.start.get(route.network.id),
            keep=given.keep_blocks,
            renews=given.renew,
            label=spec.label,
        )

    async def open(self, *, needs_upstreams: bool = True) -> None:
        """Connect to the database and, if needed, track the upstreams."""
        await self.pool.open()
        await self.indexes.open()
        for name, pool in self.indexes.by_name.items():
            self.tasks.start("database", partial(_watch, name, pool), of=name)
        if not needs_upstreams:
            return
        if self._limits is not None:
            self._limits.start(self.tasks)
        self.tasks.start("sweep", self._sweep)
        self.tasks.start("spending", self.spending.run)
        await self.budgets.start()
        if self.budgets.is_needed:
            self.tasks.start("budgets", self.budgets.run)
        await start_tracking(self._trackers, self.tasks)
        self.tasks.start("notifications", self.notices.run)
        cordons = Cordons(FleetStore(self.pool), (self.networks,))
        cordons.listen(self.notices)
        self.tasks.start("cordons", cordons.follow)

    def follow(self) -> None:
        for name, route in self.networks.routes.items():
            if "follower" in family_of(route.network).features and self.settings.follower.follows(name):
                self._follow(name, route)
        self.tasks.start("operation cleanup", operation_cleanup(self.settings, self.pool).run)
        private = [each for name, each in self.networks.routes.items() if name in self._with_relays()]
        if private:
            fallback = PublicFallback(PrivateTransactionStore(self.pool), self.internal_calls, private)
            self.tasks.start("public fallback", fallback.run)
        settling = gas.settlement_loop(self.settings, self.tables, self.pool, self.networks.routes.values())
        self.tasks.start("settling", settling.run)

    def _with_relays(self) -> set[str]:
        networks = [self.tables.chains.find(*each.network.split("/")) for each in self.settings.relays]
        return {network.id for network in networks if network is not None}

    def _follow(self, name: str, route: Route) -> None:
        events = self.events(route)
        followers = [self.follower(route, each) for each in self.follower_specs(route, events.sink)]
        self._followers += followers
        events.start(self.tasks, lambda: followers[0].network is not None)
        for each in followers:
            self.tasks.start("follower", each.run, of=each.label)
        if self.indexes.is_split(name) and INTERNAL in self.transfers(route).categories:
            tracer, leader = self.index_tracer(route), followers[-1]
            run = partial(tracer.run, asyncio.Event(), lambda: leader.network is not None, check_s=SPLIT_CHECK_S)
            self.tasks.start("index traces", run, of=name)

    def index_tracer(self, route: Route) -> BlockTracer:
        """Traces blocks for the history of transfers in a database of its own."""
        traces = TraceReader(route.network, self.internal_calls)
        pool = self.indexes.pool_of(route.network.id)
        return BlockTracer(route.network.id, pool, traces, [self.transfers(route)])

    def report(self, part: str, *, backfills: Callable[[], list[dict[str, Any]]] = list) -> None:
        """Report this process to the operators. `backfills`: the progress of those that it runs."""
        self._report = ProcessReports(
            FleetStore(self.pool), part, instance=host_id(), follows=self._followed, backfills=backfills
        )
        self.tasks.start("process report", self._report.run)

    def _followed(self) -> dict[str, dict[str, int]]:
        """The networks that this process indexes, each with its block and the head."""
        leading = [each for each in self._followers if each.network is not None]
        return {
            each.label: {"block": each.cursor.number, "head": self.networks.routes[each.id].heads.tip}
            for each in leading
        }

    async def deliver(self) -> None:
        self.delivery = DeliveryFeature(self.settings, self.tables)
        await self.delivery.start(self.tasks)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.networks.sweep()
            for tracker in self._trackers:
                tracker.adopt()

    async def close(self) -> None:
        if self.delivery is not None:
            await self.delivery.drain(self.settings.server.drain_s)
        await self.tasks.close()
        if self._report is not None:
            await self._report.close()
        if self.delivery is not None:
            await self.delivery.close()
        await self.spending.close()
        await self.budgets.close()
        await self.networks.close()
        await self.data.close()
        await self.indexes.close()
        await self.pool.close()


async def _watch(name: str, pool: Pool) -> None:
    async for _ in probes(name, pool):
        pass


# How each part starts, by name.
PARTS: dict[str, Callable[[Background], Awaitable[None] | None]] = {
    "follower": Background.follow,
    "deliverer": Background.deliver,
}
# Parts that call no upstream.
WITHOUT_UPSTREAMS = frozenset({"deliverer"})


def preload() -> None:
    settings_room.preload()


def main(part: str, memory_fd: int) -> int:
    memory = HostMemory(memory_fd)
    return run_child(lambda settings, tables: _run(part, lambda: Background(settings, tables, memory)))


async def _run(part: str, build: Callable[[], Background]) -> None:
    """Run until the supervisor stops this process or dies. An open transaction is rolled back and repeated later."""
    running = build()
    stop = watch_supervisor(running.settings)
    await running.open(needs_upstreams=part not in WITHOUT_UPSTREAMS)
    if (starting := PARTS[part](running)) is not None:
        await starting
    running.report(part)
    report_ready(running.tasks)
    watch_steps(running.settings, part)
    await stop.wait()
    await running.close()
