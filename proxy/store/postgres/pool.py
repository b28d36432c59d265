"""A process's connections to Postgres.

Driver errors are translated here, so that clients get the reason in plain words: a 503 if Postgres is away, slow or does not
accept writes, or if no connection is free in time; a 429 if the client itself has too many requests that wait; a 400 for a
value that cannot be stored. A request holds a connection for a bounded time: if Postgres stops answering, it is dropped.

After a failover, connections may lead to a server that became a standby. Postgres says so at the start of a session, so
they are replaced before a statement is sent. Statements are repeated only where that is safe: reads, once (`read`).

In front of Postgres there may be a pooler such as pgbouncer in transaction mode. Then statements are not kept prepared, and
sessions with state (LISTEN, advisory locks) use the direct address.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeAlias, TypeVar

import asyncpg

from proxy import telemetry
from proxy.connection_queue import ConnectionQueue, TooManyWaiting
from proxy.errors import BadValue, Fault, RateLimited, Unavailable
from proxy.settings import DatabaseSettings
from proxy.tasks import client_of_task
from proxy.tracing import current_span

log = logging.getLogger("penstock.database")

_T = TypeVar("_T")

# Quoted: the class is generic only in its stubs.
DatabaseConnection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"
PoolConnection: TypeAlias = "asyncpg.pool.PoolConnectionProxy[asyncpg.Record]"
# How long one statement may take, and how long a cancelled one may take to end.
COMMAND_S, RELEASE_S = 10.0, 0.25
# How long background work may wait for a connection: connecting to a remote database takes a while.
PATIENT_S = 5.0
# How often connections to a standby are replaced, in search of the server that accepts writes.
SEARCH_S = 1.0
# Statements that asyncpg keeps prepared per connection: its default, or none behind a pooler, which may send the next use of
# one to another server.
PREPARED, PREPARED_BY_POOLER = 100, 0
_NAME = "select set_config('application_name', $1, false)"
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
    asyncpg.ReadOnlySQLTransactionError,  # the server is a standby
    TimeoutError,
)


# Errors that mean that Postgres answers but cannot do its work: the disk is full, memory is short, replication removed rows
# that a standby was reading, a migration changed a table that a transaction was reading.
UNABLE = (
    asyncpg.InsufficientResourcesError,
    asyncpg.OperatorInterventionError,
    asyncpg.PostgresSystemError,
    asyncpg.TransactionRollbackError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.InvalidCachedStatementError,
)


class DatabaseAway(Unavailable):
    """Postgres is not reachable, or does not accept writes."""


@contextmanager
def translated() -> Iterator[None]:
    try:
        yield
    except TimeoutError as exc:
        raise refusal("slow") from exc
    except asyncpg.ReadOnlySQLTransactionError as exc:
        _report(exc)
        raise refusal("away") from exc
    except AWAY as exc:
        raise refusal("away") from exc
    except UNABLE as exc:
        _report(exc)
        raise refusal("unable") from exc
    except (asyncpg.DataError, asyncpg.ProgramLimitExceededError) as exc:
        # The program's own values always fit; this one came from a client: a number over 64 bits, or text with U+0000.
        raise BadValue("a value is too large, or has characters that cannot be stored, such as U+0000") from exc


# Each error of this kind is logged at most once in this time: a full disk fails every write.
REPORT_S = 10.0
_reported: dict[type[Exception], float] = {}


def _report(exc: Exception) -> None:
    """Log an error that operators have to act on."""
    now = time.monotonic()
    if now - _reported.get(type(exc), -REPORT_S) >= REPORT_S:
        _reported[type(exc)] = now
        log.error("the database refuses statements", extra={"error": type(exc).__name__, "reason": str(exc)[:300]})


_WORDS = {
    "away": "the database is not reachable at the moment; try again shortly",
    "slow": "the database did not answer in time; try again shortly",
    "unable": "the database cannot do this at the moment; try again later",
    "busy": "all database connections are in use; try again shortly",
    "client": "too many of your requests are waiting for the database: wait for replies before you send more",
}


def refusal(reason: str) -> Fault:
    """The error for a request that the database does not serve, counted by its reason."""
    telemetry.database_refusals_total.labels(reason).inc()
    if reason == "client":
        return RateLimited(_WORDS[reason], retry_after_s=1)
    return (DatabaseAway if reason == "away" else Unavailable)(_WORDS[reason])


async def _no_reset(connection: object) -> None:
    """Skip asyncpg's reset, which costs a statement each time: pooled sessions never change state outside a transaction."""


class Pool:
    """Connections opened on first use, so that a worker can start and serve without a database."""

    def __init__(
        self,
        url: str,
        *,
        size: int,
        acquire_timeout_s: float,
        request_timeout_s: float = COMMAND_S,
        per_client: int = sys.maxsize,
        application: str = "penstock",
        direct_url: str = "",
        only_reads: bool = False,
    ) -> None:
        """`per_client`: how many requests of a client may hold a connection or wait for one. `direct_url`: the address of
        Postgres itself, if the first one is that of a pooler. `only_reads`: a standby is as good as a primary."""
        self.url = url
        # The address for sessions that keep state, such as locks.
        self.session_url = direct_url or url
        self._prepared = PREPARED_BY_POOLER if direct_url else PREPARED
        self._search_at = float("inf") if only_reads else 0.0
        self._size = size
        self._acquire_timeout_s = acquire_timeout_s
        self._request_timeout_s = request_timeout_s
        self._per_client = per_client
        self._application = application
        self._pool: asyncpg.Pool[asyncpg.Record] | None = None
        self._queue = ConnectionQueue(size, per_client=per_client)

    @classmethod
    def of(cls, given: DatabaseSettings, **other: Any) -> Pool:
        """A pool with these settings. `other`: arguments that replace them."""
        settings: dict[str, Any] = {
            "size": given.pool_size,
            "acquire_timeout_s": given.acquire_timeout_s,
            "request_timeout_s": given.request_timeout_s,
            "direct_url": given.direct_url,
        }
        return cls(given.url, **settings | other)

    async def open(self) -> None:
        self._queue = ConnectionQueue(self._size, per_client=self._per_client)
        self._pool = await asyncpg.create_pool(
            self.url,
            min_size=0,
            max_size=self._size,
            command_timeout=COMMAND_S,
            timeout=2.0,
            server_settings={"application_name": self._application},
            statement_cache_size=self._prepared,
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
    async def connection(
        self, *, within_s: float | None = None, for_s: float | None = None
    ) -> AsyncIterator[DatabaseConnection]:
        """Borrow a connection for a few statements. With `within_s` the wait may be longer, and the use is not limited;
        with `for_s` the use may be longer."""
        pool, queue, client = self._pool, self._queue, client_of_task.get()
        if pool is None:
            raise Unavailable("the database is not open yet; try again shortly")
        wait_s = within_s or self._acquire_timeout_s
        await _turn(queue, client, wait_s)
        try:
            with translated():
                connection = await self._acquire(pool, wait_s)
                try:
                    limit_s = None if within_s else for_s or self._request_timeout_s
                    async with _limited(connection, limit_s), self._traced(connection):
                        yield connection  # type: ignore[misc]
                except asyncpg.ReadOnlySQLTransactionError:
                    # After a failover: new connections may reach the server that accepts writes.
                    await pool.expire_connections()
                    raise
                finally:
                    await pool.release(connection, timeout=RELEASE_S)
        finally:
            queue.leave(client)

    @asynccontextmanager
    async def _traced(self, connection: PoolConnection) -> AsyncIterator[None]:
        """Record the use of a connection in the trace of the request, if it has one. The server shows the trace as the name of
        the application, in its log and in pg_stat_activity; behind a pooler, others would get that name too."""
        span = current_span.get()
        if span is None:
            yield
            return
        with span.child("postgres", {"db.system.name": "postgresql"}, calls_out=True) as own:
            if self._prepared:
                await connection.execute(_NAME, own.traceparent)
            yield
            if self._prepared:
                await connection.execute(_NAME, self._application)

    async def _acquire(self, pool: asyncpg.Pool[asyncpg.Record], wait_s: float) -> PoolConnection:
        connection = await pool.acquire(timeout=wait_s)
        now = time.monotonic()
        if not _leads_to_standby(connection) or now < self._search_at:
            return connection
        self._search_at = now + SEARCH_S
        await pool.expire_connections()
        await pool.release(connection, timeout=RELEASE_S)
        return await pool.acquire(timeout=wait_s)

    async def read(self, work: Callable[[DatabaseConnection], Awaitable[_T]], *, for_s: float | None = None) -> _T:
        """Run statements that only read, again if the connection is lost."""
        try:
            async with self.connection(for_s=for_s) as connection:
                return await work(connection)
        except DatabaseAway:
            async with self.connection(for_s=for_s) as connection:
                return await work(connection)

    async def dedicated(self) -> DatabaseConnection:
        """Open a connection outside the pool, for LISTEN. The caller closes it."""
        with translated():
            return await asyncpg.connect(
                self.session_url, timeout=2.0, server_settings={"application_name": f"{self._application}-notices"}
            )

    def __repr__(self) -> str:
        if self._pool is None:
            return "<Pool closed>"
        return f"<Pool {self._pool.get_size() - self._pool.get_idle_size()} busy of at most {self._size}>"


def _leads_to_standby(connection: PoolConnection) -> bool:
    """Whether the server was a standby when the session began. Postgres 14 and newer report it, poolers may not."""
    return getattr(connection.get_settings(), "in_hot_standby", "off") == "on"


async def _turn(queue: ConnectionQueue, client: str, wait_s: float) -> None:
    try:
        await queue.enter(client, within_s=wait_s)
    except TooManyWaiting:
        raise refusal("client") from None
    except TimeoutError:
        raise refusal("busy") from None


@asynccontextmanager
async def _limited(connection: PoolConnection, within_s: float | None) -> AsyncIterator[None]:
    """Cancel statements after this time. If the server does not even react to that, drop the connection."""
    if within_s is None:
        yield
        return
    dropping = asyncio.get_running_loop().call_later(within_s + RELEASE_S, connection.terminate)
    try:
        async with asyncio.timeout(within_s):
            yield
    finally:
        dropping.cancel()
