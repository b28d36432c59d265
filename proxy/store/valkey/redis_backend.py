"""A cache on Redis or Valkey, through aiocache."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

from aiocache.backends.redis import RedisCache
from aiocache.serializers import NullSerializer
from redis.exceptions import RedisError
from yarl import URL


class RedisBackend:
    """Values by name. Errors of the client are raised as ConnectionError."""

    def __init__(self, url: str, namespace: str, *, connections: int, timeout_s: float) -> None:
        address = URL(url)
        self._timeout_s = timeout_s
        self._cache = RedisCache(
            serializer=NullSerializer(encoding=None),
            namespace=namespace,
            timeout=None,
            endpoint=address.host or "127.0.0.1",
            port=address.port or 6379,
            db=int(address.path.strip("/") or 0),
            password=address.password,
            pool_max_size=connections,
            create_connection_timeout=timeout_s,
            ssl=address.scheme in ("rediss", "valkeys"),
            connection_pool_kwargs={"username": address.user or None},
        )

    def __repr__(self) -> str:
        return f"<RedisBackend {self._cache.namespace}>"

    async def multi_get(self, names: Sequence[str]) -> list[bytes | None]:
        try:
            return cast(list[bytes | None], await self._cache.multi_get(list(names)))
        except RedisError as exc:
            raise ConnectionError(type(exc).__name__) from None

    async def multi_set(self, pairs: Sequence[tuple[str, bytes]], *, ttl_s: float) -> None:
        try:
            await self._cache.multi_set(list(pairs), ttl=ttl_s)
        except RedisError as exc:
            raise ConnectionError(type(exc).__name__) from None

    async def close(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                # Not the cache's own close: it calls a method that redis-py has deprecated, which warns.
                await self._cache.client.aclose(close_connection_pool=True)
        except (RedisError, OSError, TimeoutError):
            pass
