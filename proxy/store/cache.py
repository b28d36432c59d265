"""What is kept beside the hot path, by aiocache: in bounded memory, or on Redis or Valkey where one is configured.

`SharedReplies` are JSON-RPC results that can never change, shared by all workers and hosts. Nothing waits for them: a look that
takes longer than a quick upstream would is given up, and after one that failed nobody looks for a while. What is to be kept
goes through a bounded queue that one loop empties; what does not fit is not kept.

`Kept` is data that took work to find: tokens, metadata, prices. It is named by its network first, so that no answer crosses
from one to another, and whoever asks while somebody looks waits for what that one finds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

import msgspec
from aiocache.backends.redis import RedisCache
from aiocache.base import BaseCache
from aiocache.serializers import NullSerializer
from redis.exceptions import RedisError
from yarl import URL

log = logging.getLogger("penstock.cache")

# Longer than this an upstream takes, too.
LOOK_S = 0.05
WRITE_S = 1.0
# How long nobody looks after a failure.
AWAY_S = 1.0
# Writes that wait, and how many go out at once.
QUEUE = 1024
AT_ONCE = 64
# A larger reply is not worth the way.
LARGEST = 1 << 20
# For ever, as far as replies go; but what nobody asks for must not fill the server.
KEPT_S = 7 * 86_400
# The version of what is stored: a change of its form changes the names.
NAMESPACE = "penstock:1:"
KEPT_NAMESPACE = "penstock:data:1:"
# What `Kept` looks up stands before work of many milliseconds: it may be waited for longer; and after a failure, so may Redis.
READ_S = 0.5
READ_AWAY_S = 5.0
# Its questions at once: few, because each is answered in a fraction of a millisecond, and a connection costs more than that.
QUESTIONS = 8
# Of an entry in memory beside its own bytes.
ENTRY = 250

_AWAY = (RedisError, OSError, TimeoutError)


class SharedReplies:
    """Results by name. No method raises, and none waits for long."""

    def __init__(self, url: str) -> None:
        self._cache = _redis(url, NAMESPACE)
        self._queue: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(QUEUE)
        self._away_until = 0.0
        self.dropped = 0

    def __repr__(self) -> str:
        return f"<SharedReplies {self._queue.qsize()} to write, {self.dropped} dropped>"

    def is_there(self, now: float) -> bool:
        return now >= self._away_until

    async def get(self, names: Sequence[str]) -> list[bytes | None]:
        """What is kept under each name; nothing at all where the answer does not come at once."""
        try:
            async with asyncio.timeout(LOOK_S):
                return cast(list[bytes | None], await self._cache.multi_get(list(names)))
        except _AWAY as exc:
            self._went_away(exc)
            return [None] * len(names)

    def put(self, name: str, result: bytes) -> None:
        """Keep it, some time soon."""
        try:
            if len(result) <= LARGEST:
                self._queue.put_nowait((name, result))
        except asyncio.QueueFull:
            self.dropped += 1

    async def run(self) -> None:
        """A supervised loop: writes what waits, one request at a time.

        The Redis client may take a cancellation for a lost connection and go on: so the loop looks for itself whether it is
        to end, or a drain would wait for it for ever.
        """
        task = asyncio.current_task()
        assert task is not None
        while not task.cancelling():
            pairs = [await self._queue.get()]
            while len(pairs) < AT_ONCE and not self._queue.empty():
                pairs.append(self._queue.get_nowait())
            try:
                async with asyncio.timeout(WRITE_S):
                    await self._cache.multi_set(pairs, ttl=KEPT_S)
            except _AWAY as exc:
                self.dropped += len(pairs)
                self._went_away(exc)
                if not task.cancelling():
                    await asyncio.sleep(AWAY_S)

    def _went_away(self, exc: Exception) -> None:
        now = time.monotonic()
        if self.is_there(now):
            log.warning("shared cache skipped", extra={"reason": type(exc).__name__, "for_s": AWAY_S})
        self._away_until = now + AWAY_S

    async def close(self) -> None:
        await _close(self._cache)


def _redis(url: str, namespace: str) -> RedisCache:
    address = URL(url)
    return RedisCache(
        serializer=NullSerializer(encoding=None),
        namespace=namespace,
        timeout=None,
        endpoint=address.host or "127.0.0.1",
        port=address.port or 6379,
        db=int(address.path.strip("/") or 0),
        password=address.password,
        pool_max_size=AT_ONCE,
        create_connection_timeout=WRITE_S,
        ssl=address.scheme == "rediss",
        connection_pool_kwargs={"username": address.user or None},
    )


async def _close(cache: RedisCache) -> None:
    try:
        async with asyncio.timeout(WRITE_S):
            # Not the cache's own close: that calls what redis-py has renamed, which warns.
            await cache.client.aclose(close_connection_pool=True)
    except _AWAY:
        pass


class BoundedMemory(BaseCache):  # type: ignore[misc]
    """Memory with a bound, which aiocache's own has not: what was set first goes first. What is too old is not found; no timer
    waits for it, since 500 of those cost more than what they are about."""

    NAME = "bounded"

    def __init__(self, limit: int) -> None:
        super().__init__(serializer=NullSerializer(encoding=None), timeout=None)
        self._limit = limit
        self._entries: dict[str, tuple[bytes, float]] = {}
        self.used = 0

    async def _multi_get(self, keys: list[str], encoding: Any = None, _conn: Any = None) -> list[bytes | None]:
        now, entries = time.monotonic(), self._entries
        return [entry[0] if (entry := entries.get(key)) is not None and entry[1] > now else None for key in keys]

    async def _multi_set(self, pairs: list[tuple[str, bytes]], ttl: float = 0.0, _conn: Any = None) -> bool:
        ends, entries = time.monotonic() + ttl, self._entries
        for key, value in pairs:
            if key in entries:
                self._forget(key)
            entries[key] = value, ends
            self.used += len(key) + len(value) + ENTRY
        while self.used > self._limit and self._entries:
            self._forget(next(iter(self._entries)))
        return True

    def _forget(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.used -= len(key) + len(entry[0]) + ENTRY


# Looks under way, by what they look for and whether it must be fresh.
_Flights = dict[tuple[str, bool], "asyncio.Future[bytes]"]


class DataCache:
    """Data by network, kind and name. Anything that is JSON: what is read is a copy, which its reader may change."""

    def __init__(self, *, bytes: int, redis_url: str = "", enabled: bool = True) -> None:  # noqa: A002
        self._cache: BaseCache = _redis(redis_url, KEPT_NAMESPACE) if redis_url else BoundedMemory(bytes)
        self._enabled = enabled
        self._flights: _Flights = {}
        self._connections = asyncio.Semaphore(QUESTIONS)
        self._away_until = 0.0

    def __repr__(self) -> str:
        return f"<DataCache by {type(self._cache).__name__}, {len(self._flights)} under way>"

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
        """What is kept, or what `make` finds: one of all that ask at once looks, and the others wait for it.

        A failure is told to those who wait, and not kept. Where the one who looks is cancelled, the next one does. `read`: what
        makes data of the JSON, where not all of it is wanted as such.
        """
        whole = _name(network, kind, name)
        # Who wants it fresh does not wait for one who may find what is kept.
        place = (whole, fresh)
        while (flight := self._flights.get(place)) is not None:
            try:
                return read(await asyncio.shield(flight))
            except asyncio.CancelledError:
                if not flight.cancelled() or _is_cancelled():
                    raise
        flight = self._flights[place] = asyncio.get_running_loop().create_future()
        try:
            found = None if fresh else (await self._look([whole]))[0]
            flight.set_result(found if found is not None else await self._find(whole, make, ttl_s))
        except asyncio.CancelledError:
            flight.cancel()
            raise
        except BaseException as exc:
            flight.set_exception(exc)
            flight.exception()  # nobody may be waiting for it
            raise
        finally:
            del self._flights[place]
        return read(flight.result())

    async def get(
        self, network: str, kind: str, names: Sequence[str], *, read: Callable[[bytes], Any] = msgspec.json.decode
    ) -> list[Any]:
        """What is kept under each name; None where nothing is."""
        found = await self._look([_name(network, kind, name) for name in names])
        return [None if each is None else read(each) for each in found]

    async def put(self, network: str, kind: str, values: Mapping[str, Any], *, ttl_s: float) -> None:
        await self._keep([(_name(network, kind, name), msgspec.json.encode(v)) for name, v in values.items()], ttl_s)

    async def _find(
        self, whole: str, make: Callable[[], Awaitable[Any]], ttl_s: float | Callable[[Any], float]
    ) -> bytes:
        value = await make()
        raw = msgspec.json.encode(value)
        await self._keep([(whole, raw)], ttl_s(value) if callable(ttl_s) else ttl_s)
        return raw

    async def _look(self, names: list[str]) -> list[bytes | None]:
        if not self._enabled or not names or time.monotonic() < self._away_until:
            return [None] * len(names)
        try:
            async with self._connections, asyncio.timeout(READ_S):
                return cast(list[bytes | None], await self._cache.multi_get(names))
        except _AWAY as exc:
            self._went_away(exc)
            return [None] * len(names)

    async def _keep(self, pairs: list[tuple[str, bytes]], ttl_s: float) -> None:
        small = [(name, raw) for name, raw in pairs if len(raw) <= LARGEST]
        if not self._enabled or not small or ttl_s <= 0 or time.monotonic() < self._away_until:
            return
        try:
            async with self._connections, asyncio.timeout(WRITE_S):
                await self._cache.multi_set(small, ttl=ttl_s)
        except _AWAY as exc:
            self._went_away(exc)

    def _went_away(self, exc: Exception) -> None:
        log.warning("shared cache skipped", extra={"reason": type(exc).__name__, "for_s": READ_AWAY_S})
        self._away_until = time.monotonic() + READ_AWAY_S

    async def close(self) -> None:
        if isinstance(self._cache, RedisCache):
            await _close(self._cache)


def _name(network: str, kind: str, name: str) -> str:
    return f"{network}:{kind}:{name}"


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
