"""A deliverer on a real database, and a receiver with scripted replies."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from proxy.core import attempts, signatures
from proxy.core.attempts import Format
from proxy.core.delivery_concurrency import Lanes
from proxy.core.egress import EgressPolicy
from proxy.services.delivery.deliverer import Deliverer
from proxy.store.postgres.deliveries import DeliveryStore
from proxy.store.postgres.notices import Notices
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.secrets import Vault
from proxy.store.postgres.webhooks import NewWebhook, Webhook, WebhookStore
from proxy.tasks import Tasks
from proxy.wire.outbound_guard import OutboundGuard
from proxy.wire.receiver import Receiver
from tests.shipped_tables import TABLES

LOOPBACK = OutboundGuard(EgressPolicy(allow=["127.0.0.0/8"]), http=True, ports=())
KEY = b"k" * 32
SECRET = signatures.secret_of(KEY)
VAULT = Vault("a key for tests that cannot be guessed")
NETWORK = "dev/mainnet"
Page = Callable[[web.Request], Awaitable[web.StreamResponse]]
_serial = itertools.count(1)


@dataclass(frozen=True)
class Post:
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def event_id(self) -> str:
        return self.headers["webhook-id"]


class Inbox:
    """A receiver that records posts. `pages` has the handlers of some paths; others reply with 200."""

    def __init__(self) -> None:
        self.posts: list[Post] = []
        self.pages: dict[str, Page] = {}
        self.ports: list[int] = []

    @property
    def port(self) -> int:
        return self.ports[0]

    def url(self, path: str = "/", *, server: int = 0) -> str:
        return f"http://127.0.0.1:{self.ports[server]}{path}"

    def at(self, path: str) -> list[Post]:
        return [post for post in self.posts if post.path == path]

    def ids(self) -> set[str]:
        return {post.event_id for post in self.posts}

    def answer(self, path: str, *statuses: int, **headers: str) -> None:
        """Reply with these statuses in order, and repeat the last one."""
        left = list(statuses)
        named = {name.replace("_", "-"): value for name, value in headers.items()}

        async def page(request: web.Request) -> web.Response:
            return web.Response(status=left.pop(0) if len(left) > 1 else left[0], text="excerpt", headers=named)

        self.pages[path] = page

    async def receive(self, request: web.Request) -> web.StreamResponse:
        self.posts.append(Post(request.path, request.headers.copy(), await request.read()))
        page = self.pages.get(request.path)
        return await page(request) if page else web.Response()


@asynccontextmanager
async def inbox(servers: int = 1) -> AsyncIterator[Inbox]:
    """Listen on several ports: each counts as a separate receiver."""
    found = Inbox()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", found.receive)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.05)
    await runner.setup()
    for _ in range(servers):
        await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.ports = [address[1] for address in runner.addresses]
    yield found
    await runner.cleanup()


class DeliveryHarness:
    def __init__(self, pool: Pool, inbox: Inbox) -> None:
        self.pool = pool
        self.notices = Notices(pool)
        self.inbox = inbox
        self.store = DeliveryStore(pool)
        self.webhooks = WebhookStore(pool)
        self.made: defaultdict[str, list[str]] = defaultdict(list)

    async def account(self, plan: str = "enterprise") -> str:
        name = f"acct_{next(_serial)}"
        await self.execute(
            "insert into accounts (id, name, email, plan) values ($1, 'N', $1 || '@example.com', $2)", name, plan
        )
        return name

    async def webhook(
        self,
        path: str = "/",
        event_type: str = "token_transfer",
        *,
        account: str = "",
        server: int = 0,
        fault: str | None = None,
    ) -> Webhook:
        owner = account or await self.account()
        new = NewWebhook(
            account=owner,
            network=NETWORK,
            live=True,
            url=self.inbox.url(path, server=server),
            event_type=event_type,
            config={},
            test_key=fault is not None,
            fault=fault,
        )
        name = self.webhooks.new_id()
        return await self.webhooks.create(name, new, addresses=None, secret=VAULT.seal(name, KEY), most=10_000)

    async def events(self, webhook: Webhook, count: int = 1, *, test: bool = False, **data: Any) -> list[str]:
        """Add events that are due now and return their ids."""
        names = [f"evt_{next(_serial):08}" for _ in range(count)]
        kind = "event_type" if webhook.event_type.islower() else "type"
        bodies = [orjson.dumps({"id": name, kind: webhook.event_type, "data": data}) for name in names]
        async with self.pool.connection() as connection, connection.transaction():
            await connection.execute(
                "insert into events (id, webhook_id, network, type, body, test)"
                " select t.id, $3, $4, $5, t.body, $6 from unnest($1::text[], $2::bytea[]) as t (id, body)",
                names, bodies, webhook.id, webhook.network, webhook.event_type, test,
            )  # fmt: skip
            await connection.execute(
                "insert into deliveries (event_id, webhook_id) select id, $2 from unnest($1::text[]) as t (id)",
                names, webhook.id,
            )  # fmt: skip
            await connection.execute("select pg_notify('penstock_deliveries', '')")
        self.made[webhook.id] += names
        return names

    async def execute(self, query: str, *values: Any) -> None:
        async with self.pool.connection() as connection:
            await connection.execute(query, *values)

    async def rows(self, query: str, *values: Any) -> list[Any]:
        async with self.pool.connection() as connection:
            return await connection.fetch(query, *values)

    async def states(self, webhook: Webhook) -> dict[str, str]:
        rows = await self.rows("select event_id, state from deliveries where webhook_id = $1", webhook.id)
        return {row["event_id"]: row["state"] for row in rows}

    async def are_all(self, webhook: Webhook, state: str) -> bool:
        return set((await self.states(webhook)).values()) == {state}

    async def status(self, webhook: Webhook) -> tuple[str, str | None]:
        row = (await self.rows("select status, reason from webhooks where id = $1", webhook.id))[0]
        return row["status"], row["reason"]

    @asynccontextmanager
    async def delivering(self, **options: Any) -> AsyncIterator[Deliverer]:
        """Run a deliverer. The options are those of `deliverer`."""
        tasks = Tasks()
        async with self.deliverer(**options) as found:
            tasks.start("deliverer", found.run)
            tasks.start("notices", self.notices.run)
            try:
                yield found
            finally:
                await tasks.close()

    @asynccontextmanager
    async def deliverer(
        self,
        *,
        schedules: Mapping[Format, tuple[float, ...]] = attempts.SCHEDULES,
        total: int = 64,
        each: int = 8,
        timeout_s: float = 15.0,
        guard: OutboundGuard = LOOPBACK,
        lease_s: float = 30.0,
    ) -> AsyncIterator[Deliverer]:
        receiver = Receiver(guard, timeout_s=timeout_s)
        found = Deliverer(
            self.store,
            receiver,
            VAULT,
            lanes=Lanes(total=total, each=each),
            plans=TABLES.plans,
            schedules=schedules,
            lease_s=lease_s,
        )
        found.listen(self.notices)
        try:
            yield found
        finally:
            await receiver.close()
