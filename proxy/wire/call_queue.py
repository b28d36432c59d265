"""How many calls one upstream gets at a time, and the queue of calls that wait for their turn.

*Limit.* It follows the upstream's latency (`core/concurrency.py`). After a client leaves, its reply is discarded, but the
upstream still works on the call, so it keeps its place for as long as calls usually take. A streamed reply whose client has
stopped reading uses a connection but no place within the limit, because the upstream is not working on it. *Shares.* A few
places are reserved: a client gets one of these only if it holds fewer places than are free, so one client cannot hold them
all. A client whose connection was taken away because it did not read comes after other clients for a while. `waiting_calls.py`
decides the order of calls, and how long they wait.

The upstream sends calls by itself while it has room and none waits; these are not counted. Once a call waits, every call passes
through here, and calls in flight are counted by client.
"""

from __future__ import annotations

import asyncio
from typing import Final

from proxy.core.concurrency import ConcurrencyLimit
from proxy.wire.upstream import CROWDED, ReplySink, Upstream
from proxy.wire.waiting_calls import READERS_PATIENCE_S, WaitingCall, WaitingCalls, patience_s

# Bounds the memory of waiting calls. Beyond it, the newest call of the client with the most waiting calls is refused.
MAX_WAITING = 4096
# One place in RESERVE_SHARE is reserved, and at least one; none if there are fewer than TINY places.
RESERVE_SHARE: Final = 32
TINY: Final = 8
# A call whose client left counts for this quantile of the upstream's latency, and never longer than this many seconds.
ABANDONED_QUANTILE: Final = 0.95
LONGEST_ABANDONED_S: Final = 10.0
# For how long calls wait up to READERS_PATIENCE_S after slow readers held half of the connections: it may happen again soon.
READERS_S: Final = 1.0
# For how long a connection that was taken from a slow reader still counts for its client.
EVICTED_S: Final = 10.0


class CallQueue:
    """`limit.allowed` is how many calls may be in flight at the moment; `reserved` of these places are reserved."""

    __slots__ = (
        "_abandoned",
        "_busy",
        "_crowded_since",
        "_evicted",
        "_held",
        "_loop",
        "_patient_until",
        "_readers",
        "_sent_at",
        "_upstream",
        "_waiting",
        "limit",
        "reserved",
    )

    def __init__(self, upstream: Upstream, most: int) -> None:
        self._upstream = upstream
        self._loop = asyncio.get_running_loop()
        self.limit = ConcurrencyLimit(most)
        self.reserved = max(1, most // RESERVE_SHARE) if most >= TINY else 0
        self._waiting = WaitingCalls()
        # Since when calls wait for other calls to end, or 0.0.
        self._crowded_since = 0.0
        # While calls wait: the calls in flight, by client and in total, and when each call from the queue was sent.
        self._held: dict[str, int] = {}
        self._busy = 0
        self._sent_at: dict[ReplySink, float] = {}
        # Clients that left while the upstream worked on their call, and until when each is counted.
        self._abandoned: list[tuple[float, str]] = []
        # Clients whose connections were taken away because they did not read, and until when each is counted.
        self._evicted: list[tuple[float, str]] = []
        # Streamed replies whose clients do not read.
        self._readers = 0
        self._patient_until = 0.0

    def __repr__(self) -> str:
        return f"<CallQueue {self._waiting!r}, {self.limit!r}>"

    def __len__(self) -> int:
        return len(self._waiting)

    # Room

    @property
    def is_crowded(self) -> bool:
        return self._crowded_since > 0.0

    @property
    def needs_tick(self) -> bool:
        """Whether time changes anything here: calls wait, or something is counted for a while."""
        return bool(
            self._waiting or self._sent_at or self._abandoned or self._evicted or self._readers or self._crowded_since
        )

    @property
    def allowed(self) -> int:
        """How many calls may be in flight, including those whose clients do not read the reply."""
        return min(self.limit.allowed + self._readers, self.limit.most)

    @property
    def is_held_by_readers(self) -> bool:
        """Whether readers that do not read hold half of the connections or more."""
        return 2 * self._readers >= self.limit.most

    def room(self, used: int) -> int:
        """How many more calls the upstream may be given while this many places are used."""
        return self.allowed - used - len(self._abandoned)

    def is_full(self, used: int) -> bool:
        """Whether only reserved places are left."""
        return self.room(used) <= self.reserved

    # Calls

    def push(self, call: WaitingCall, *, is_full: bool) -> bool:
        """Let the call wait. Returns False if it is refused. `is_full`: whether it waits for other calls to end."""
        if not self._waiting:
            self.count_held()
        is_hopeless = is_full and self._is_beyond_share(call)
        if is_hopeless or (len(self._waiting) >= MAX_WAITING and not self._make_room(call.client)):
            self._refuse(call)
            return False
        self._waiting.push(call)
        return True

    def push_back(self, call: WaitingCall) -> None:
        """Return a call to the queue that `next_call` returned: it cannot be sent yet."""
        self._waiting.push(call)

    def next_call(self, now: float) -> WaitingCall | None:
        """The call that comes next, if its client may have one more in flight."""
        waiting = self._waiting
        while waiting:
            client = waiting.next_client(self._held)
            if not self._may_have_one_more(client):
                return None
            call = waiting.pop(client)
            if not self._crowded_since or not call.is_too_old(now, self._patience_s(now)):
                return call
            self._refuse(call)
        return None

    def _may_have_one_more(self, client: str) -> bool:
        """Whether the client may have one more call in flight. After the limit was lowered, there may be more calls in flight
        than it allows. A client without any does not wait for these to end."""
        held, free = self._held.get(client, 0), self.room(self._busy)
        if free > self.reserved or held < free:
            return True
        return not held and self._busy + len(self._abandoned) < self.limit.most

    def sent(self, call: WaitingCall, now: float) -> None:
        self._held[call.client] = self._held.get(call.client, 0) + 1
        self._busy += 1
        self._sent_at[call.sink] = now

    def ended(self, sink: ReplySink, now: float) -> None:
        """A call was answered while others wait."""
        self._busy -= 1
        self._held[sink.client] = self._held.get(sink.client, 1) - 1
        sent_at = self._sent_at.pop(sink, 0.0)
        if sent_at:
            self.limit.observe(now - sent_at, now)

    def is_streamed(self, sink: ReplySink) -> None:
        """How long the call takes now depends on the reader of its reply, so it is not observed."""
        self._sent_at.pop(sink, None)

    def replaced(self, sink: ReplySink, successor: ReplySink) -> None:
        """Another sink receives the reply to a call in flight."""
        sent_at = self._sent_at.pop(sink, 0.0)
        if sent_at:
            self._sent_at[successor] = sent_at

    def abandoned(self, client: str, now: float) -> None:
        """The client of a call in flight left."""
        health = self._upstream.health
        usual = health.quantile_s(ABANDONED_QUANTILE) or health.latency_s
        self._abandoned.append((now + min(usual, LONGEST_ABANDONED_S), client))

    def evicted(self, client: str, now: float) -> None:
        """A connection was taken from the client because it did not read. Its next call comes after those of others."""
        self._evicted.append((now + EVICTED_S, client))

    def count_held(self) -> None:
        """Count the calls in flight: when the first call waits, and after calls have ended in another way than `ended`."""
        held: dict[str, int] = {}
        sent_at: dict[ReplySink, float] = {}
        in_flight = self._upstream.in_flight()
        for sink in in_flight:
            held[sink.client] = held.get(sink.client, 0) + 1
            if self._waiting and sink in self._sent_at:
                sent_at[sink] = self._sent_at[sink]
        for _, client in (*self._abandoned, *self._evicted):
            held[client] = held.get(client, 0) + 1
        self._busy = len(in_flight)
        self._held = held
        self._sent_at = sent_at

    # Waiting calls

    def tick(self, now: float, *, used: int, opening: int = 0, readers: int = 0) -> None:
        """Called by the sweep: calls that wait check their deadlines, and those that have waited for too long are refused.
        `used`: places in use; `opening`: connections that are being opened, each for a call that waits; `readers`: streamed
        replies whose clients do not read."""
        self._readers = readers
        if self.is_held_by_readers:
            self._patient_until = now + READERS_S
        if self._abandoned:
            self._abandoned = [each for each in self._abandoned if each[0] > now]
        if self._evicted:
            self._evicted = [each for each in self._evicted if each[0] > now]
        for waiting in self._waiting.all():
            if self._waiting.has(waiting.sink):
                self._upstream.check(waiting.sink, None, now)
        if opening >= len(self._waiting) or not self.is_full(used):
            self._crowded_since = 0.0
        elif not self._crowded_since:
            self._crowded_since = now
        if self._crowded_since:
            for call in self._waiting.take_old(now, self._patience_s(now)):
                self._refuse(call)
        if self._waiting or self._sent_at:
            self.count_held()

    def take_one(self) -> list[WaitingCall]:
        """Remove the call that comes next, if there is one."""
        return [self._waiting.pop(self._waiting.next_client(self._held))] if self._waiting else []

    def take_all(self) -> list[WaitingCall]:
        return self._waiting.take_all()

    def all(self) -> list[WaitingCall]:
        return self._waiting.all()

    def leave(self, sink: ReplySink) -> bool:
        """Drop the sink's call. Returns whether there was one."""
        return self._waiting.remove(sink)

    def replace(self, sink: ReplySink, successor: ReplySink) -> None:
        """Let another sink take over a call that waits."""
        self._waiting.replace(sink, successor)

    def _is_beyond_share(self, call: WaitingCall) -> bool:
        """Whether the call would be too old before its turn. A client may have no more calls waiting than its share of those
        that the upstream can serve within the patience."""
        latency_s = self.limit.latency_s
        if not latency_s or not call.client:
            return False
        allowed = self.limit.allowed
        bound = allowed + int(allowed * self._patience_s(call.since) / latency_s)
        return self._waiting.exceeds_share(call.client, bound)

    def _make_room(self, client: str) -> bool:
        """Refuse the newest call of the client that has most of them. False if this client itself has as many."""
        greediest = self._waiting.greediest()
        if self._waiting.count_of(greediest) <= self._waiting.count_of(client) + 1:
            return False
        self._refuse(self._waiting.pop_newest(greediest))
        return True

    def _patience_s(self, now: float) -> float:
        if now < self._patient_until:
            return READERS_PATIENCE_S
        return patience_s(now - self._crowded_since if self._crowded_since else 0.0, self.limit.latency_s)

    def _refuse(self, call: WaitingCall) -> None:
        """Refuse the call. The sink is notified in the next loop turn, because it may send the call again at once."""
        self._upstream.count_shed()
        self._loop.call_soon(self._report_refusal, call)

    def _report_refusal(self, call: WaitingCall) -> None:
        call.sink.on_fail(self._upstream, CROWDED, sent=False)
