"""Events of one socket that cannot go out now: its client does not read, or its key has no units left.

They wait in a bounded queue, in order. A client that lets it overflow by not reading is closed with 1013: it can come back and
subscribe from the block it knows. A key without units keeps its connection. It is told once; what does not fit is dropped; and
when the rest has gone out, it is told which blocks it missed. Only then events go straight out again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from proxy.core import jsonrpc
from proxy.errors import RateLimited
from proxy.services.feed.topics import FeedEvent
from proxy.web.websocket.frames import frame

if TYPE_CHECKING:
    from proxy.web.websocket.client_socket import ClientSocket
    from proxy.web.websocket.subscriptions import Subscription


class MissedEvents:
    """What one subscription was not told."""

    __slots__ = ("count", "first", "last")

    def __init__(self) -> None:
        self.first = self.last = self.count = 0

    def add(self, block: int) -> None:
        self.count += 1
        if block:
            self.first = min(self.first or block, block)
            self.last = max(self.last, block)

    def told(self) -> dict[str, int | str]:
        blocks = {"fromBlock": hex(self.first), "toBlock": hex(self.last)} if self.first else {}
        return {"events": self.count, **blocks}


class Backlog:
    __slots__ = ("_bytes", "_is_told", "_missed", "_queue", "_socket", "_waiters")

    def __init__(self, socket: ClientSocket) -> None:
        self._socket = socket
        self._queue: deque[tuple[Subscription, FeedEvent, int]] = deque()
        self._bytes = 0
        self._missed: dict[Subscription, MissedEvents] = {}
        # Whether the client was told that its key has no units left.
        self._is_told = False
        self._waiters: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        return (
            f"<Backlog {len(self._queue)} events of {self._bytes} bytes, {len(self._missed)} subscriptions missed some>"
        )

    @property
    def size(self) -> int:
        return self._bytes

    def keep(self, made: Subscription, events: Sequence[FeedEvent]) -> None:
        for event in events:
            if not made.is_open:
                return
            self._keep(made, event)
        self.pump()

    def _keep(self, made: Subscription, event: FeedEvent) -> None:
        size = len(made.frame_of(event))
        if not self._has_room(made, size):
            self.pump()
        if made in self._missed or not self._has_room(made, size):
            self._drop(made, event)
            return
        self._queue.append((made, event, size))
        self._bytes += size

    def _has_room(self, made: Subscription, size: int) -> bool:
        """A replay asks for room between its batches, so it can be let finish one."""
        return made.replays or self._bytes + size <= self._socket.limits.max_queue_bytes

    def _drop(self, made: Subscription, event: FeedEvent) -> None:
        made.kind.dropped += 1
        if self._socket.is_stalled:
            self._socket.close_slow()
        else:
            self._missed.setdefault(made, MissedEvents()).add(event.block)

    def pump(self) -> None:
        """Send what waits, as far as the client reads and its key has units; then this queue is over."""
        socket, queue = self._socket, self._queue
        while queue:
            made, event, size = queue[0]
            if made.is_open:
                if socket.is_stalled:
                    return
                if not socket.purse.spend(made.kind.units):
                    self._wait_for_units(made)
                    return
                socket.key.sheet[made.tally].units += made.kind.units
            queue.popleft()
            self._bytes -= size
            made.send(event)
        if not socket.is_stalled:
            self._tell_missed()
            self.close()

    def _wait_for_units(self, made: Subscription) -> None:
        purse = self._socket.purse
        purse.wait(self.pump)
        refusal = purse.refusal
        if self._is_told or refusal is None:
            return
        self._is_told = True
        after_s = refusal.retry_after_s if isinstance(refusal, RateLimited) else 1
        self._tell(made, f"{refusal.message}; events wait until there are units again", {"retryAfter": after_s})

    def _tell_missed(self) -> None:
        missed, self._missed = self._missed, {}
        for made, what in missed.items():
            words = f"{what.count} events were dropped for want of compute units: subscribe again with fromBlock"
            self._tell(made, words, {"missed": what.told()})

    def _tell(self, made: Subscription, message: str, data: dict[str, object]) -> None:
        error = jsonrpc.error(jsonrpc.LIMIT_EXCEEDED, message, {"subscription": msgspec.Raw(made.id), **data})
        self._socket.send(frame(jsonrpc.error_reply(b"", error)))

    async def is_over(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def forget(self, made: Subscription) -> None:
        """It was ended: what it missed is of no interest, and a replay of it has nothing to wait for."""
        self._missed.pop(made, None)
        self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def close(self) -> None:
        """Over: from now on events go straight out, or the socket is closed."""
        self._queue.clear()
        self._missed.clear()
        self._bytes = 0
        self._socket.purse.forget(self.pump)
        self._socket.held = None
        self._wake()
