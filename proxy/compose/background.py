"""A process beside the workers, for work that no request waits for: nothing it does costs a call a microsecond.

The supervisor starts one for each part that its role has, ties it to itself and keeps it running, as it does with workers.
`App`'s sibling: builds every object of such a process once.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, cast

import orjson
import uvloop

from proxy import settings as settings_room
from proxy import telemetry
from proxy.chains.families import family_of
from proxy.compose import gas
from proxy.compose.data import DataFeature
from proxy.compose.delivery import DeliveryFeature
from proxy.compose.networks import NetworkBuilder
from proxy.compose.smart_wallets import forgetting
from proxy.compose.webhooks import EventFeature
from proxy.processes.supervisor import READY
from proxy.processes.worker import first_line, heed_supervisor
from proxy.services.bundler.inclusions import InclusionSink
from proxy.services.events.notifications import Notifications
from proxy.services.fleet import Cordons
from proxy.services.follower.block_reader import BlockDemand, BlockReader
from proxy.services.follower.network_follower import NetworkFollower
from proxy.services.follower.sinks import FollowerSink, HoldingsSink, topics_of
from proxy.services.readiness import PROBE_S
from proxy.services.rpc.calls import Rpc
from proxy.services.rpc.filters import FilterIds
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.rpc.networks import Route
from proxy.services.rpc.tracker import Tracker
from proxy.services.wallets import DeploymentSink
from proxy.settings import Settings, Tables
from proxy.store.blocks import BlockStore
from proxy.store.fleet import FleetStore
from proxy.store.notices import Notices
from proxy.store.pool import Pool
from proxy.store.windows import SHARED_HEAD_NUMBERS
from proxy.tasks import Tasks
from proxy.telemetry import Tallies
from proxy.wire.write_buffer import WriteBuffer

if TYPE_CHECKING:
    from proxy.services.accounts.admission import Admission

# How often deadlines and hedges of calls are looked at: nobody waits for these calls but we.
SWEEP_S = 0.05


class Background:
    """What a part is built from: the networks, and the database."""

    def __init__(self, settings: Settings, tables: Tables) -> None:
        self.settings = settings
        self.tables = tables
        self.tasks = Tasks()
        self.pool = Pool(
            settings.database.url,
            size=settings.database.pool_size,
            acquire_timeout_s=settings.database.acquire_timeout_s,
            application="penstock-background",
        )
        write_buffer = WriteBuffer(asyncio.get_running_loop())
        # Its own marks: it answers nobody who could have been told something else.
        self.networks = NetworkBuilder(
            settings, tables, write_buffer, tally=Tallies().of, shared_heads=[0] * SHARED_HEAD_NUMBERS
        ).networks()
        self.sinks: list[FollowerSink] = [
            HoldingsSink(),
            DeploymentSink(),
            InclusionSink(tables.chains),
            gas.settlements(settings, tables),
        ]
        self.blocks = BlockStore(self.pool)
        # What is asked here is asked by ourselves: there is no key, and nobody to admit.
        rpc = Rpc(cast("Admission", None), tables.prices, FilterIds(settings.keys.pepper))
        self.internal_calls = InternalCalls(rpc, self.networks)
        self.data = DataFeature(settings, tables, self.pool, self.internal_calls)
        self.notices = Notices(self.pool)
        self.bell = Notifications(self.notices)
        self.delivery: DeliveryFeature | None = None

    def __repr__(self) -> str:
        return f"<Background {self.networks!r} {self.tasks!r}>"

    def reader(self, route: Route, sinks: Sequence[FollowerSink] = ()) -> BlockReader:
        """For all sinks, or for these."""
        asking = sinks or self.sinks
        return BlockReader(
            route, wants=lambda: BlockDemand(topics_of(asking), any(sink.transactions for sink in asking))
        )

    def events(self, route: Route) -> EventFeature:
        """What is made for webhooks of a network's blocks."""
        data = self.data
        return EventFeature(
            route, self.pool, self.bell, self.internal_calls, tokens=data.contracts, nfts=data.nft_metadata
        )

    def following(self, route: Route, *more: FollowerSink) -> NetworkFollower:
        wanted = self.settings.follower
        sinks = [*self.sinks, *more]
        return NetworkFollower(
            self.reader(route, sinks),
            self.blocks,
            sinks,
            start=wanted.start.get(route.network.id),
            keep=wanted.keep_blocks,
            renews=wanted.renew,
        )

    async def open(self, *, asks: bool = True) -> None:
        """The networks can be asked, by those who do."""
        await self.pool.open()
        self.tasks.start("database", self._watch)
        if not asks:
            return
        self.tasks.start("sweep", self._sweep)
        for route in self.networks.routes.values():
            self.tasks.start(f"heads {route.network.id}", Tracker(route).run)
        self.tasks.start("notices", self.notices.run)
        self.tasks.start("cordons", Cordons(FleetStore(self.pool), self.notices, (self.networks,)).follow)

    def follow(self) -> None:
        for name, route in self.networks.routes.items():
            if "follower" in family_of(route.network).features and self.settings.follower.follows(name):
                self._follow(name, route)
        self.tasks.start("forgetting", forgetting(self.settings, self.pool).run)
        settling = gas.settling(self.settings, self.tables, self.pool, self.networks.routes.values())
        self.tasks.start("settling", settling.run)

    def _follow(self, name: str, route: Route) -> None:
        events = self.events(route)
        following = self.following(route, events.sink)
        events.start(self.tasks, lambda: following.network is not None)
        self.tasks.start(f"follower {name}", following.run)

    async def deliver(self) -> None:
        self.delivery = DeliveryFeature(self.settings, self.tables)
        await self.delivery.start(self.tasks)

    async def _watch(self) -> None:
        while True:
            telemetry.database_up.set(await self.pool.is_up())
            await asyncio.sleep(PROBE_S)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.networks.sweep()

    async def close(self) -> None:
        if self.delivery is not None:
            await self.delivery.drain(self.settings.server.drain_s)
        await self.tasks.close()
        if self.delivery is not None:
            await self.delivery.close()
        await self.networks.close()
        await self.data.close()
        await self.pool.close()


# The parts by name: what each starts.
PARTS: dict[str, Callable[[Background], Awaitable[None] | None]] = {
    "follower": Background.follow,
    "deliverer": Background.deliver,
}
# And those that never ask a network anything.
ASK_NOTHING = frozenset({"deliverer"})


def main(part: str) -> int:
    line = first_line()
    if not line.endswith(b"\n"):  # The supervisor was gone before it could say what to do.
        return 0
    settings = settings_room.from_tree(orjson.loads(line))
    tables = settings_room.load_tables()
    listener = telemetry.start_logging(settings.log.level)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(settings, tables, part))
    finally:
        listener.stop()
    return 0


async def _run(settings: Settings, tables: Tables, part: str) -> None:
    """Until the supervisor says so, or is gone. What is in the middle of a transaction is undone: it is done again later."""
    stop = heed_supervisor(settings)
    running = Background(settings, tables)
    await running.open(asks=part not in ASK_NOTHING)
    if (starting := PARTS[part](running)) is not None:
        await starting
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    await stop.wait()
    await running.close()
