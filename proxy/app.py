"""The composition root: builds every object of a worker once, and takes them down in the opposite order.

Constructors only assign; whatever opens a socket or starts a loop is a step of `start` here.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from proxy.chains.registry import Network
from proxy.core.caching import Replies
from proxy.core.routing import Health
from proxy.process import Tasks
from proxy.services.admission import Admission, Failures
from proxy.services.keyring import Keyring, utc_day
from proxy.services.quotas import Quotas
from proxy.services.readiness import Readiness
from proxy.services.rpc.calls import Rpc
from proxy.services.rpc.filters import Filters
from proxy.services.rpc.logs import Logs
from proxy.services.rpc.networks import Marks, Networks, Route, plans_of, unknown_of
from proxy.services.rpc.shelf import Shelf
from proxy.services.rpc.tracker import Tracker
from proxy.settings import SCHEMAS, Settings, Tables
from proxy.settings import Upstream as UpstreamSettings
from proxy.store.keys import KeyStore
from proxy.store.pool import Pool
from proxy.store.quotas import QuotaStore
from proxy.store.windows import Windows
from proxy.telemetry import AccessLines, Tallies
from proxy.web import contract, routes
from proxy.web.door import Door, require_c_parser
from proxy.web.front import Front
from proxy.web.gate import Gate
from proxy.web.heads import HeadReader
from proxy.web.hot import Hot
from proxy.web.pages import Pages
from proxy.web.rest import Rest
from proxy.web.rpc import RpcHandler
from proxy.web.where import Where
from proxy.wire.socket import SocketUpstream
from proxy.wire.turn import Turn
from proxy.wire.upstream import Address, Upstream

if TYPE_CHECKING:
    from proxy.store.cache import SharedReplies

# How often deadlines and hedges of calls are looked at.
SWEEP_S = 0.02
TALLY_S = 1.0
# The door has waited for everybody in flight before: a handler that still runs has nobody left to answer.
AFTER_DRAIN_S = 0.1


class App:
    """One worker: everything between its listening socket and its upstreams."""

    def __init__(self, settings: Settings, tables: Tables, windows: Windows) -> None:
        self.settings = settings
        self._windows = windows
        self.tasks = Tasks()
        self.tallies = Tallies()
        self.turn = Turn(asyncio.get_running_loop())
        self.pool = Pool(
            settings.database.url,
            size=settings.database.pool_size,
            acquire_timeout_s=settings.database.acquire_timeout_s,
        )
        self.keys = KeyStore(self.pool, pepper=settings.keys.pepper, plans=tuple(tables.plans))
        self.keyring = Keyring(
            self.keys,
            self.pool,
            windows,
            plans=tables.plans,
            pepper=settings.keys.pepper,
            reload_s=settings.keys.reload_s,
        )
        self.quotas = Quotas(
            QuotaStore(self.pool),
            chunk=settings.quotas.chunk,
            flush_s=settings.quotas.flush_s,
            day=utc_day,
            accounts=self.keyring.accounts.values,
        )
        self.admission = Admission(self.keyring, windows, self.quotas, Failures(settings.keys.auth_failures_per_minute))
        self.readiness = Readiness(self.keyring, self.pool)
        self.networks = self._networks(tables)
        self.rpc = Rpc(self.admission, tables.prices, Filters(settings.keys.pepper))
        self.logs = Logs(self.tasks, settings.rpc)
        self.shared = self._shared_replies()
        self.door = Door(settings.server)
        self.access = AccessLines() if settings.log.access else None
        gate = Gate(self.admission, self.door, settings.server, access_log=settings.log.access)
        self.contract = contract.load(SCHEMAS)
        self.web = web.Application(middlewares=[gate.middleware], client_max_size=settings.server.max_body_bytes)
        shown = settings.rpc.show_upstream
        where = Where(tables.chains, self.networks, self.admission)
        handlers: dict[str, routes.Handler] = {
            "rpc_call": RpcHandler(gate, where, self.rpc, shows_upstream=shown).answer,
            **Rest(gate, self.admission, self.contract, tables.prices.rest, where).handlers({}),
        }
        self.web.add_routes(Pages(self.contract, self.readiness).routes())
        self.web.add_routes(routes.of_contract(self.contract, handlers))
        self.hot = Hot(
            self._head_reader(tables),
            self.rpc,
            self.admission,
            self.turn,
            max_head=settings.server.max_head_bytes,
            max_requests=settings.server.keepalive_requests,
            log=self.access,
            shows_upstream=shown,
        )
        self._runner = web.AppRunner(self.web, access_log=None, shutdown_timeout=AFTER_DRAIN_S)
        self._server: asyncio.Server | None = None

    def _networks(self, tables: Tables) -> Networks:
        by_network: defaultdict[str, list[UpstreamSettings]] = defaultdict(list)
        for upstream in self.settings.upstreams:
            network = tables.chains.find(*upstream.network.split("/"))
            assert network is not None  # checked when the settings were read
            by_network[network.id].append(upstream)
        share = self.settings.cache.bytes // max(1, len(by_network))
        # The place among all networks there are, so that workers with other upstreams mean the same.
        places = {network.id: (place, network) for place, network in enumerate(tables.chains.networks())}
        return Networks([self._route(*places[name], found, tables, share) for name, found in by_network.items()])

    def _route(
        self, place: int, network: Network, found: list[UpstreamSettings], tables: Tables, cache_bytes: int
    ) -> Route:
        return Route(
            network,
            [self._upstream(network, index, each) for index, each in enumerate(found)],
            plans_of(network, tables.prices, self.tallies.of),
            Replies(cache_bytes),
            Marks(self._windows.marks, place),
            unknown=unknown_of(network, self.tallies.of),
            broadcast=self.settings.rpc.broadcast,
            call_timeout_s=self.settings.rpc.call_timeout_s,
            lag_s=self.settings.rpc.lag_s,
            keeps=self.settings.cache.enabled,
            coalesces=self.settings.cache.coalesce,
        )

    def _upstream(self, network: Network, index: int, given: UpstreamSettings) -> Upstream:
        health = Health(
            f"{network.id}#{index + 1}",
            index=index,
            weight=given.weight,
            tier=given.tier,
            archive=given.archive,
            allow=given.allow,
            deny=given.deny,
            requests_per_second=given.requests_per_second,
        )
        if given.url.startswith("ws"):
            return SocketUpstream(health, given.url, dict(given.headers), self.turn, batch=given.batch)
        address = Address.of(given.url, given.headers)
        depth = given.depth or self.settings.rpc.depth
        return Upstream(health, address, self.turn, limit=given.connections, depth=depth, batch=given.batch)

    def _shared_replies(self) -> SharedReplies | None:
        """The second level of the cache, and its shelf for each network, where one is configured."""
        if not self.settings.cache.redis_url or not self.settings.cache.enabled:
            return None
        from proxy.store.cache import SharedReplies  # 50 ms of imports that most workers do without

        shared = SharedReplies(self.settings.cache.redis_url)
        for route in self.networks.routes.values():
            route.shelf = Shelf(route, shared, self.tasks)
        return shared

    def _head_reader(self, tables: Tables) -> HeadReader:
        paths = {
            f"{routes.BASE}/rpc/{chain}/{network.name}": route
            for network in tables.chains.networks()
            if (route := self.networks.find(network)) is not None
            for chain in (network.chain.name, *network.chain.aliases)
        }
        return HeadReader(
            paths,
            lambda text: self.keyring.find(text, time.monotonic()),
            max_head=self.settings.server.max_head_bytes,
            max_body=self.settings.server.max_body_bytes,
        )

    async def start(self, listener: socket.socket) -> None:
        """Load what must be there before the first request, keep it true from then on, and listen."""
        await self.pool.open()
        await self.keyring.load()
        self.readiness.keys_loaded = True
        self._follow()
        await self.listen(listener)

    def _follow(self) -> None:
        """The loops that look outside: at the database and at the heads of the networks."""
        self.tasks.start("keyring", self.keyring.follow)
        self.tasks.start("quotas", self.quotas.run)
        self.tasks.start("readiness", self.readiness.watch)
        self.tasks.start("tally", self._tally)
        for route in self.networks.routes.values():
            self.tasks.start(f"heads {route.network.id}", Tracker(route).run)

    async def listen(self, listener: socket.socket) -> None:
        """Serve on the socket. All that a call needs from here on is in memory."""
        require_c_parser()
        await self._runner.setup()
        assert self._runner.server is not None
        self.door.open(self._runner.server, lambda: Front(self.door, self.hot))
        for route in self.networks.routes.values():
            self.logs.serve(route)
        self.tasks.start("door", self.door.sweep)
        self.tasks.start("hot", self.hot.run)
        if self.access is not None:
            self.tasks.start("access log", self.access.run)
        self.tasks.start("sweep", self._sweep)
        if self.shared is not None:
            self.tasks.start("shared cache", self.shared.run)
        self._server = await asyncio.get_running_loop().create_server(self.door, sock=listener, backlog=4096)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.networks.sweep()

    async def _tally(self) -> None:
        """Once a second, what was counted goes where the supervisor finds it."""
        directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        while directory:
            await asyncio.sleep(TALLY_S)
            self.tallies.write(Path(directory) / f"calls-{os.getpid()}.json", self.networks.counts())

    async def stop(self) -> None:
        """Drain: nobody new, everybody in flight to the end, then everything down."""
        self.readiness.draining = True
        if self._server is not None:
            self._server.close()
        self.hot.drain()
        await self.door.drain(self.settings.server.drain_s)
        await self._runner.cleanup()
        await self.tasks.close()
        await self.quotas.close()
        await self.networks.close()
        if self.shared is not None:
            await self.shared.close()
        await self.pool.close()
        if self.access is not None:
            self.access.flush()
