"""The composition root of a worker: builds every object once, and closes them in the opposite order.

Constructors only assign. Opening sockets and starting loops are steps of `start`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time

from aiohttp import web

from proxy.chains.families import family_of
from proxy.compose.accounts import AccountsFeature
from proxy.compose.dashboard import DashboardFeature
from proxy.compose.data import DataFeature
from proxy.compose.data_plane import DataPlane
from proxy.compose.fleet import FleetFeature, host_id
from proxy.compose.gas import GasFeature
from proxy.compose.networks import NetworkBuilder
from proxy.compose.smart_wallets import SmartWalletFeature
from proxy.compose.webhooks import WebhookFeature
from proxy.compose.worker_loops import sweep, update_date, write_counts
from proxy.core.dashboard_links import site_of
from proxy.errors import Unavailable
from proxy.memory_budget import MemoryBudget
from proxy.services.accounts.socket_caps import SocketCaps
from proxy.services.budget_leases import Budgets
from proxy.services.bundler.bundler_policies import ANY_SCOPE as BUNDLER_SCOPES
from proxy.services.contradictions import ContradictionLog
from proxy.services.cost_report import Costs
from proxy.services.process_reports import ProcessReports
from proxy.services.readiness import Readiness
from proxy.services.request_log import RequestLog
from proxy.services.request_recorder import RequestRecorder
from proxy.services.rpc.networks import Networks
from proxy.services.spending_log import SpendingLog
from proxy.settings import SCHEMAS, Certificates, Settings, Tables, load_aliases
from proxy.store.postgres.contradictions import ContradictionStore
from proxy.store.postgres.fleet import FleetStore
from proxy.store.postgres.index_databases import IndexDatabases
from proxy.store.postgres.local_copy import CopyDirectory
from proxy.store.postgres.notices import Notices
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.private_transactions import PrivateTransactionStore
from proxy.store.postgres.replica import replica_reads
from proxy.store.postgres.request_store import RequestStore
from proxy.store.postgres.spending import SpendingStore
from proxy.store.postgres.usage import UsageStore
from proxy.store.shared_memory import host_memory
from proxy.store.shared_memory.host_memory import HostMemory
from proxy.store.shared_memory.leased_buckets import LeasedBuckets
from proxy.store.shared_memory.rate_buckets import RateBuckets
from proxy.tasks import Tasks
from proxy.telemetry import AccessLines, Tallies
from proxy.tracing import tracer_of
from proxy.turn_queue import TurnQueue
from proxy.web import api_spec, routes
from proxy.web.aiohttp_internals import forget_handlers, make_targets_native
from proxy.web.api_middleware import ApiMiddleware, Handler
from proxy.web.call_accounting import CallAccounting
from proxy.web.cross_origin import CrossOrigin
from proxy.web.dashboard.contradictions import ContradictionHandlers
from proxy.web.dashboard.session_endpoint import SessionHandler
from proxy.web.dashboard.static_files import shipped_files
from proxy.web.dashboard.upstream_costs import CostHandlers
from proxy.web.docs.pages import Pages, page_files
from proxy.web.docs.published_spec import PublishedSpec
from proxy.web.front.connection_limiter import ConnectionLimiter
from proxy.web.front.front_connection import FrontConnection
from proxy.web.front.front_context import FrontContext
from proxy.web.front.handler_connection import require_c_parser
from proxy.web.front.request_headers import RequestHeaderReader
from proxy.web.front.rest_requests import RouteRequestReader
from proxy.web.front.tls_listener import TlsListener
from proxy.web.network_resolver import NetworkResolver
from proxy.web.request_targets import TargetReader
from proxy.web.rest.endpoint import RestEndpoints, RestHandler
from proxy.web.rest.requests import RequestRecordHandlers
from proxy.web.rest.usable_networks import UsableNetworks
from proxy.web.rest_targets import RestTargets
from proxy.web.rpc.handler import RpcHandler
from proxy.web.rpc.paymaster import PaymasterHandler
from proxy.web.rpc.rest_handler import OPERATIONS, RestCallHandler
from proxy.web.websocket.client_sockets import ClientSockets
from proxy.web.websocket.handshake import SOCKET_PATH, Handshake
from proxy.web.websocket.socket_context import SocketContext
from proxy.wire.write_buffer import WriteBuffer

log = logging.getLogger("penstock.worker")

# How long a worker waits for Postgres before it starts with its predecessor's keys. Reading 100,000 keys takes a second.
LOAD_S = 5.0
# Part of the memory for cached replies that their compressed forms may take in addition.
ENCODED_PART = 8
# The connection limiter has waited for requests in flight already: a handler that still runs has no client left.
AFTER_DRAIN_S = 0.1
# Mails get at least this time when the worker stops, less than the supervisor allows beyond the drain.
LEAST_MAIL_S = 2.0


def preload_files() -> None:
    """Read and compress the files that ship with the code, before workers are forked: they then share them."""
    api_spec.load(SCHEMAS)
    shipped_files()
    page_files()


class App:
    """One worker: everything between its listening socket and its upstreams."""

    def __init__(
        self,
        settings: Settings,
        tables: Tables,
        buckets: RateBuckets,
        *,
        copies: CopyDirectory | None = None,
        memory: HostMemory | None = None,
        certificates: Certificates | None = None,
    ) -> None:
        """`copies`: where a successor finds what this worker has read from Postgres. `buckets` and `memory` are shared by the
        workers of the host; without `memory`, this worker has its own. `certificates`: for https."""
        self.settings = settings
        # A method that is switched off has no price, and no key can be limited to it.
        self._tables = tables.with_own_methods(settings.rpc.answered_services)
        self.tasks = Tasks()
        self.tallies = Tallies()
        self.tracer = tracer_of(settings.tracing, "gateway")
        self.access = AccessLines() if settings.log.access else None
        loop = asyncio.get_running_loop()
        self.turns = TurnQueue(loop)
        self.budget = MemoryBudget(settings.server.max_held_bytes)
        self.limiter = ConnectionLimiter(
            settings.server, self.turns, self.budget.of("bodies"), site=site_of(settings.dashboard.url)
        )
        self._tls = None if certificates is None else TlsListener(self.limiter, settings.server.tls, certificates)
        self.write_buffer = WriteBuffer(loop)
        self._copies = copies
        self.memory = memory or HostMemory(host_memory.create())
        self._build_database()
        self.fleet = self._fleet(buckets)
        valkey = self.fleet.report if self.fleet else None
        self.report = ProcessReports(FleetStore(self.pool), "gateway", instance=host_id(), valkey=valkey)
        self._build_accounts(buckets)
        builder = self._network_builder()
        self._build_data_plane(builder)
        self._build_features(builder)
        self.spending = SpendingLog(SpendingStore(self.pool), self.networks.meters(), flush_s=settings.usage.flush_s)
        self.budgets = Budgets(SpendingStore(self.pool), self.networks.metered())
        self._build_web()
        self._build_front()
        self._runner = web.AppRunner(self.web, access_log=None, shutdown_timeout=AFTER_DRAIN_S)
        self._server: asyncio.Server | None = None

    def _fleet(self, buckets: RateBuckets) -> FleetFeature | None:
        """The state that hosts share, if a Valkey for limits is configured."""
        if not isinstance(buckets, LeasedBuckets):
            return None
        return FleetFeature(self.settings, buckets, self.memory, self.pool, self.tasks)

    def _build_database(self) -> None:
        """Postgres, and the services that need nothing else."""
        given, requests = self.settings.database, self.settings.requests
        self.pool = Pool.of(given, per_client=given.per_client)
        self.reads = replica_reads(given, self.pool)
        self.indexes = IndexDatabases.of(self.settings, self.pool, per_client=given.per_client)
        self.notices = Notices(self.pool)
        self.recorder = RequestRecorder(
            self.budget.of("records"), slow_s=requests.slow_ms / 1000, is_on=requests.keep_days > 0
        )
        self.requests = RequestLog(self.recorder, RequestStore(self.pool), keep_days=requests.keep_days)
        self.contradictions = ContradictionLog(ContradictionStore(self.pool))

    def _build_accounts(self, buckets: RateBuckets) -> None:
        self.accounts = AccountsFeature(
            self.settings,
            self._tables,
            self.pool,
            buckets,
            self.memory.addresses,
            copies=self._copies,
            reads=self.reads,
            fleet=self.fleet,
        )
        self.keyring = self.accounts.keyring
        self.admission = self.accounts.admission
        self.usage = self.accounts.usage
        self.accounting = CallAccounting(self.admission, self.usage, self.recorder, self.access)
        self.readiness = Readiness(self.keyring, self.indexes.by_name)

    def _network_builder(self) -> NetworkBuilder:
        return NetworkBuilder(
            self.settings,
            self._tables,
            self.write_buffer,
            self.turns,
            tally=self.tallies.of,
            heads_memory=self.memory,
            memory=self.memory,
            held=self.budget.of("replies"),
            hosts=self.fleet.hosts if self.fleet else lambda: 1,
            leases=self.fleet.upstreams if self.fleet else None,
            exchange=self.fleet.heads if self.fleet else None,
        )

    def _build_data_plane(self, builder: NetworkBuilder) -> None:
        self.plane = DataPlane(
            self.settings,
            self.admission,
            builder,
            budget=self.budget,
            turns=self.turns,
            tasks=self.tasks,
            polls=self.memory.polls,
            on_contradiction=self.contradictions.note,
            private=PrivateTransactionStore(self.pool),
        )
        self.networks = self.plane.networks
        self.rpc = self.plane.rpc
        self.internal_calls = self.plane.internal_calls
        self.feeds = self.plane.feeds

    def _build_features(self, builder: NetworkBuilder) -> None:
        parts = self.settings, self._tables, self.pool
        self.data = DataFeature(*parts, self.internal_calls, reads=self.reads, index_pools=self.indexes.split_pools)
        self.plane.own_methods.register(self.data.own_methods())
        self.smart_wallets = SmartWalletFeature(
            *parts, self.internal_calls, self.networks, builder, self.tasks, self.plane.meters
        )
        self.gas = GasFeature(*parts, self.internal_calls, self.data.prices, turns=self.turns)
        self.webhooks = WebhookFeature(*parts, self.internal_calls, self.turns, self.budget.of("backtests"))
        self.dashboard = DashboardFeature(
            *parts,
            self.accounts,
            networks=self.networks,
            bundlers=self.smart_wallets.bundlers,
            relays=self.plane.relays,
            addresses=self.memory.addresses,
            figures=lambda: {"connections": len(self.limiter.connections), "keys": len(self.keyring)},
            tasks=self.tasks,
            copies=self._copies,
            index_pools=self.indexes.split_pools,
        )

    def _build_web(self) -> None:
        """Everything that aiohttp serves: the API, the pages and the WebSocket handshake."""
        server = self.settings.server
        self.api_spec = api_spec.load(SCHEMAS)
        cross_origin = CrossOrigin(routes.roots_for_keys(self.api_spec), server.cors_origins)
        self.api = api = ApiMiddleware(
            self.admission,
            self.limiter,
            server,
            cross_origin,
            accounting=self.accounting,
            tracer=self.tracer,
            sandbox=self.dashboard.sandbox,
        )
        largest = max(server.max_body_bytes, self.settings.webhooks.max_body_bytes)
        self.web = web.Application(middlewares=[api.middleware], client_max_size=largest)
        self.sockets = self._sockets()
        self.rest_targets = RestTargets(self.networks)
        resolver = NetworkResolver(self._tables.chains, self.networks, self.admission)
        served = [route.network for route in self.networks.routes.values()]
        published = PublishedSpec(self.api_spec, self._tables, served)
        pages = Pages(published, self.readiness, sends_mail=bool(self.settings.mail.host))
        self.web.add_routes(pages.routes())
        self.web.add_routes(routes.of_spec(self.api_spec, self._handlers(api, resolver)))
        self.web.add_routes([web.get(SOCKET_PATH, Handshake(api, resolver, self.sockets).answer, allow_head=False)])
        aliases = load_aliases(self.settings.aliases, self._tables, own=self.settings.data_files.directory)
        self._targets = TargetReader(aliases, routes.own_roots(self.web))

    def _build_front(self) -> None:
        """The state that all connections of the hot path share."""
        self.front = FrontContext(
            self._head_reader(),
            self.rpc,
            self.admission,
            self.write_buffer,
            server=self.settings.server,
            held=self.budget.of("replies"),
            turns=self.turns,
            accounting=self.accounting,
            shows_upstream=self.settings.rpc.show_upstream,
            shows_cost=bool(self.networks.meters()),
            encoded_bytes=self.settings.cache.bytes // ENCODED_PART,
            site=self.limiter.site,
        )

    def _handlers(self, api: ApiMiddleware, resolver: NetworkResolver) -> dict[str, Handler]:
        """The handler of every operation in the API spec, by its id."""
        records = RequestRecordHandlers(
            self.requests, shows_upstream=self.settings.rpc.show_upstream, price_of=self._tables.price_of
        )
        rest = {**records.handlers(), **self._rest_handlers()}
        endpoints = RestEndpoints(
            api,
            self.admission,
            self.plane.meters,
            self.api_spec,
            self._tables.prices.rest,
            resolver,
            actions=self.dashboard.actions,
            large_body=self.settings.webhooks.max_body_bytes,
        )
        return {
            **self._rpc_handlers(api, resolver),
            **endpoints.wrapped(rest),
            **self.dashboard.handlers(
                api,
                self.admission,
                self.api_spec,
                resolver,
                rest,
                operator={**records.admin_handlers(), **self._operator_handlers()},
                meters=self.plane.meters,
                with_key=endpoints,
            ),
        }

    def _operator_handlers(self) -> dict[str, SessionHandler]:
        unit_prices = self.settings.usage.unit_prices
        costs = Costs(SpendingStore(self.pool), UsageStore(self.pool), self.networks.meters(), unit_prices)
        return {
            **ContradictionHandlers(self.contradictions).handlers(),
            **CostHandlers(costs, self.dashboard.fleet).handlers(),
        }

    def _rest_handlers(self) -> dict[str, RestHandler]:
        return {
            **self.data.handlers(),
            **self.smart_wallets.handlers(),
            **self.gas.handlers(),
            **self.webhooks.handlers(),
            **UsableNetworks(
                self._tables.chains,
                self.networks,
                self.smart_wallets.bundlers,
                self.gas.paymasters,
                follows=self.settings.follower.follows,
            ).handlers(),
        }

    def _rpc_handlers(self, api: ApiMiddleware, resolver: NetworkResolver) -> dict[str, Handler]:
        shown = self.settings.rpc.show_upstream
        rest = RestCallHandler(api, resolver, self.rpc, self.rest_targets, self.sockets, shows_upstream=shown)
        return {
            **dict.fromkeys(OPERATIONS.values(), rest.answer),
            "rpc_call": RpcHandler(api, resolver, self.rpc, shows_upstream=shown).answer,
            "bundler_call": RpcHandler(
                api,
                NetworkResolver(self._tables.chains, self.smart_wallets.bundlers, self.admission, needs="bundler"),
                self.rpc,
                operation="bundler_call",
                scopes=BUNDLER_SCOPES,
                shows_upstream=shown,
            ).answer,
            "paymaster_call": PaymasterHandler(
                api,
                resolver,
                self.admission,
                self.plane.meters,
                self.gas.sponsor,
                self._tables.prices.paymaster,
            ).answer,
        }

    def _sockets(self) -> ClientSockets:
        context = SocketContext(
            self.settings.sockets,
            limiter=self.limiter,
            admission=self.admission,
            caps=SocketCaps(self._tables.plans, self.memory.counts, self.fleet.counts if self.fleet else None),
            rpc=self.rpc,
            feeds=self.feeds,
            prices=self._tables.prices.events,
            tasks=self.tasks,
            accounting=self.accounting,
            memory=self.budget.of("subscriptions"),
        )
        return ClientSockets(context, self.keyring)

    def _head_reader(self) -> RequestHeaderReader:
        named = {
            (stem, f"{chain}/{network.name}"): route
            for stem, networks in (("rpc", self.networks), ("bundler", self.smart_wallets.bundlers))
            for network in self._tables.chains.networks()
            if (route := networks.find(network)) is not None
            for chain in (network.chain.name, *network.chain.aliases)
        }
        with_rest = {
            name: route for (stem, name), route in named.items() if stem == "rpc" and family_of(route.network).rest
        }
        paths = {
            f"{routes.BASE}/{stem}/{name}": route
            for (stem, name), route in named.items()
            if stem != "rpc" or name not in with_rest
        }
        return RequestHeaderReader(
            paths,
            lambda text: self.keyring.find(text, time.monotonic()),
            self._targets,
            max_header_bytes=self.settings.server.max_header_bytes,
            max_body=self.settings.server.max_body_bytes,
            is_tracing=self.tracer is not None,
            rest=RouteRequestReader(with_rest, self.rest_targets) if with_rest else None,
        )

    async def start(self, listener: socket.socket) -> None:
        """Load what the first request needs, start the loops that keep it up to date, and listen."""
        await self.pool.open()
        await self.indexes.open()
        await self._load()
        if self.fleet is not None:
            await self.fleet.start(self.networks)
        self.readiness.keys_loaded = True
        await self.budgets.start()
        self._follow()
        await self.plane.track_heads()
        await self.listen(listener)

    async def _load(self) -> None:
        """Load the keys. A successor that gets none from Postgres in time uses the copy of its predecessor."""
        try:
            async with asyncio.timeout(LOAD_S if self.keyring.copy.exists else None):
                await self.keyring.load()
        except (Unavailable, TimeoutError):
            if not await self.keyring.load_copy():
                raise
            log.warning("Postgres does not answer: started with the keys that the previous worker had")
        await self.dashboard.cordons.load_copy()

    @property
    def _groups(self) -> tuple[Networks, ...]:
        return self.networks, self.smart_wallets.bundlers, self.plane.relays

    def _follow(self) -> None:
        """Start the loops that follow the database."""
        self.tasks.start("notices", self.notices.run)
        self.accounts.start(self.tasks, self.notices)
        self.readiness.start(self.tasks)
        self.tasks.start("replica", self.reads.watch)
        self.tasks.start("process report", self.report.run)
        self.tasks.start("tally", lambda: write_counts(self._groups, self.usage, self.tallies))
        self.tasks.start("requests", self.requests.run)
        self.tasks.start("old requests", self.requests.keep)
        self.tasks.start("contradictions", self.contradictions.run)
        self.tasks.start("spending", self.spending.run)
        if self.budgets.is_needed:
            self.tasks.start("budgets", self.budgets.run)
        self.dashboard.start(self.notices)
        self.tasks.start("refusals", self.gas.refusals.run)

    async def listen(self, listener: socket.socket) -> None:
        """Serve on the socket. From here on everything that a call needs is in memory."""
        require_c_parser()
        self.dashboard.listens_on(self.settings.server.tls.scheme, *listener.getsockname()[:2])
        await self._runner.setup()
        assert self._runner.server is not None
        make_targets_native(self._runner.server, self._targets)
        self.limiter.open(
            self._runner.server,
            lambda: FrontConnection(self.limiter, self.front),
            self.admission.headers_without_key,
        )
        self.plane.serve()
        self.tasks.start("connections", self.limiter.sweep)
        self.tasks.start("date", lambda: update_date(self.front))
        self.tasks.start("sockets", self.sockets.watch)
        if self.access is not None:
            self.tasks.start("access log", self.access.run)
        self.tasks.start("sweep", lambda: sweep(self._groups, self.plane.adopt_heads))
        self._server = await self.accept_from(listener)

    async def accept_from(self, listener: socket.socket) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        return await loop.create_server(self._tls or self.limiter, sock=listener, backlog=4096)

    def renew_certificates(self, certificates: Certificates) -> None:
        if self._tls is not None:
            self._tls.renew(certificates)
            log.info("certificates renewed", extra={"names": self._tls.names})

    def leave(self) -> None:
        """Report to load balancers that this worker is about to stop. It still serves."""
        self.readiness.draining = True

    async def stop(self) -> None:
        """Drain: accept no new connections, let requests in flight and their mails finish, then close everything."""
        self.leave()
        end = time.monotonic() + self.settings.server.drain_s
        if self._server is not None:
            self._server.close()
        self.front.drain()
        self.sockets.drain()
        await self.limiter.drain(self.settings.server.drain_s)
        await self._runner.cleanup()
        forget_handlers()
        await self.dashboard.drain(max(LEAST_MAIL_S, end - time.monotonic()))
        await self.tasks.close()
        await self.dashboard.close()
        await self.gas.refusals.flush()
        await self.accounts.close()
        await self.requests.close()
        await self.contradictions.close()
        await self.spending.close()
        await self.budgets.close()
        await self.plane.close()
        await self.smart_wallets.bundlers.close()
        await self.data.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)
        await self.report.close()
        await self.reads.close()
        await self.indexes.close()
        await self.pool.close()
        if self.access is not None:
            self.access.flush()
