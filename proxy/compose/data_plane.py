"""The data plane of a worker: the networks, and the calls that clients and features make on them."""

from __future__ import annotations

from proxy.compose.networks import NetworkBuilder
from proxy.memory_budget import MemoryBudget
from proxy.services.accounts.admission import Admission
from proxy.services.feed.feeds import feeds_of
from proxy.services.feed.head_announcements import HeadAnnouncements
from proxy.services.rpc.block_waits import BlockWaits
from proxy.services.rpc.filter_ids import FilterIds
from proxy.services.rpc.forwarder import Forwarder
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.rpc.logs import LogQueries
from proxy.services.rpc.rpc_service import RpcService
from proxy.services.rpc.shared_cache import SharedCache
from proxy.services.rpc.shared_lookup import SharedLookup
from proxy.services.rpc.tracker import Tracker, start_tracking
from proxy.services.rpc.verifier import Verifier
from proxy.settings import Settings, Tables
from proxy.store.poll_table import PollTable
from proxy.store.shared_replies import SharedReplies
from proxy.tasks import Tasks
from proxy.turn_queue import TurnQueue


class DataPlane:
    def __init__(
        self,
        settings: Settings,
        tables: Tables,
        admission: Admission,
        builder: NetworkBuilder,
        *,
        budget: MemoryBudget,
        turns: TurnQueue,
        tasks: Tasks,
        polls: PollTable,
    ) -> None:
        """`polls`: those of upstreams, which the processes of the host share."""
        self._tasks = tasks
        self.networks = builder.networks()
        self._shared = self._shared_replies(settings)
        self.verifier = Verifier(tasks)
        forwarder = Forwarder(FilterIds(settings.keys.pepper), self.verifier)
        self.rpc = RpcService(
            admission,
            tables.prices,
            forwarder,
            budget,
            turns,
            max_batch=settings.rpc.max_batch,
            max_batch_reply_bytes=settings.rpc.max_batch_reply_bytes,
            batch_wait_s=settings.rpc.batch_wait_s,
        )
        self.internal_calls = InternalCalls(forwarder, self.networks)
        self._polls, self._seen_changes = polls, -1
        self.trackers = {name: Tracker(route, table=polls) for name, route in self.networks.routes.items()}
        for name, tracker in self.trackers.items():
            dispatcher = self.networks.routes[name].dispatcher
            dispatcher.on_behind = BlockWaits(dispatcher, tracker.look, tasks).take
        self._logs = LogQueries(tasks, settings.rpc, self.trackers)
        self.feeds = feeds_of(self.networks)

    def __repr__(self) -> str:
        return f"<DataPlane {len(self.networks.routes)} networks>"

    def _shared_replies(self, settings: Settings) -> SharedReplies | None:
        """The cache shared through Valkey, if one is configured, set up for each network."""
        if not settings.valkey.cache_url or not settings.cache.enabled:
            return None
        shared = SharedReplies(settings.valkey.cache_url)
        for route in self.networks.routes.values():
            cache = route.state.shared_cache = SharedCache(route.network.id, shared)
            route.shared_lookup = SharedLookup(route.dispatcher, cache)
        return shared

    async def track_heads(self) -> None:
        """Learn the head of each network, and follow it from then on."""
        await start_tracking(self.trackers.values(), self._tasks)
        for name, tracker in self.trackers.items():
            announcements = HeadAnnouncements(self.networks.routes[name], tracker)
            if announcements.is_possible:
                self._tasks.start("announced heads", announcements.run, of=name)

    def adopt_heads(self) -> None:
        """Apply what other processes of the host have found, if there is anything new."""
        if (changes := self._polls.changes) != self._seen_changes:
            self._seen_changes = changes
            for tracker in self.trackers.values():
                tracker.adopt()

    def serve(self) -> None:
        """Start what only clients' calls need."""
        for route in self.networks.routes.values():
            self._logs.serve(route)
        for name, feed in self.feeds.by_network.items():
            self._tasks.start("feed", feed.run, of=name)
        if self._shared is not None:
            self._shared.start(self._tasks)

    async def close(self) -> None:
        await self.networks.close()
