"""Build the webhook feature: the API that owners use, and the events that a follower creates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from proxy.memory_budget import BudgetLine
from proxy.services.alerting import AlertSettingsService
from proxy.services.delivery.history import DeliveryHistory
from proxy.services.events.drafting import EventDrafter
from proxy.services.events.enrichment import CHANNEL, EventEnricher, MetadataLanes, NftSource, TokenSource
from proxy.services.events.finality import FinalityGate
from proxy.services.events.internal_transfers import InternalTransferEvents
from proxy.services.events.mempool import MempoolWatcher
from proxy.services.events.mined_lookups import MinedLookups
from proxy.services.events.notifications import Notifications
from proxy.services.events.pending_filters import PendingFilters
from proxy.services.events.sink import EventSink
from proxy.services.events.watch import WebhookWatch
from proxy.services.follower.block_tracer import BlockTracer, TraceWriter
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.rpc.networks import Route
from proxy.services.rpc.traces import TraceReader
from proxy.services.webhooks.backtest import Backtest
from proxy.services.webhooks.webhooks import WebhookService
from proxy.settings import Plan, Settings, Tables
from proxy.store.postgres.alerts import AlertStore
from proxy.store.postgres.deliveries import DeliveryStore
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.secrets import vault_of
from proxy.store.postgres.webhooks import WebhookStore
from proxy.tasks import Tasks
from proxy.turn_queue import TurnQueue
from proxy.web.rest.alerts import AlertHandlers
from proxy.web.rest.deliveries import DeliveryHandlers
from proxy.web.rest.endpoint import RestHandler
from proxy.web.rest.webhooks import WebhookHandlers
from proxy.wire.webhook_guard import WebhookGuard


class WebhookFeature:
    """The webhook and delivery API of a worker."""

    def __init__(
        self,
        settings: Settings,
        tables: Tables,
        pool: Pool,
        internal_calls: InternalCalls,
        turns: TurnQueue,
        memory: BudgetLine,
    ) -> None:
        """`memory`: that of back-tests."""
        store, vault = WebhookStore(pool), vault_of(settings)
        guard = WebhookGuard(settings.egress, dev=settings.server.dev)
        self.webhooks = WebhookService(
            store,
            vault,
            guard,
            most={name: plan.webhooks for name, plan in tables.plans.items()},
            values_per_day={name: plan.webhook_values_per_day for name, plan in tables.plans.items()},
            follows=settings.follower.follows,
        )
        history = DeliveryHistory(DeliveryStore(pool), events_per_day(tables.plans))
        backtest = Backtest(internal_calls, turns, memory)
        self.web = WebhookHandlers(self.webhooks, history, backtest, price_of=tables.price_of)
        self.deliveries = DeliveryHandlers(history, self.web.own)
        alerts = AlertStore(pool, sends_mail=bool(settings.mail.host), dashboard_url=settings.dashboard.url)
        self.alerts = AlertHandlers(AlertSettingsService(alerts, store, vault, guard))

    def __repr__(self) -> str:
        return f"<WebhookFeature {self.webhooks!r}>"

    def handlers(self) -> dict[str, RestHandler]:
        """REST handlers by operation id."""
        return {**self.web.handlers(), **self.deliveries.handlers(), **self.alerts.handlers()}


def events_per_day(plans: Mapping[str, Plan]) -> dict[str, int]:
    """The events that an account may store per day, by plan. 0 means no limit."""
    return {name: plan.webhook_events_per_day for name, plan in plans.items()}


class EventFeature:
    """Creates the events of one network in the follower process. `sink` is one of the follower's sinks."""

    def __init__(
        self,
        route: Route,
        pool: Pool,
        notifications: Notifications,
        internal_calls: InternalCalls,
        *,
        tokens: TokenSource,
        nfts: NftSource,
        plans: Mapping[str, Plan],
        trace_writers: Sequence[TraceWriter] = (),
    ) -> None:
        """`trace_writers`: others that write the internal transfers of a block, in the same database."""
        network = route.network
        self._pool = pool
        self._notifications = notifications
        self.watch = WebhookWatch(network)
        self.drafter = EventDrafter(network, events_per_day(plans))
        self.sink = EventSink(self.watch, self.drafter)
        self.enricher = EventEnricher(self.drafter, pool, internal_calls, tokens)
        self.metadata = MetadataLanes(
            network, pool, lambda account: EventEnricher(self.drafter, pool, internal_calls, tokens, nfts, account)
        )
        self.finality = FinalityGate(network, pool, internal_calls)
        self.tracer = BlockTracer(
            network.id,
            pool,
            TraceReader(network, internal_calls),
            [InternalTransferEvents(self.watch, self.drafter), *trace_writers],
        )
        self.mined_lookups = MinedLookups(self.watch, self.drafter, pool, internal_calls)
        self.mempool = MempoolWatcher(self.watch, self.drafter, pool, PendingFilters(route))

    def __repr__(self) -> str:
        return f"<EventFeature {self.watch!r}>"

    def start(self, tasks: Tasks, is_leader: Callable[[], bool]) -> None:
        """Start the loops. `is_leader` returns whether this process currently follows the network."""
        name = self.watch.network.id
        tasks.start("webhooks", lambda: self.watch.follow(self._pool, self._notifications), of=name)
        tasks.start("events", lambda: self.enricher.run(self._notifications, is_leader), of=name)
        tasks.start("metadata", lambda: self.metadata.run(self._notifications, is_leader), of=name)
        tasks.start("finality", lambda: self.finality.run(self._notifications, is_leader), of=name)
        wake = self._notifications.event_for(CHANNEL, name)
        tasks.start("traces", lambda: self.tracer.run(wake, is_leader), of=name)
        tasks.start("mined", lambda: self.mined_lookups.run(self._notifications, is_leader), of=name)
        tasks.start("mempool", lambda: self.mempool.run(is_leader), of=name)
