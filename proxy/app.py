"""The composition root: builds every object of a worker once, and takes them down in the opposite order.

Constructors only assign; whatever opens a socket or starts a loop is a step of `start` here.
"""

from __future__ import annotations

import asyncio
import socket
from collections import defaultdict

from aiohttp import web

from proxy.process import Tasks
from proxy.services.admission import Admission, Failures
from proxy.services.keyring import Keyring, utc_day
from proxy.services.quotas import Quotas
from proxy.services.readiness import Readiness
from proxy.services.rpc import Rpc
from proxy.settings import SCHEMAS, Settings, Tables
from proxy.settings import Upstream as UpstreamSettings
from proxy.store.keys import KeyStore
from proxy.store.pool import Pool
from proxy.store.quotas import QuotaStore
from proxy.store.windows import Windows
from proxy.web import contract, routes
from proxy.web.front import Door, require_c_parser
from proxy.web.gate import Gate
from proxy.web.pages import Pages
from proxy.web.rpc import RpcHandler
from proxy.wire.upstream import Upstream, UpstreamClient


class App:
    """One worker: everything between its listening socket and its upstreams."""

    def __init__(self, settings: Settings, tables: Tables, windows: Windows) -> None:
        self.settings = settings
        self.tasks = Tasks()
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
        self.client = UpstreamClient()
        self.rpc = Rpc(self.admission, self.client, upstreams=_by_network(settings.upstreams), prices=tables.prices)
        self.door = Door(settings.server)
        gate = Gate(self.admission, self.door, settings.server, access_log=settings.log.access)
        self.contract = contract.load(SCHEMAS)
        self.web = web.Application(middlewares=[gate.middleware], client_max_size=settings.server.max_body_bytes)
        handlers: dict[str, routes.Handler] = {
            "rpc_call": RpcHandler(gate, self.admission, tables.chains, self.rpc).answer
        }
        self.web.add_routes(Pages(self.contract, self.readiness).routes())
        self.web.add_routes(routes.of_contract(self.contract, handlers))
        self._runner = web.AppRunner(self.web, access_log=None)
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Load what must be there before the first request, then listen."""
        require_c_parser()
        await self.pool.open()
        await self.client.open()
        await self.keyring.load()
        self.readiness.keys_loaded = True
        await self._runner.setup()
        assert self._runner.server is not None
        self.door.open(self._runner.server)
        self.tasks.start("keyring", self.keyring.follow)
        self.tasks.start("quotas", self.quotas.run)
        self.tasks.start("readiness", self.readiness.watch)
        self.tasks.start("door", self.door.sweep)
        self._server = await asyncio.get_running_loop().create_server(self.door, sock=listener, backlog=4096)

    async def stop(self) -> None:
        """Drain: nobody new, everybody in flight to the end, then everything down."""
        self.readiness.draining = True
        if self._server is not None:
            self._server.close()
        await self.door.drain(self.settings.server.drain_s)
        await self._runner.cleanup()
        await self.tasks.close()
        await self.quotas.close()
        await self.client.close()
        await self.pool.close()


def _by_network(upstreams: tuple[UpstreamSettings, ...]) -> dict[str, list[Upstream]]:
    found: defaultdict[str, list[Upstream]] = defaultdict(list)
    for upstream in upstreams:
        peers = found[upstream.network]
        peers.append(Upstream(f"{upstream.network}#{len(peers) + 1}", upstream.url))
    return dict(found)
