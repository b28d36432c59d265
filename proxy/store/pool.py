"""The worker's connections to Postgres.

Foreign errors are translated here: whoever asks while Postgres is away, or while all connections are taken, is told
`Unavailable` at once. Nothing waits for a database that does not answer. A value that it cannot hold is the caller's fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeAlias

import asyncpg

from proxy.errors import InvalidRequest, Unavailable

# Quoted: the class takes parameters in its stubs only.
DatabaseConnection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"
# How long work that no request waits for may wait for a connection: a far database takes a while to open one.
PATIENT_S = 5.0
# Whichever of these asyncpg or the kernel raises, the meaning is the same: no database now.
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
    asyncpg.InternalClientError,  # a connection that is lost while a statement begins
    TimeoutError,
)


@contextmanager
def translated() -> Iterator[None]:
    try:
        yield
    except AWAY as exc:
        raise Unavailable("the database is not reachable at the moment; try again shortly") from exc
    except asyncpg.DataError as exc:
        # Our own values fit; what does not came from outside: a number beyond 64 bits, or text that no text of Postgres can be.
        raise InvalidRequest("a value is too large, or has characters that cannot be stored, such as U+0000") from exc


async def _leave(connection: object) -> None:
    """As it is: nobody changes a session of the pool beyond a transaction, and to undo nothing costs a statement each time."""


class Pool:
    """Connections, opened when first needed, so that a worker starts and serves without a database."""

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
            reset=_leave,
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
        """A connection for a few statements; `Unavailable` when none is to be had in time."""
        if self._pool is None:
            raise Unavailable("the database is not open yet; try again shortly")
        with translated():
            async with self._pool.acquire(timeout=within_s or self._acquire_timeout_s) as connection:
                yield connection  # type: ignore[misc]

    async def dedicated(self) -> DatabaseConnection:
        """A connection of one's own, outside the pool, for LISTEN. The caller closes it."""
        with translated():
            return await asyncpg.connect(
                self.url, timeout=2.0, server_settings={"application_name": f"{self._application}-notices"}
            )

    def __repr__(self) -> str:
        if self._pool is None:
            return "<Pool closed>"
        return f"<Pool {self._pool.get_size() - self._pool.get_idle_size()} busy of at most {self._size}>"
