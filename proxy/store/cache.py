"""Replies that all workers and hosts share: aiocache on Redis or Valkey, for what can never change.

Nothing waits for it. A look that takes longer than a quick upstream would is given up, and after one that failed nobody looks
for a while. What is to be kept goes through a bounded queue that one loop empties; what does not fit is not kept.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import cast

from aiocache.backends.redis import RedisCache
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

_AWAY = (RedisError, OSError, TimeoutError)


class SharedReplies:
    """Results by name. No method raises, and none waits for long."""

    def __init__(self, url: str) -> None:
        address = URL(url)
        self._cache = RedisCache(
            serializer=NullSerializer(encoding=None),
            namespace=NAMESPACE,
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
        try:
            async with asyncio.timeout(WRITE_S):
                # Not the cache's own close: that calls what redis-py has renamed, which warns.
                await self._cache.client.aclose(close_connection_pool=True)
        except _AWAY:
            pass
