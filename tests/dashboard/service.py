"""A running service with two workers and two upstreams, and clients that use the dashboard's API like a browser."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from proxy.services.accounts.sign_in import hash_password, new_admin_token
from proxy.settings import SCHEMAS, load_tables
from proxy.store.postgres.keys import KeyStore
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.sessions import SessionStore
from proxy.store.postgres.usage import UsageStore
from proxy.web import api_spec
from tests.flows import production
from tests.flows.production import PEPPER, Production
from tests.flows.upstream import Upstream
from tests.service import until
from tests.shapes import conforms

API_SPEC = api_spec.load(SCHEMAS)
DOCUMENT = API_SPEC.document
NETWORK = "ethereum/sepolia"
PASSWORD = "a password of some length"
FLUSH_S = 0.2
_serial = itertools.count(1)
# Sign-in attempts are limited by IP address, so every client has its own, as behind a load balancer.
_addresses = itertools.count(1)


def settings_text(database: str, urls: list[str], more: str = "") -> str:
    upstreams = "".join(f'[[upstreams]]\nnetwork = "{NETWORK}"\nurl = "{url}"\n' for url in urls)
    return f"""
[server]
port = 0
workers = 2
drain_s = 5.0
trusted_proxies = ["127.0.0.1/32"]
[metrics]
port = 0
[follower]
networks = ["{NETWORK}"]
[database]
url = "{database}"
[keys]
pepper = "{PEPPER}"
auth_failures_per_minute = 100000
[cache]
enabled = false
coalesce = false
[usage]
flush_s = {FLUSH_S}
rollup_s = {FLUSH_S}
[dashboard]
report_s = 0.2
url = "https://dashboard.example.com/"
{more}
{upstreams}
"""


@dataclass
class DashboardService:
    """The running service, with direct access to its database."""

    running: Production
    database: str
    pool: Pool = field(repr=False)
    keys: KeyStore = field(repr=False)
    sessions: SessionStore = field(repr=False)
    upstreams: list[Upstream] = field(repr=False)

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.running.port}/v1"

    @property
    def usage(self) -> UsageStore:
        return UsageStore(self.pool)

    async def account(self, *, plan: str = "enterprise", password: str | None = PASSWORD) -> dict[str, Any]:
        email = f"holder{next(_serial)}@example.com"
        row = await self.keys.create_account(name="Holder", email=email, plan=plan)
        if password is not None:
            await self.sessions.set_password(row["id"], hash_password(password))
        return row

    async def holder(self, account: dict[str, Any] | None = None) -> Client:
        """A client signed in to the given account, or to a new one."""
        found = account or await self.account()
        client = Client(self)
        client.account = found
        reply = await client.post("/account/sign-in", {"email": found["email"], "password": PASSWORD})
        assert reply.status == 200, reply
        client.csrf = reply.data["csrf_token"]
        return client

    async def operator(self) -> Client:
        client = Client(self)
        token = await self.admin_token()
        reply = await client.post("/admin/sign-in", {"token": token})
        assert reply.status == 200, reply
        client.csrf = reply.data["csrf_token"]
        return client

    async def rest(self, method: str, path: str, body: Any = None, *, key: str, **headers: str) -> Reply:
        """A request with an API key, on a new connection."""
        client = Client(self)
        return await client.request(method, path, body, X_API_Key=key, **headers)

    async def admin_token(self, name: str = "operator") -> str:
        token = new_admin_token()
        await self.sessions.add_token(name, token)
        return token


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Any
    body: bytes

    @property
    def data(self) -> Any:
        return orjson.loads(self.body)

    def fault(self, status: int) -> str:
        assert self.status == status, self
        error = self.data["error"]
        assert error["status"] == status
        return str(error["message"])


class Client:
    """A browser's state: its cookies and the CSRF token of its page."""

    def __init__(self, service: DashboardService) -> None:
        self.service = service
        self.account: dict[str, Any] = {}
        self.csrf = ""
        self.cookies: dict[str, str] = {}
        self.address = f"198.51.{next(_addresses) // 250}.{next(_addresses) % 250}"

    async def request(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        sent = {"X-Forwarded-For": self.address, **{name.replace("_", "-"): text for name, text in headers.items()}}
        if self.cookies:
            sent.setdefault("Cookie", "; ".join(f"{name}={value}" for name, value in self.cookies.items()))
        if self.csrf and method != "GET":
            sent.setdefault("X-CSRF-Token", self.csrf)
        data = None
        if body is not None:
            data = body if isinstance(body, bytes) else orjson.dumps(body)
            sent.setdefault("Content-Type", "application/json")
        async with (
            aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session,
            session.request(method, self.service.base + path, data=data, headers=sent) as reply,
        ):
            for name, cookie in reply.cookies.items():
                if cookie.value:
                    self.cookies[name] = cookie.value
                else:
                    self.cookies.pop(name, None)
            received = Reply(reply.status, reply.headers, await reply.read())
            check_spec(method, path.partition("?")[0], received)
            return received

    async def get(self, path: str, **headers: str) -> Reply:
        return await self.request("GET", path, **headers)

    async def post(self, path: str, body: Any = None, **headers: str) -> Reply:
        return await self.request("POST", path, body, **headers)

    async def new_key(self, **members: Any) -> dict[str, Any]:
        reply = await self.post("/account/keys", {"name": "a key", "mode": "test", **members})
        assert reply.status == 201, reply
        created: dict[str, Any] = reply.data
        return created


async def wait_until_known(service: DashboardService, key: str, **headers: str) -> None:
    """Wait until both workers accept a new key, which takes up to a second."""

    async def is_accepted() -> bool:
        return (await call(service, key, **headers)).status == 200

    for _ in range(4):
        await until(is_accepted)


def check_spec(method: str, path: str, reply: Reply) -> None:
    """Assert that the reply matches the API spec."""
    for operation in API_SPEC.operations.values():
        pattern = re.sub(r"\{[a-z_]+\}", "[^/]+", operation.path)
        if operation.method == method and re.fullmatch(pattern, path):
            break
    else:
        raise AssertionError(f"{method} {path} is not in the API spec")
    responses = DOCUMENT["paths"][operation.path][method.lower()]["responses"]
    assert str(reply.status) in responses, (path, reply)
    schema = responses[str(reply.status)].get("content", {}).get("application/json", {}).get("schema")
    if schema is not None and reply.status < 400:
        conforms(reply.data, schema["$ref"].rpartition("/")[2])


async def call(
    service: DashboardService, key: str, method: str = "eth_gasPrice", params: Sequence[Any] = (), **headers: str
) -> Reply:
    """Make one JSON-RPC call with a key, on a new connection."""
    body = orjson.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": [*params]})
    sent = {"X-API-Key": key, "Content-Type": "application/json", **headers}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{service.base}/rpc/{NETWORK}", data=body, headers=sent) as reply,
    ):
        return Reply(reply.status, reply.headers, await reply.read())


@asynccontextmanager
async def start_service(database: str, home: Path, *, more: str = "") -> AsyncIterator[DashboardService]:
    upstreams = [Upstream(), Upstream()]
    for upstream in upstreams:
        await upstream.open()
    config = home / "settings.toml"
    config.write_text(settings_text(database, [upstream.url for upstream in upstreams], more))
    pool = Pool(database, size=4, acquire_timeout_s=10.0)
    await pool.open()
    running = await production.start(config, home / "log", "", role="gateway")
    try:
        keys = KeyStore(pool, pepper=PEPPER, plans={name: plan.keys for name, plan in load_tables().plans.items()})
        yield DashboardService(running, database, pool, keys, SessionStore(pool, pepper=PEPPER), upstreams)
    finally:
        await production.stop(running)
        await pool.close()
        for upstream in upstreams:
            await upstream.close()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
