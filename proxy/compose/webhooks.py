"""The part of the composition root for webhooks: what owners do with them, and the events that a follower makes for them."""

from __future__ import annotations

from collections.abc import Callable

from proxy.services.delivery.history import Deliveries
from proxy.services.events.drafting import Composition
from proxy.services.events.enrichment import Composing, Nfts, Tokens
from proxy.services.events.finality import Finality
from proxy.services.events.internal_transfers import Tracing
from proxy.services.events.mempool import Mempool
from proxy.services.events.notifications import Bell
from proxy.services.events.pending_filters import Pinned
from proxy.services.events.sink import EventSink
from proxy.services.events.watch import Watch
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.rpc.networks import Route
from proxy.services.rpc.traces import TraceReader
from proxy.services.webhooks.backtest import Backtest
from proxy.services.webhooks.webhooks import Webhooks
from proxy.settings import Settings, Tables
from proxy.store.deliveries import DeliveryStore
from proxy.store.pool import Pool
from proxy.store.secrets import Vault
from proxy.store.webhooks import WebhookStore
from proxy.tasks import Tasks
from proxy.web.rest.deliveries import DeliveryHandlers
from proxy.web.rest.endpoint import RestHandler
from proxy.web.rest.webhooks import WebhookHandlers
from proxy.wire.webhook_guard import WebhookGuard


class Hooks:
    """A worker's: what owners ask."""

    def __init__(self, settings: Settings, tables: Tables, pool: Pool, questions: InternalCalls) -> None:
        self.webhooks = Webhooks(
            WebhookStore(pool),
            vault_of(settings),
            WebhookGuard(settings.egress, dev=settings.server.dev),
            most={name: plan.webhooks for name, plan in tables.plans.items()},
            follows=settings.follower.follows,
        )
        self.web = WebhookHandlers(self.webhooks, Backtest(questions), tables.chains)
        self.deliveries = DeliveryHandlers(Deliveries(DeliveryStore(pool)), self.web.own, tables.chains)

    def __repr__(self) -> str:
        return f"<Hooks {self.webhooks!r}>"

    def answers(self) -> dict[str, RestHandler]:
        """By operation, for the routes."""
        return {**self.web.answers(), **self.deliveries.answers()}


class Events:
    """A follower's: the events of one network. `sink` is one of its follower's."""

    def __init__(
        self, route: Route, pool: Pool, bell: Bell, questions: InternalCalls, *, tokens: Tokens, nfts: Nfts
    ) -> None:
        network = route.network
        self._pool = pool
        self._bell = bell
        self.watch = Watch(network)
        self.composition = Composition(network)
        self.sink = EventSink(self.watch, self.composition)
        self.composing = Composing(self.composition, pool, questions, tokens)
        self.describing = Composing(self.composition, pool, questions, tokens, nfts)
        self.finality = Finality(network, pool, questions)
        self.tracing = Tracing(self.watch, self.composition, pool, TraceReader(network, questions))
        self.mempool = Mempool(self.watch, self.composition, pool, questions, Pinned(route))

    def __repr__(self) -> str:
        return f"<Events {self.watch!r}>"

    def start(self, tasks: Tasks, leads: Callable[[], bool]) -> None:
        """`leads`: whether this process follows the network at the moment."""
        name = self.watch.network.id
        tasks.start(f"webhooks {name}", lambda: self.watch.follow(self._pool, self._bell))
        tasks.start(f"events {name}", lambda: self.composing.run(self._bell, leads))
        tasks.start(f"metadata {name}", lambda: self.describing.run(self._bell, leads))
        tasks.start(f"finality {name}", lambda: self.finality.run(self._bell, leads))
        tasks.start(f"traces {name}", lambda: self.tracing.run(self._bell, leads))
        tasks.start(f"mempool {name}", lambda: self.mempool.run(leads))


def vault_of(settings: Settings) -> Vault:
    """Where no key is given, the secret that keys are kept by does: it, too, is not in the database."""
    return Vault(settings.webhooks.secret_key or settings.keys.pepper)
