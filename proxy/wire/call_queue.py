"""The calls that one upstream is given at a time, and the queue of those that wait for their turn.

*Limit.* It follows the upstream's latency (`core/concurrency.py`). A call whose client left is discarded here, but the upstream
still works on it: it counts for as long as calls usually take. It does not work on replies whose readers do not read. These
take a connection, but no place within the limit. *Shares.* A few places are reserved for clients that hold fewer than are
free, so that one client cannot hold them all. A client whose reader has lost its connection to others comes after them for a
while. *Order and patience* are those of `waiting_calls.py`.

The upstream sends calls by itself while it has room and none waits; these are not counted. Once a call waits, every call passes
through here, and calls in flight are counted by client.
"""

from __future__ import annotations

import asyncio
from typing import Final

from proxy.core.concurrency import ConcurrencyLimit
from proxy.wire.upstream import CROWDED, ReplySink, Upstream
from proxy.wire.waiting_calls import READERS_PATIENCE_S, WaitingCall, WaitingCalls, patience_s

# Calls that may wait, of all clients. Beyond it, the client that has most makes room for the others.
MAX_WAITING = 4096
# One of this many places is reserved, and at least one unless there are very few.
RESERVE_SHARE: Final = 32
TINY: Final = 8
# A call that was given up counts for as long as this share of calls takes at most, and never longer than this many seconds.
ABANDONED_QUANTILE: Final = 0.95
LONGEST_ABANDONED_S: Final = 10.0
# For how long calls are patient after readers held the connections: the next ones may do so in a moment.
READERS_S: Final = 1.0
# For how long a connection that a reader had to give up still counts for its client.
EVICTED_S: Final = 10.0


class CallQueue:
    """`limit.allowed` is how many calls the upstream is given at the moment, `reserved` how many of these are reserved."""

    __slots__ = (
        "_abandoned", "_busy", "_crowded_since", "_evicted", "_held", "_loop", "_patient_until", "_readers", "_sent_at",
        "_upstream", "_waiting", "limit", "reserved",
    )  # fmt: skip

    def __init__(self, upstream: Upstream, most: int) -> None:
        self._upstream = upstream
        self._loop = asyncio.get_running_loop()
        self.limit = ConcurrencyLimit(most)
        self.reserved = max(1, most // RESERVE_SHARE) if most >= TINY else 0
        self._waiting = WaitingCalls()
        # Since when calls wait for other calls to end, or 0.0.
        self._crowded_since = 0.0
        # While calls wait: the calls in flight, by client and in total; and when those were sent that had waited.
        self._held: dict[str, int] = {}
        self._busy = 0
        self._sent_at: dict[ReplySink, float] = {}
        # Clients that left while the upstream worked on their call, and until when each is counted.
        self._abandoned: list[tuple[float, str]] = []
        # Clients whose readers had to give up their connections, and until when each is counted.
        self._evicted: list[tuple[float, str]] = []
        # Replies in flight whose readers do not read.
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
    def allowed(self) -> int:
        """The calls that the upstream may be given, including those whose readers do not read."""
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
        """The call cannot be sent yet after all."""
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
        """A client without a call does not wait until those of others have ended that a lower limit no longer allows."""
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
        """A reader of the client had to give up its connection. It may come back at once, but not before others."""
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
        `used`: places in use; `opening`: connections that are being opened, each for a call that waits; `readers`: replies
        whose readers do not read."""
        self._readers = readers
        if self.is_held_by_readers:
            self._patient_until = now + READERS_S
        if self._abandoned:
            self._abandoned = [each for each in self._abandoned if each[0] > now]
        if self._evicted:
            self._evicted = [each for each in self._evicted if each[0] > now]
        for waiting in self._waiting.all():
            waiting.sink.on_tick(None, now)
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

    def leave(self, sink: ReplySink) -> None:
        self._waiting.remove(sink)

    def replace(self, sink: ReplySink, successor: ReplySink) -> None:
        """Let another sink take over a call that waits."""
        self._waiting.replace(sink, successor)

    def _is_beyond_share(self, call: WaitingCall) -> bool:
        """Whether the call could not be served in time: as many of each client may wait as will be served until then."""
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
        """Report it in the next turn of the loop: the sink may send the call elsewhere at once, or here."""
        self._upstream.count_shed()
        self._loop.call_soon(self._report_refusal, call)

    def _report_refusal(self, call: WaitingCall) -> None:
        call.sink.on_fail(self._upstream, CROWDED, sent=False)
