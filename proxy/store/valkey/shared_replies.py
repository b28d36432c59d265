"""JSON-RPC results that can never change, shared by all workers and hosts through Valkey or Redis.

No call waits for long: a lookup that takes longer than a fast upstream is abandoned, and after a failure lookups stop for a
while. Writes have a separate connection and go through a bounded queue; results that do not fit it are dropped. Results
that turned out to be wrong are deleted, as soon as the server can be reached.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import hiredis

from proxy.store.valkey.valkey_address import address_of
from proxy.store.valkey.valkey_link import ValkeyLink
from proxy.tasks import Tasks

log = logging.getLogger("penstock.cache")

# A slower lookup than this gains nothing over calling an upstream.
LOOK_S = 0.05
WRITE_S = 1.0
# How long lookups stop after a failure.
AWAY_S = 1.0
# The most queued writes and their bytes, so that a server that is slow or away does not fill our memory; and the most that are
# sent at once.
QUEUE, QUEUE_BYTES = 1024, 16 << 20
AT_ONCE, BYTES_AT_ONCE = 64, 1 << 20
# Names of wrong results that wait to be deleted while the server is away.
MOST_UNWANTED = 65_536
# Larger replies are not cached: transferring them costs more than it saves.
LARGEST = 1 << 20
# The replies never change; they expire so that unused ones do not fill the server.
KEPT_S = 7 * 86_400
# The number is the version of the stored format: a new format gets new names.
NAMESPACE = "penstock:1::"

OnFound = Callable[[Sequence[bytes | None]], None]


class SharedReplies:
    """Results by name. No method raises or blocks."""

    def __init__(self, url: str) -> None:
        address = address_of(url)
        self._reads = ValkeyLink(address, late_s=LOOK_S)
        self._reads.on_change.append(self._on_change)
        self._writes = ValkeyLink(address, late_s=WRITE_S)
        self._queue: deque[tuple[str, bytes]] = deque()
        self._queued_bytes = 0
        self._unwanted: dict[str, None] = {}
        self._has_work = asyncio.Event()
        self._away_until = 0.0
        self.dropped = 0

    def __repr__(self) -> str:
        return f"<SharedReplies {len(self._queue)} to write, {self.dropped} dropped>"

    def start(self, tasks: Tasks) -> None:
        tasks.start("shared cache reads", self._reads.run)
        tasks.start("shared cache writes", self._writes.run)
        tasks.start("shared cache", self.run)

    # Reading

    def is_available(self, now: float) -> bool:
        return self._reads.is_up and now >= self._away_until

    def look(self, names: Sequence[str], on_found: OnFound) -> None:
        """Call `on_found` with the cached result for each name, or None; all None if the lookup fails or takes too long."""
        words = ("MGET", *[NAMESPACE + name for name in names])
        if not self._reads.send(words, partial(self._on_reply, on_found, len(names))):
            on_found([None] * len(names))

    def _on_reply(self, on_found: OnFound, count: int, reply: Any) -> None:
        if isinstance(reply, hiredis.ReplyError):
            self._reads.reload(str(reply))
        on_found(reply if isinstance(reply, list) else [None] * count)

    def _on_change(self) -> None:
        if not self._reads.is_up:
            self._away_until = time.monotonic() + AWAY_S

    # Writing

    def put(self, name: str, result: bytes) -> None:
        """Queue the result to be written."""
        if len(result) > LARGEST:
            return
        if len(self._queue) >= QUEUE or self._queued_bytes + len(result) > QUEUE_BYTES:
            self.dropped += 1
            return
        self._queue.append((name, result))
        self._queued_bytes += len(result)
        self._has_work.set()

    def forget(self, names: Iterable[str]) -> None:
        """Delete results that turned out to be wrong, also those that are still queued."""
        if len(self._unwanted) < MOST_UNWANTED:
            self._unwanted |= dict.fromkeys(names)
        else:
            log.error("wrong replies stay in Valkey until they expire: it is away and too many wait to be deleted")
        self._queue = deque(pair for pair in self._queue if pair[0] not in self._unwanted)
        self._queued_bytes = sum(len(result) for _, result in self._queue)
        self._has_work.set()

    async def run(self) -> None:
        """Write queued results, a few at a time: a supervised loop."""
        while True:
            await self._has_work.wait()
            if not self._writes.is_up:
                await asyncio.sleep(AWAY_S / 10)
            elif self._unwanted:
                await self._delete()
            elif self._queue:
                await self._write()
            else:
                self._has_work.clear()

    async def _delete(self) -> None:
        names = [*self._unwanted][:QUEUE]
        reply = await self._writes.ask("UNLINK", *[NAMESPACE + name for name in names])
        if isinstance(reply, int):
            for name in names:
                self._unwanted.pop(name, None)
        else:
            await self._pause(reply)

    async def _write(self) -> None:
        pairs = self._next()
        asks = [self._writes.ask("SET", NAMESPACE + name, result, "EX", str(KEPT_S)) for name, result in pairs]
        refused = [reply for reply in await asyncio.gather(*asks) if reply != b"OK"]
        if refused:
            self.dropped += len(refused)
            await self._pause(refused[0])

    async def _pause(self, reply: Any) -> None:
        """A write failed: the server is away, or has become a replica."""
        if isinstance(reply, hiredis.ReplyError):
            self._writes.reload(str(reply))
        await asyncio.sleep(AWAY_S)

    def _next(self) -> list[tuple[str, bytes]]:
        pairs: list[tuple[str, bytes]] = []
        size = 0
        while self._queue and len(pairs) < AT_ONCE and size < BYTES_AT_ONCE:
            pairs.append(self._queue.popleft())
            size += len(pairs[-1][1])
        self._queued_bytes -= size
        return pairs
