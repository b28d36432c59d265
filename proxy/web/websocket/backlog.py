"""Events of one socket that cannot be sent now: its client does not read, or its key has no compute units left.

They wait in a bounded queue, in order. If the queue overflows because the client does not read, the socket is closed with 1013;
the client can reconnect and subscribe from the last block it has. A key without units keeps its connection: the client gets one
error, events that do not fit are dropped, and once the rest is sent, a message lists the blocks that it missed. Only then are
events sent directly again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from proxy.core import jsonrpc
from proxy.core.usage import Tally
from proxy.errors import Fault, LeasePending, RateLimited
from proxy.services.feed.topics import FeedEvent
from proxy.web.websocket.socket_context import EventKind
from proxy.web.websocket.socket_output import SocketOutput
from proxy.web.websocket.unit_allowance import UnitAllowance

# The approximate size of a notification without its event.
AROUND_AN_EVENT = 130


class QueuedSubscription(Protocol):
    """A subscription as the backlog sees it."""

    id: bytes
    is_open: bool
    kind: EventKind
    replays: bool
    tally: Tally

    def send(self, event: FeedEvent) -> None: ...


class MissedEvents:
    """The dropped events of one subscription."""

    __slots__ = ("count", "first", "last")

    def __init__(self) -> None:
        self.first = self.last = self.count = 0

    def add(self, block: int) -> None:
        self.count += 1
        if block:
            self.first = min(self.first or block, block)
            self.last = max(self.last, block)

    def as_json(self) -> dict[str, int | str]:
        blocks = {"fromBlock": hex(self.first), "toBlock": hex(self.last)} if self.first else {}
        return {"events": self.count, **blocks}


def pause_notice(id_: bytes, refusal: Fault) -> bytes:
    """The message that a key has no units for the events of this subscription."""
    after_s = refusal.retry_after_s if isinstance(refusal, RateLimited) else 1
    return _notice(id_, f"{refusal.message}; events wait until there are units again", {"retryAfter": after_s})


def _notice(id_: bytes, message: str, data: dict[str, object]) -> bytes:
    error = jsonrpc.error(jsonrpc.LIMIT_EXCEEDED, message, {"subscription": msgspec.Raw(id_), **data})
    return jsonrpc.error_reply(b"", error)


class Backlog:
    __slots__ = (
        "_allowance",
        "_bytes",
        "_is_announced",
        "_max_bytes",
        "_missed",
        "_on_empty",
        "_on_overflow",
        "_output",
        "_queue",
        "_waiters",
    )

    def __init__(
        self,
        output: SocketOutput,
        allowance: UnitAllowance,
        *,
        max_bytes: int,
        on_empty: Callable[[], None],
        on_overflow: Callable[[], None],
    ) -> None:
        """`on_empty` is called when events can be sent directly again, `on_overflow` when a client does not read."""
        self._output = output
        self._allowance = allowance
        self._max_bytes = max_bytes
        self._on_empty = on_empty
        self._on_overflow = on_overflow
        self._queue: deque[tuple[QueuedSubscription, FeedEvent, int]] = deque()
        self._bytes = 0
        self._missed: dict[QueuedSubscription, MissedEvents] = {}
        # Whether the client has been sent the error that its key has no units left.
        self._is_announced = False
        self._waiters: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        return (
            f"<Backlog {len(self._queue)} events of {self._bytes} bytes, {len(self._missed)} subscriptions missed some>"
        )

    @property
    def size(self) -> int:
        return self._bytes

    def add(self, subscription: QueuedSubscription, events: Sequence[FeedEvent]) -> None:
        for event in events:
            if not subscription.is_open:
                return
            self._add(subscription, event)
        self.send()

    def _add(self, subscription: QueuedSubscription, event: FeedEvent) -> None:
        # The frame is built when the event is sent: an event caches a frame for each subscription id, and may never be sent.
        size = len(event.result) + AROUND_AN_EVENT
        if not self._has_room(subscription, size):
            self.send()
        if subscription in self._missed or not self._has_room(subscription, size):
            self._drop(subscription, event)
            return
        self._queue.append((subscription, event, size))
        self._bytes += size

    def _has_room(self, subscription: QueuedSubscription, size: int) -> bool:
        """A replay waits for room between its batches, so the batch under way may exceed the limit."""
        return subscription.replays or self._bytes + size <= self._max_bytes

    def _drop(self, subscription: QueuedSubscription, event: FeedEvent) -> None:
        subscription.kind.dropped += 1
        if self._output.is_stalled:
            self._on_overflow()
        else:
            self._missed.setdefault(subscription, MissedEvents()).add(event.block)

    def send(self) -> None:
        """Send as much as the client reads and its key can pay for. When all is sent, the backlog ends."""
        output, queue, allowance = self._output, self._queue, self._allowance
        while queue:
            subscription, event, size = queue[0]
            if subscription.is_open:
                if output.is_stalled:
                    return
                units = subscription.kind.units
                if not allowance.spend(units):
                    self._wait_for_units(subscription)
                    return
                allowance.key.tallies[subscription.tally].add_units(units)
            queue.popleft()
            self._bytes -= size
            subscription.send(event)
        if not output.is_stalled:
            self._report_missed()
            self.close()

    def _wait_for_units(self, subscription: QueuedSubscription) -> None:
        self._allowance.wait(self.send)
        refusal = self._allowance.refusal
        # A lease takes a millisecond: that is not worth a message.
        if self._is_announced or refusal is None or isinstance(refusal, LeasePending):
            return
        self._is_announced = True
        self._output.send(self._output.message(pause_notice(subscription.id, refusal)))

    def _report_missed(self) -> None:
        missed, self._missed = self._missed, {}
        for subscription, dropped in missed.items():
            message = f"{dropped.count} events were dropped for lack of compute units: subscribe again with fromBlock"
            notice = _notice(subscription.id, message, {"missed": dropped.as_json()})
            self._output.send(self._output.message(notice))

    async def is_over(self) -> None:
        """Return when the backlog has ended, or when a subscription has."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def forget(self, subscription: QueuedSubscription) -> None:
        """The subscription has ended: drop its missed events, and wake its replay."""
        self._missed.pop(subscription, None)
        self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def close(self) -> None:
        """End: from now on events are sent directly, or the socket is closed."""
        self._queue.clear()
        self._missed.clear()
        self._bytes = 0
        self._allowance.forget(self.send)
        self._on_empty()
        self._wake()
