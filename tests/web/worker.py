"""One worker in the test's own event loop: the product's composition root, without a database.

Keys are added to the keyring directly. Everything else is as in production, including uvloop: `on_uvloop` runs a test on it.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, ParamSpec

import uvloop

from proxy.compose.app import App
from proxy.compose.fleet import buckets_of
from proxy.core import access
from proxy.core.access import Account, AllowedUses, Key, Limits
from proxy.core.directives import USUAL
from proxy.core.fault_plans import FaultPlan
from proxy.core.limits import BucketRates
from proxy.settings import load, read_certificates
from proxy.store.shared_memory import host_memory, rate_buckets
from proxy.store.shared_memory.host_memory import HostMemory
from tests.http_client import HttpClient, Reply
from tests.http_client import post as post_to
from tests.shipped_tables import TABLES

P = ParamSpec("P")

PEPPER = "a pepper that no attacker can guess"
# A live network and a test network.
LIVE, TEST = "ethereum/mainnet", "ethereum/sepolia"
# Disables caching and coalescing of reads.
NO_CACHE: dict[str, Any] = {"cache": {"enabled": False, "coalesce": False}}
PLENTY = Limits(100_000, 10_000_000, 0)


def on_uvloop(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def main() -> None:
            await test(*args, **kwargs)

        uvloop.run(main())

    return run


class Worker:
    def __init__(self, app: App, port: int, buckets_fd: int = -1) -> None:
        self.app = app
        self.buckets_fd = buckets_fd
        self.port = port
        self.keys: dict[str, str] = {}
        # Headers of every request that `send` sends.
        self.headers: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<Worker {self.app.limiter!r}>"

    @property
    def held_bytes(self) -> int:
        """The memory that is held for clients. Records of their requests wait there until a database is up."""
        return self.app.budget.total - self.app.budget.of("records").total

    def add_key(
        self,
        name: str,
        *,
        live: bool = True,
        scopes: Sequence[str] = (),
        limits: Limits = PLENTY,
        disabled: bool = False,
        lives_s: float = math.inf,
        directives: frozenset[str] = USUAL,
        records_params: bool = False,
        fault: FaultPlan | None = None,
        uses: AllowedUses | None = None,
        beside: Key | None = None,
        allow_in_url: bool = False,
        private_transactions: bool = False,
    ) -> Key:
        """Add a key with its own account, or one `beside` another of the same account. `keys[name]` is its text."""
        number = len(self.keys) + 1
        text = access.mint("live" if live else "test", number.to_bytes(32, "big"))
        self.keys[name] = text
        account = (
            beside.account
            if beside
            else Account(id=f"acc_{number}", plan="enterprise", day_limit=limits.requests_per_day)
        )
        account.records_params = records_params
        key = Key(
            id=f"key_{number}",
            lineage=f"key_{number}",
            digest=access.digest(PEPPER.encode(), text),
            live=live,
            scopes=access.scope_bits(tuple(scopes)),
            account=account,
            rate=beside.rate if beside else BucketRates(number, limits.requests_per_second, limits.units_per_second),
            disabled=disabled,
            expires_at=time.monotonic() + lives_s,
            directives=directives,
            fault=fault,
            allow_in_url=allow_in_url,
            private_transactions=private_transactions,
            restrictions=None if uses is None else access.KeyRestrictions((), (), uses),
        )
        self.app.keyring.add(key)
        return key

    def post(self, body: bytes, *, key: str | None = "main", network: str = LIVE, **headers: str) -> bytes:
        """A complete request. `key` is a name in `keys`."""
        return post_to(body, key=self.keys[key] if key else None, network=network, **headers)

    @property
    def only_connection(self) -> asyncio.Protocol:
        """The server's end of the one connection that is open."""
        (found,) = self.app.limiter.connections
        assert isinstance(found, asyncio.Protocol)
        return found

    async def connect(self) -> ChunkedClient:
        return ChunkedClient(*await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26))

    async def send(self, body: bytes, **options: Any) -> Reply:
        """Send one request on a new connection."""
        async with await self.connect() as client:
            return await client.send(self.post(body, **self.headers, **options))


class ChunkedClient(HttpClient):
    """Also reads chunked replies, the form of large results of unknown length."""

    async def _read(self) -> Reply:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(head[0].split(" ")[1])
        # A 400 may be to a request of HTTP/1.0.
        assert head[0].startswith("HTTP/1.1 " if status != 400 else "HTTP/1."), head[0]
        pairs = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in head[1:-2])]
        headers = dict(pairs)
        assert len(headers) == len(pairs), f"a header twice: {head}"
        if status in (100, 101, 204):
            assert "transfer-encoding" not in headers
            return Reply(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            assert "content-length" not in headers
            return Reply(status, headers, await self._read_chunks())
        return Reply(status, headers, await self.reader.readexactly(int(headers["content-length"])))

    async def _read_chunks(self) -> bytes:
        parts = []
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            parts.append(await self.reader.readexactly(size))
            assert await self.reader.readexactly(2) == b"\r\n"
        assert await self.reader.readexactly(2) == b"\r\n"
        return b"".join(parts)


@asynccontextmanager
async def running_worker(
    upstreams: Mapping[str, Sequence[str | Mapping[str, Any]]] | str,
    beside: Worker | None = None,
    /,
    **sections: Mapping[str, Any] | Sequence[Mapping[str, Any]],
) -> AsyncIterator[Worker]:
    """A worker with these upstreams by network (or one for both). `sections` override the default settings. `beside`: another
    worker of the same host."""
    if isinstance(upstreams, str):
        upstreams = {LIVE: [upstreams], TEST: [upstreams]}
    # All upstreams of tests are on one host, which would be one operator.
    blocks = [
        {"network": network, "operator": f"operator-{index}", **({"url": given} if isinstance(given, str) else given)}
        for network, found in upstreams.items()
        for index, given in enumerate(found, 1)
    ]
    over = {
        "database": {"url": "postgresql://nobody@127.0.0.1:1/nothing"},
        "keys": {"pepper": PEPPER},
        "log": {"access": False},
        "server": {"drain_s": 0.1},
        "upstreams": blocks,
    }
    for name, section in sections.items():
        over[name] = {**over.get(name, {}), **section} if isinstance(section, Mapping) else section  # type: ignore[dict-item]
    fd = rate_buckets.create() if beside is None else os.dup(beside.buckets_fd)
    memory = HostMemory(host_memory.create()) if beside is None else beside.app.memory
    settings = load(environ={}, overrides=over)
    certificates = read_certificates(settings.server.tls)
    buckets = buckets_of(settings, fd, memory, alone=True)
    app = App(settings, TABLES, buckets, memory=memory, certificates=certificates)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    found = Worker(app, listener.getsockname()[1], fd)
    found.add_key("main")
    await app.listen(listener)
    try:
        yield found
    finally:
        # Clients that have just left are noticed a turn later. Without this the drain would wait for them.
        for _ in range(10):
            await asyncio.sleep(0)
        await app.stop()
        os.close(fd)
        if beside is None:
            os.close(memory.fd)
