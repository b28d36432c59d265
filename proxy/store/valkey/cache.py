"""Data that is expensive to find: tokens, metadata, prices. In bounded memory, or on Redis or Valkey if one is configured.

In memory each account has its share. Names start with the network, so no entry is ever returned for another network. Concurrent
requests for the same entry share one lookup.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from proxy.connection_queue import ConnectionQueue, TooManyWaiting
from proxy.core.caching import owner_bucket_of
from proxy.core.lru_cache import LruCache
from proxy.errors import RateLimited, Unavailable
from proxy.tasks import client_of_task, is_cancelled, min_block_of_task
from proxy.turn_queue import next_turn

log = logging.getLogger("penstock.cache")

WRITE_S = 1.0
# Larger values are not cached: transferring them costs more than it saves.
LARGEST = 1 << 20
# The number is the version of the stored format: a new format gets new names.
KEPT_NAMESPACE = "penstock:data:1:"
# A lookup saves many milliseconds of work, so it may take long, and the pause after a failure is long too.
READ_S = 0.5
READ_AWAY_S = 5.0
# How long a lookup or a write waits for others of its client.
TURN_S = 1.0
# How long a client waits for the lookup of another one before it makes its own.
JOIN_S = 1.0
# Concurrent lookups at the server. Few, because each takes a fraction of a millisecond and opening a connection takes longer.
QUESTIONS = 8
# Lookups of one client that run or wait. It makes the others without the cache.
MOST_OF_CLIENT = 1000
# Memory overhead of an entry in bytes, on top of its key and value.
ENTRY = 250
# Eviction leaves the largest owner this part of an equal share: less than all of it, so that not every new entry starts another
# eviction.
EVENED_PART = 7 / 8

_AWAY = (OSError, TimeoutError)


class CacheBackend(Protocol):
    """Values by name, in memory or on a server. A server that is away raises OSError or TimeoutError."""

    async def multi_get(self, names: Sequence[str]) -> list[bytes | None]: ...
    async def multi_set(self, pairs: Sequence[tuple[str, bytes]], *, ttl_s: float) -> None: ...
    async def close(self) -> None: ...


def _redis(url: str, namespace: str) -> CacheBackend:
    # The client takes a fifth of a worker's start to import, and most installations have no such server.
    from proxy.store.valkey.redis_backend import RedisBackend

    return RedisBackend(url, namespace, connections=QUESTIONS, timeout_s=WRITE_S)


# A value and when it expires.
_Expiring = tuple[bytes, float]


class BoundedMemory:
    """A memory backend with a size limit. An entry belongs to the account whose request put it first. The least recently used
    entries of the account that has most are evicted, so an account with very many entries evicts its own. Accounts are counted
    as in `core/caching.py`.

    Expired entries are skipped on reading. There are no expiry timers: 500 of them cost more than the entries themselves.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.used = 0
        # The bucket of each entry's owner, and the entries by bucket.
        self._buckets: dict[str, int] = {}
        self._by_bucket: dict[int, LruCache[str, _Expiring]] = {}

    def __repr__(self) -> str:
        return f"<BoundedMemory {self.used} of {self._limit} bytes, {len(self._by_bucket)} owners>"

    async def multi_get(self, names: Sequence[str]) -> list[bytes | None]:
        now = time.monotonic()
        return [entry[0] if (entry := self._find(name)) is not None and entry[1] > now else None for name in names]

    def _find(self, name: str) -> _Expiring | None:
        bucket = self._buckets.get(name)
        return None if bucket is None else self._by_bucket[bucket][name]

    async def multi_set(self, pairs: Sequence[tuple[str, bytes]], *, ttl_s: float) -> None:
        ends, owner = time.monotonic() + ttl_s, owner_bucket_of(client_of_task.get())
        for name, value in pairs:
            if _size(name, (value, ends)) <= self._limit:
                self._put(self._buckets.setdefault(name, owner), name, (value, ends))
        while self.used > self._limit:
            self._evict()

    def _put(self, bucket: int, name: str, entry: _Expiring) -> None:
        entries = self._by_bucket.get(bucket)
        if entries is None:
            entries = self._by_bucket[bucket] = LruCache(sys.maxsize, _size)
        before = entries.weight
        entries[name] = entry
        self.used += entries.weight - before

    def _evict(self) -> None:
        """Evict entries of the owner that has most, down to a little less than an equal share."""
        bucket, entries = max(self._by_bucket.items(), key=lambda each: each[1].weight)
        share = self._limit / len(self._by_bucket) * EVENED_PART
        before = entries.weight
        while entries and self.used - before + entries.weight > self._limit and entries.weight > share:
            del self._buckets[entries.evict()]
        self.used += entries.weight - before
        if not entries:
            del self._by_bucket[bucket]

    async def close(self) -> None: ...


def _size(key: str, entry: _Expiring) -> int:
    return len(key) + len(entry[0]) + ENTRY


# Lookups in progress and the client of each, by name and whether the value must be fresh.
_Flights = dict[tuple[str, bool], tuple["asyncio.Future[bytes]", str]]


class DataCache:
    """Any JSON data by network, kind and name. Readers get a copy that they may change."""

    def __init__(self, *, bytes: int, redis_url: str = "", enabled: bool = True) -> None:  # noqa: A002
        self._cache: CacheBackend = _redis(redis_url, KEPT_NAMESPACE) if redis_url else BoundedMemory(bytes)
        self._enabled = enabled
        self._flights: _Flights = {}
        self._connections = ConnectionQueue(QUESTIONS, per_client=MOST_OF_CLIENT)
        self._away_until = 0.0

    def __repr__(self) -> str:
        return f"<DataCache on {type(self._cache).__name__}, {len(self._flights)} lookups in progress>"

    async def once(
        self,
        network: str,
        kind: str,
        name: str,
        *,
        make: Callable[[], Awaitable[Any]],
        ttl_s: float | Callable[[Any], float],
        fresh: bool = False,
        read: Callable[[bytes], Any] = msgspec.json.decode,
    ) -> Any:
        """Return the cached value, or the result of `make`, which is then cached. Concurrent callers share one lookup.

        A failure is raised in every waiting caller and not cached. If the caller that runs the lookup is cancelled, another
        takes over. If the lookup of another client is refused or slow, the callers that wait for it make their own: that client
        may have too many requests, or wait for its units. `read` decodes the JSON; pass one that decodes only the part that is
        needed. A cached value from before the block that the request needs is read again.
        """
        whole = _name(network, kind, name)
        value = await self._once(whole, make=make, ttl_s=ttl_s, fresh=fresh, read=read)
        if not fresh and _is_too_old(value):
            return await self._once(whole, make=make, ttl_s=ttl_s, fresh=True, read=read)
        return value

    async def _once(
        self,
        whole: str,
        *,
        make: Callable[[], Awaitable[Any]],
        ttl_s: float | Callable[[Any], float],
        fresh: bool,
        read: Callable[[bytes], Any],
    ) -> Any:
        # A caller that needs a fresh value must not join a lookup that may return a cached one.
        flight_key = (whole, fresh)
        while (shared := self._flights.get(flight_key)) is not None:
            flight, client = shared
            is_own = client == client_of_task.get()
            try:
                async with asyncio.timeout(None if is_own else JOIN_S):
                    return read(await asyncio.shield(flight))
            except TimeoutError:
                return read(await self._find(whole, make, ttl_s))
            except asyncio.CancelledError:
                if not flight.cancelled() or is_cancelled():
                    raise
            except (RateLimited, Unavailable):
                if is_own:
                    raise
                return read(await self._find(whole, make, ttl_s))
        flight = asyncio.get_running_loop().create_future()
        self._flights[flight_key] = (flight, client_of_task.get())
        try:
            cached = None if fresh else (await self._look([whole]))[0]
            flight.set_result(cached if cached is not None else await self._find(whole, make, ttl_s))
        except asyncio.CancelledError:
            flight.cancel()
            raise
        except BaseException as exc:
            flight.set_exception(exc)
            flight.exception()  # mark it as retrieved: there may be no waiter
            raise
        finally:
            del self._flights[flight_key]
        return read(flight.result())

    async def get(
        self, network: str, kind: str, names: Sequence[str], *, read: Callable[[bytes], Any] = msgspec.json.decode
    ) -> list[Any]:
        """Return the cached value for each name, or None."""
        cached = await self._look([_name(network, kind, name) for name in names])
        return [None if each is None else read(each) for each in cached]

    async def put(self, network: str, kind: str, values: Mapping[str, Any], *, ttl_s: float) -> None:
        await self._keep([(_name(network, kind, name), msgspec.json.encode(v)) for name, v in values.items()], ttl_s)

    async def _find(
        self, whole: str, make: Callable[[], Awaitable[Any]], ttl_s: float | Callable[[Any], float]
    ) -> bytes:
        value = await make()
        raw, keep_s = msgspec.json.encode(value), ttl_s(value) if callable(ttl_s) else ttl_s
        await self._keep([(whole, raw)], keep_s)
        if len(raw) > LARGEST:
            del value  # Freeing it takes a while too.
            await next_turn()
        return raw

    async def _look(self, names: list[str]) -> list[bytes | None]:
        if not self._enabled or not names or time.monotonic() < self._away_until:
            return [None] * len(names)
        try:
            async with self._connections.turn(client_of_task.get(), within_s=TURN_S):
                return await self._read(names)
        except (TimeoutError, TooManyWaiting):
            return [None] * len(names)

    async def _read(self, names: list[str]) -> list[bytes | None]:
        try:
            async with asyncio.timeout(READ_S):
                return await self._cache.multi_get(names)
        except _AWAY as exc:
            self._went_away(exc)
            return [None] * len(names)

    async def _keep(self, pairs: list[tuple[str, bytes]], ttl_s: float) -> None:
        small = [(name, raw) for name, raw in pairs if len(raw) <= LARGEST]
        if not self._enabled or not small or ttl_s <= 0 or time.monotonic() < self._away_until:
            return
        with suppress(TimeoutError, TooManyWaiting):
            async with self._connections.turn(client_of_task.get(), within_s=TURN_S):
                await self._write(small, ttl_s)

    async def _write(self, pairs: list[tuple[str, bytes]], ttl_s: float) -> None:
        try:
            async with asyncio.timeout(WRITE_S):
                await self._cache.multi_set(pairs, ttl_s=ttl_s)
        except _AWAY as exc:
            self._went_away(exc)

    def _went_away(self, exc: Exception) -> None:
        log.warning("shared cache skipped", extra={"reason": type(exc).__name__, "for_s": READ_AWAY_S})
        self._away_until = time.monotonic() + READ_AWAY_S

    async def close(self) -> None:
        await self._cache.close()


def _name(network: str, kind: str, name: str) -> str:
    return f"{network}:{kind}:{name}"


def _is_too_old(value: Any) -> bool:
    """Whether a value names a block before the one that the request needs."""
    least = min_block_of_task.get()
    block = value.get("as_of_block") if least and isinstance(value, dict) else None
    return isinstance(block, int) and block < least
