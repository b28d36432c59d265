"""A real Postgres: one embedded server per session, and a new migrated database for each test that needs one."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from proxy.dev import postgres
from proxy.dev.postgres import USER, Postgres
from proxy.store.postgres.pool import Pool
from tests import prepared_cluster

MIGRATED = "migrated"
_serial = itertools.count(1)


@dataclass
class Server:
    """The running server. `url` returns the URL of a database by name."""

    postgres: Postgres
    sockets: Path
    admin: asyncpg.Connection[asyncpg.Record] = field(repr=False)

    def url(self, name: str, *, sockets: Path | None = None) -> str:
        return postgres.url(sockets or self.sockets, name)

    async def create(self, template: str = "template0") -> str:
        name = f"test_{next(_serial)}"
        # Copying files takes a third of the time that writing them to the log does.
        await self.admin.execute(f"create database {name} template {template} strategy file_copy")
        return name

    async def drop(self, name: str) -> None:
        await self.admin.execute(f"drop database {name} with (force)")


@asynccontextmanager
async def running() -> AsyncIterator[Server]:
    """A server in a temporary directory. Its own database has every migration."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as directory:
        home = Path(directory)
        home.chmod(0o711)  # without user namespaces, root starts the server as another user, who needs access
        (sockets := home / "s").mkdir(mode=0o700)
        await prepared_cluster.copy_to(home / "data")
        server = Postgres(home / "data", sockets, home / "log")
        try:
            await server.start()
            admin = await asyncpg.connect(server.url, timeout=5)
            yield Server(server, sockets, admin)
            await admin.close()
        finally:
            await server.child.stop()


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    connection = await asyncpg.connect(url, timeout=5)
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def pooled(url: str, *, size: int = 10, acquire_timeout_s: float = 5.0, **more: Any) -> AsyncIterator[Pool]:
    pool = Pool(url, size=size, acquire_timeout_s=acquire_timeout_s, **more)
    await pool.open()
    try:
        yield pool
    finally:
        await pool.close()


@asynccontextmanager
async def running_with_template() -> AsyncIterator[Server]:
    """A server with a migrated database to copy."""
    async with running() as started:
        await started.admin.execute(f"create database {MIGRATED} template {USER} strategy file_copy")
        yield started


@pytest.fixture(scope="session")
async def server() -> AsyncIterator[Server]:
    async with running_with_template() as started:
        yield started


@pytest.fixture
async def empty_database(server: Server) -> AsyncIterator[str]:
    """The URL of an empty database."""
    name = await server.create()
    yield server.url(name)
    await server.drop(name)


@pytest.fixture
async def database(server: Server) -> AsyncIterator[str]:
    """The URL of a new database with every migration applied."""
    name = await server.create(MIGRATED)
    yield server.url(name)
    await server.drop(name)


@pytest.fixture
async def pool(database: str) -> AsyncIterator[Pool]:
    async with pooled(database) as found:
        yield found


@asynccontextmanager
async def another(url: str, name: str) -> AsyncIterator[str]:
    """The URL of another empty database on the same server, dropped afterwards."""
    async with connected(url) as connection:
        await connection.execute(f"create database {name}")
        yield url.replace("/penstock?", f"/{name}?")
        await connection.execute(f"drop database {name} with (force)")
