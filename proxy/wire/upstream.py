"""The interface between upstreams, their connections and the sinks that wait for replies.

These three types refer to one another, so they are declared together; `http_upstream`, `http_connection` and
`websocket_upstream` implement them. A sink is notified exactly once how its call ended: with a whole reply, with a large reply
in pieces, or with a failure that states whether the upstream may have received the call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias

from proxy.core.batch_sizes import BatchSizes
from proxy.core.upstream_health import UpstreamHealth
from proxy.wire.http1 import ReplyHeaders

log = logging.getLogger("penstock.upstream")

# The largest reply that is held in memory.
MAX_REPLY_BYTES = 25 * 1024 * 1024
# Callers of one call share a reply of up to this many bytes. A larger one is held for nobody: joining its pieces would take the
# loop's time in one step.
MOST_SHARED = 4 << 20
# Reasons of failures that sinks treat specially.
# The connection had served other calls and closed without sending anything: most likely the upstream had closed it already.
# This does not count against the upstream's health, and reads should be sent again at once.
STALE = "connection closed between calls"
# An earlier reply did not belong to its call, so later replies on the connection cannot be trusted.
OUT_OF_STEP = "malformed reply before"
# The reply exceeds MAX_REPLY_BYTES. The client may have requested it on purpose.
TOO_LARGE = "too large"
# The memory budget has no room for the reply: an account may hold no more bytes than are free.
NO_MEMORY = "no memory for the reply"
# The call was not sent because all connections are busy: that is our load, not the upstream's failure.
CROWDED = "all connections are busy"
# See `Upstream.check`.
UNCHECKED = "its deadlines could not be checked"

# A part of a large reply. A view avoids a copy.
Piece: TypeAlias = bytes | memoryview


class ReplySink(Protocol):
    """Receives the reply to one request. `client`: the account whose call it is; empty for our own calls. `on_late`: the reply
    to a call that was left has arrived, from an upstream that bills calls."""

    @property
    def client(self) -> str: ...
    def on_reply(self, connection: UpstreamConnection, headers: ReplyHeaders, body: bytes) -> None: ...
    def on_large(self, connection: UpstreamConnection, headers: ReplyHeaders, beginning: Piece) -> bool: ...
    def on_piece(self, connection: UpstreamConnection, piece: Piece) -> None: ...
    def on_end(self, connection: UpstreamConnection) -> None: ...
    def on_fail(self, upstream: Upstream, reason: str, *, sent: bool) -> None: ...
    def on_tick(self, connection: UpstreamConnection | None, now: float) -> None: ...
    def on_late(self, upstream: Upstream, headers: ReplyHeaders, body: bytes) -> None: ...


class ReplyMemory(Protocol):
    """Bounds the memory of replies, by account."""

    def take(self, account: str, size: int) -> bool: ...
    def give_back(self, account: str, size: int) -> None: ...


class UpstreamConnection(asyncio.Protocol):
    """A connection as its sinks and its upstream's pool use it."""

    __slots__ = ("id_index", "idle_since", "on_stalled", "sinks", "transport", "upstream")

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.transport: asyncio.Transport | None = None
        # The sinks of the calls in flight, in the order in which the calls were sent.
        self.sinks: deque[ReplySink] = deque()
        # When data last arrived: between calls, or in the middle of a streamed reply.
        self.idle_since = 0.0
        # See `when_stalled`.
        self.on_stalled: Callable[[], None] | None = None
        # The last id that the short path used here.
        self.id_index = 0

    @property
    def has_replied(self) -> bool:
        return True

    def leave(self, sink: ReplySink) -> None:
        """Discard the sink's reply."""
        raise NotImplementedError

    def replace(self, sink: ReplySink, successor: ReplySink) -> None:
        """Deliver the sink's reply to its successor."""
        raise NotImplementedError

    def take_call(self, sink: ReplySink) -> int:
        """A call of the short path is sent here for this sink. Returns the index of its id."""
        self.sinks.append(sink)
        self.id_index = id_index = (self.id_index + 1) & 255
        return id_index

    def when_stalled(self, on_stalled: Callable[[], None] | None) -> None:
        """Set what is called if the reader of a streamed reply keeps the connection from others for too long."""
        self.on_stalled = on_stalled

    def evict_reader(self) -> None:
        """The reader of a streamed reply has kept the connection from others for too long."""
        on_stalled, self.on_stalled = self.on_stalled, None
        if on_stalled is not None:
            on_stalled()

    def pause(self) -> None:
        """Stop reading until `resume`."""

    def resume(self) -> None: ...

    @property
    def bytes_left(self) -> int:
        """How much of a streamed reply is still to come; 0 if that is unknown."""
        return 0

    def stalled_s(self, now: float) -> float:
        """How long the reader of a streamed reply has kept the connection waiting."""
        return 0.0

    def is_stuck(self, now: float, after_s: float) -> bool:
        """Whether the upstream, and not the reader of a streamed reply, has stopped."""
        return False

    def in_turn(self, client: str, step: Callable[[], bool]) -> None:
        """Take the step in one of the client's next turns (`TurnQueue`)."""
        step()

    def abort(self) -> None: ...

    def fail(self, reason: str) -> None:
        """Close the connection and fail the calls in flight."""


class Upstream:
    """An upstream as callers use it.

    `depth` is the number of calls that may be in flight on one connection. One is safe with any upstream. More (HTTP/1.1
    pipelining) increase throughput by half on an upstream of your own, but a slow call delays those behind it.
    """

    __slots__ = ("batches", "depth", "health", "idle", "label", "memory", "now", "private_words", "rests", "shed")

    def __init__(self, health: UpstreamHealth, *, depth: int, batch: int) -> None:
        self.health = health
        self.label = health.label
        # The words of its address and headers, which its errors may contain and clients must not see.
        self.private_words: tuple[str, ...] = ()
        # Memory for large replies that are received whole. Without it, only the size of each is bounded.
        self.memory: ReplyMemory | None = None
        self.depth = depth
        self.batches = BatchSizes(batch)
        self.idle: list[UpstreamConnection] = []
        # Whether a connection that received its reply can go straight to `idle`: one call each, and no call waits.
        self.rests = depth == 1
        # Calls that were refused because all connections were busy for too long.
        self.shed = 0
        # The time of the last sweep: precise enough to measure how long a connection was idle.
        self.now = time.monotonic()

    def count_shed(self) -> None:
        """A call was refused because all connections were busy for too long."""
        self.shed += 1

    def send_call(self, sink: ReplySink, tail: bytes, params: bytes) -> int:
        """Send a call on the short path. Returns its id, a number, or 0 if no connection can take it at once."""
        raise NotImplementedError

    def submit(
        self, sink: ReplySink, *body: bytes, once: bool = False, fresh: bool = False, header: bytes = b""
    ) -> UpstreamConnection | None:
        """Send a call, given in parts. Returns its connection, or None while the call waits for one.

        `once`: the call must not be sent twice, so it avoids connections that may be closed already. `fresh`: the call has
        just met such a connection, and goes to a new one or to one that has just replied. `header`: one more header line, for
        upstreams that take headers.
        """
        raise NotImplementedError

    def probe(self, sink: ReplySink, *body: bytes) -> None:
        """Send a call of ours that must not wait for those of clients."""
        self.submit(sink, *body)

    @property
    def is_crowded(self) -> bool:
        """Whether calls wait for other calls to end."""
        raise NotImplementedError

    def in_flight(self) -> list[ReplySink]:
        """The sinks of all calls that were sent and not answered."""
        raise NotImplementedError

    def has_replied_since(self, moment: float) -> bool:
        """Whether the upstream has answered any call since then."""
        raise NotImplementedError

    def leave(self, sink: ReplySink) -> bool:
        """Discard the sink's reply, or its call if that was not sent yet. Returns whether the call waited to be sent."""
        raise NotImplementedError

    def replace(self, sink: ReplySink, successor: ReplySink) -> None:
        """Let another sink take over a call that waits for a connection."""
        raise NotImplementedError

    def tick(self, now: float) -> None:
        """Called by the sweep: every call in flight checks its deadlines."""
        raise NotImplementedError

    def check(self, sink: ReplySink, connection: UpstreamConnection | None, now: float) -> None:
        """Let a call check its deadlines. If that fails, the call alone is given up: the sweep goes on with those of others."""
        try:
            sink.on_tick(connection, now)
        except Exception:
            log.exception("the deadlines of a call could not be checked", extra={"upstream": self.label})
            self.leave(sink)
            sink.on_fail(self, UNCHECKED, sent=True)

    def close(self) -> Awaitable[None]:
        raise NotImplementedError

    def count_overdue(self, began: float, now: float) -> None:
        """A call timed out. An upstream that has answered other calls meanwhile is slow, not broken."""
        if self.has_replied_since(began):
            self.health.server_error()
        else:
            self.health.overdue(began, now)

    def count_late(self, began: float, now: float) -> None:
        """A call was given up because another upstream answered it, or will be asked."""
        if self.has_replied_since(began):
            self.health.slow(now - began)
        else:
            self.health.late(now - began, now)

    # Called by connections

    def release(self, connection: UpstreamConnection, ended: ReplySink | None) -> None:
        """The connection can take a call. `ended`: the sink that its last reply belongs to."""
        raise NotImplementedError

    def abandoned(self, sink: ReplySink) -> None:
        """A connection is closed because its call is not wanted any more. The upstream may still work on it."""

    def is_streamed(self, sink: ReplySink) -> None:
        """The sink takes its reply in pieces."""

    def replaced(self, sink: ReplySink, successor: ReplySink) -> None:
        """A connection delivers the reply of a call in flight to another sink."""

    def retire(self, connection: UpstreamConnection) -> None:
        """Close the connection: the upstream asked for it, or it has been idle too long."""
        raise NotImplementedError

    def lost(self, connection: UpstreamConnection) -> None:
        """The connection takes no more calls: it is closed, or about to be."""
        raise NotImplementedError

    def update_time(self, now: float) -> None:
        self.now = now
        self.health.refresh(now)
        self.batches.refresh(now)
