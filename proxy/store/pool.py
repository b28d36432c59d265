"""A process's connections to Postgres.

Driver errors are translated here. If Postgres is down or every connection stays in use, callers get `Unavailable` within the
acquire timeout; nothing waits longer for a database that does not answer. A value that Postgres cannot store is an
`InvalidRequest`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeAlias

import asyncpg

from proxy.errors import InvalidRequest, Unavailable

# Quoted: the class is generic only in its stubs.
DatabaseConnection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"
# How long background work may wait for a connection: connecting to a remote database takes a while.
PATIENT_S = 5.0
# Errors of asyncpg and the operating system that all mean that the database is unavailable.
AWAY = (
    OSError,
    asyncpg.PostgresConnectionError,
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.TooManyConnectionsError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # the connection was lost as a statement began
    TimeoutError,
)


@contextmanager
def translated() -> Iterator[None]:
    try:
        yield
    except AWAY as exc:
        raise Unavailable("the database is not reachable at the moment; try again shortly") from exc
    except asyncpg.DataError as exc:
        # The program's own values always fit; this one came from a client: a number over 64 bits, or text with U+0000.
        raise InvalidRequest("a value is too large, or has characters that cannot be stored, such as U+0000") from exc


async def _no_reset(connection: object) -> None:
    """Skip asyncpg's reset, which costs a statement each time: pooled sessions never change state outside a transaction."""


class Pool:
    """Connections opened on first use, so that a worker can start and serve without a database."""

    def __init__(self, url: str, *, size: int, acquire_timeout_s: float, application: str = "penstock") -> None:
        self.url = url
        self._size = size
        self._acquire_timeout_s = acquire_timeout_s
        self._application = application
        self._pool: asyncpg.Pool[asyncpg.Record] | None = None

    async def open(self) -> None:
        self._pool = await asyncpg.create_pool(
            self.url,
            min_size=0,
            max_size=self._size,
            command_timeout=10.0,
            timeout=2.0,
            server_settings={"application_name": self._application},
            reset=_no_reset,
        )

    async def is_up(self) -> bool:
        try:
            async with self.connection() as connection:
                await connection.fetchval("select 1")
        except Unavailable:
            return False
        return True

    async def close(self) -> None:
        if self._pool is None:
            return
        pool, self._pool = self._pool, None
        try:
            async with asyncio.timeout(2.0):
                await pool.close()
        except (TimeoutError, *AWAY):
            pool.terminate()

    @asynccontextmanager
    async def connection(self, *, within_s: float | None = None) -> AsyncIterator[DatabaseConnection]:
        """Borrow a connection for a few statements; raise `Unavailable` if none is free in time."""
        if self._pool is None:
            raise Unavailable("the database is not open yet; try again shortly")
        with translated():
            async with self._pool.acquire(timeout=within_s or self._acquire_timeout_s) as connection:
                yield connection  # type: ignore[misc]

    async def dedicated(self) -> DatabaseConnection:
        """Open a connection outside the pool, for LISTEN. The caller closes it."""
        with translated():
            return await asyncpg.connect(
                self.url, timeout=2.0, server_settings={"application_name": f"{self._application}-notices"}
            )

    def __repr__(self) -> str:
        if self._pool is None:
            return "<Pool closed>"
        return f"<Pool {self._pool.get_size() - self._pool.get_idle_size()} busy of at most {self._size}>"
