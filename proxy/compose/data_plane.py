"""The data plane of a worker: the networks, and the calls that clients and features make on them."""

from __future__ import annotations

from proxy.compose.networks import NetworkBuilder
from proxy.memory_budget import MemoryBudget
from proxy.services.accounts.admission import Admission
from proxy.services.accounts.metering import Meters
from proxy.services.feed.feed_terms import FeedTerms
from proxy.services.feed.feeds import feeds_of
from proxy.services.feed.head_announcements import HeadAnnouncements
from proxy.services.relays.private_lookup import LOOKED_UP, PrivateLookup
from proxy.services.relays.private_sender import PrivateTransactions
from proxy.services.relays.private_senders import PrivateSenders
from proxy.services.rpc.block_waits import BlockWaits
from proxy.services.rpc.dispatcher import Takeovers
from proxy.services.rpc.filter_ids import FilterIds
from proxy.services.rpc.forwarder import Forwarder
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.rpc.logs import LogQueries
from proxy.services.rpc.own_methods import OwnMethods
from proxy.services.rpc.rest_waits import RestWaits
from proxy.services.rpc.rpc_service import RpcService
from proxy.services.rpc.shadow_judge import ShadowJudge
from proxy.services.rpc.tracker import Tracker, start_tracking
from proxy.services.rpc.verifier import OnContradiction, Verifier
from proxy.settings import Settings
from proxy.store.postgres.private_transactions import PrivateTransactionStore
from proxy.store.shared_memory.poll_table import PollTable
from proxy.store.valkey.shared_replies import SharedReplies
from proxy.tasks import Tasks
from proxy.turn_queue import TurnQueue


class DataPlane:
    def __init__(
        self,
        settings: Settings,
        admission: Admission,
        builder: NetworkBuilder,
        *,
        budget: MemoryBudget,
        turns: TurnQueue,
        tasks: Tasks,
        polls: PollTable,
        on_contradiction: OnContradiction,
        private: PrivateTransactionStore,
    ) -> None:
        """`polls`: those of upstreams, which the processes of the host share. `private`: transactions sent to relays."""
        self._tasks = tasks
        self._shared = _shared_replies(settings)
        states = builder.states(self._shared)
        self.trackers = {name: Tracker(state, table=polls) for name, state in states.items()}
        self.meters = Meters(admission)
        self.relays = builder.relays()
        lookup = PrivateLookup(self.relays, PrivateSenders(private), tasks, self.meters)
        takeovers = {
            name: Takeovers(
                logs=LogQueries(tasks, settings.rpc, tracker, self.meters),
                nulls=lookup if name in self.relays.routes else None,
                block_waits=BlockWaits(tracker.look, tasks),
                rest_waits=RestWaits(),
            )
            for name, tracker in self.trackers.items()
        }
        self.networks = builder.networks(states, takeovers)
        for name in self.relays.routes:
            for method in LOOKED_UP:
                self.networks.routes[name].policies[method].look_up_null()
        self.verifier = Verifier(tasks, self.meters, on_contradiction)
        self.own_methods = OwnMethods(tasks, self.meters, turns)
        filters = FilterIds(settings.keys.pepper, self.meters)
        sender = PrivateTransactions(self.relays, private, self.own_methods, flashbots=builder.flashbots_labels())
        forwarder = Forwarder(filters, self.verifier, self.own_methods, sender, self.meters)
        self.rpc = RpcService(
            admission,
            forwarder,
            budget,
            turns,
            max_batch=settings.rpc.max_batch,
            max_batch_reply_bytes=settings.rpc.max_batch_reply_bytes,
            batch_wait_s=settings.rpc.batch_wait_s,
        )
        self.internal_calls = InternalCalls(forwarder, self.networks)
        self._polls, self._seen_changes = polls, -1
        self.feeds = feeds_of(self.networks, FeedTerms(budget.of("replays"), budget.of("subscriptions")))

    def __repr__(self) -> str:
        return f"<DataPlane {len(self.networks.routes)} networks>"

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
        """Start the loops that only clients' calls need."""
        for shadow in self.networks.shadows:
            self._tasks.start("shadow", ShadowJudge(shadow).run, of=shadow.upstream.label)
        for name, feed in self.feeds.by_network.items():
            self._tasks.start("feed", feed.run, of=name)
        if self._shared is not None:
            self._shared.start(self._tasks)

    async def close(self) -> None:
        await self.networks.close()
        await self.relays.close()


def _shared_replies(settings: Settings) -> SharedReplies | None:
    """The cache shared through Valkey, if one is configured."""
    if not settings.valkey.cache_url or not settings.cache.enabled:
        return None
    return SharedReplies(settings.valkey.cache_url)
