"""The state of one call on its way to an upstream.

A flight is sent to one upstream, perhaps to a second one when the first is late (a hedge) or fails (a retry), and ends once:
with a result, an error from the upstream, or a fault of ours. One client waits for it, or all that made the same call at the
same time. A flight records this state and passes what its connections report to its handler, the `Dispatcher`, which decides.
"""

from __future__ import annotations

import itertools
import logging
from typing import Protocol

import msgspec

from proxy.core.directives import Directives
from proxy.core.jsonrpc import result_start
from proxy.core.request_records import RecordedAttempt
from proxy.core.upstream_health import UpstreamHealth
from proxy.errors import Fault
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.waiters import ABSENT_WAITER, Waiter
from proxy.wire.http1 import ReplyHead
from proxy.wire.upstream import Piece, Upstream, UpstreamConnection

log = logging.getLogger("penstock.flights")

# Attempts for one read, including the first.
MAX_TRIES = 3
# Above the ids of the short path (wire/http_upstream), so that the two never collide.
next_id = itertools.count(1000).__next__


class FlightHandler:
    """Decides what happens to flights. The dispatcher implements it."""

    __slots__ = ()

    def on_reply(self, flight: Flight, connection: UpstreamConnection, head: ReplyHead, body: bytes) -> None:
        raise NotImplementedError

    def on_fail(self, flight: Flight, upstream: Upstream, reason: str, *, sent: bool, blame: bool) -> None:
        raise NotImplementedError

    def on_large(self, flight: Flight, connection: UpstreamConnection, head: ReplyHead, beginning: Piece) -> bool:
        raise NotImplementedError

    def on_end(self, flight: Flight, connection: UpstreamConnection) -> None:
        raise NotImplementedError

    def on_tick(self, flight: Flight, connection: UpstreamConnection | None, now: float) -> None:
        raise NotImplementedError

    def on_abandoned(self, flight: Flight) -> None:
        raise NotImplementedError


class Flight:
    # The account that made the call; empty for our own calls.
    client = ""
    # Other accounts that wait for the same result.
    joined_by: tuple[str, ...] = ()
    # The callers that joined the first one, each with its account.
    joined: list[tuple[Caller, str]] | None = None
    # The cache key of its result, if the result may be cached or shared.
    slot: bytes | None = None
    # The head that an upstream must have reached to receive the call.
    least_head = 0
    # Whether the result contains the head of the chain.
    reports_head = False
    # Whether this is a part of a larger call, and so is not split again.
    is_piece = False
    # Whether other code looks for the result: failures of the attempts left no longer end the flight.
    handed_over = False
    archive = False
    # The caller's directives about attempts.
    directives: Directives | None = None
    done = False
    streaming = False
    # The upstream whose reply arrived last.
    answered_by: Upstream | None = None
    # The attempts in flight, of which there are two at most, and when each began. Two pairs of attributes cost less than
    # an object for each attempt.
    first: Upstream | None = None
    first_at = 0.0
    second: Upstream | None = None
    second_at = 0.0
    # When the attempt that ended last had begun.
    last_began = 0.0
    # Upstreams that reported a failure while no other has replied. See `suspect`.
    suspects: tuple[UpstreamHealth, ...] = ()
    # A result or an error to use if no upstream gives a better one.
    fallback_result: bytes | None = None
    fallback_error = b""
    fallback_weight = 0
    # The attempts that have ended, if one of them did not give the result at once. Others need no list.
    attempt_log: list[RecordedAttempt] | None = None
    # The upstreams that were tried, as a bit set of their indexes, and the number of attempts.
    tried = 0
    tries = 0

    def __init__(
        self,
        handler: FlightHandler,
        policy: MethodPolicy,
        params: bytes,
        waiter: Waiter,
        now: float,
        moves: int,
        tip: int,
    ) -> None:
        self.handler = handler
        self.policy = policy
        self.params = params
        self.waiters = [waiter]
        self.id = b"%d" % next_id()
        # How often the head had moved when the call was made: a result from before a move is out of date.
        self.moves = moves
        # A block that the state behind the result has certainly reached; 0 if it is unknown.
        self.block = tip
        self.most_tries = MAX_TRIES
        self.began = now

    def __repr__(self) -> str:
        state = "done" if self.done else "streaming" if self.streaming else f"{self.tries} sent"
        return f"<Flight {self.policy.method.name} {state}, {len(self.waiters)} waiting>"

    @property
    def answered_label(self) -> str:
        """The name of the upstream whose reply arrived last; empty before the first reply."""
        return "" if self.answered_by is None else self.answered_by.label

    # Attempts

    def begin(self, upstream: Upstream, now: float) -> bytes:
        """An attempt begins. Returns a header for the upstream; empty for calls that are not traced."""
        if self.first is None:
            self.first, self.first_at = upstream, now
        else:
            self.second, self.second_at = upstream, now
        health = upstream.health
        self.tried |= 1 << health.index
        self.tries += 1
        if health.head < self.block:
            self.block = health.head
        health.begin(now)
        if self.directives is None or self.directives.trace is None:
            return b""
        return self.directives.trace.began(self.id, upstream.label, self.policy.method.name)

    def was_sent(self, upstream: Upstream, id_: bytes) -> None:
        """The call was sent under this id before there was a flight for it."""
        self.id = id_
        self.first, self.first_at = upstream, self.began
        self.tried = 1 << upstream.health.index
        self.tries = 1

    def ended(self, upstream: Upstream) -> float:
        """An attempt is over. Returns when it began."""
        upstream.health.inflight -= 1
        if self.directives is not None and self.directives.trace is not None:
            self.directives.trace.ended(self.id, upstream.label)
        if upstream is self.first:
            self.first = None
            self.last_began = self.first_at
        else:
            self.second = None
            self.last_began = self.second_at
        return self.last_began

    def note(self, upstream: Upstream, began: float, now: float, outcome: str) -> None:
        """Record how an attempt ended, for `attempts`."""
        if self.attempt_log is None:
            self.attempt_log = []
        self.attempt_log.append((upstream.label, began - self.began, now - began, outcome))

    def attempts(self, now: float) -> list[RecordedAttempt]:
        """All attempts so far, in the order in which they ended."""
        found = [] if self.attempt_log is None else list(self.attempt_log)
        if self.attempt_log is None and self.answered_by is not None:
            found.append((self.answered_by.label, self.last_began - self.began, now - self.last_began, "answered"))
        if self.first is not None:
            found.append((self.first.label, self.first_at - self.began, now - self.first_at, "under way"))
        if self.second is not None:
            found.append((self.second.label, self.second_at - self.began, now - self.second_at, "under way"))
        return found

    def note_failure(self, upstream: Upstream, reason: str) -> None:
        """For the trace of the call, if there is one: an attempt that is about to end has failed."""
        if self.directives is not None and self.directives.trace is not None:
            self.directives.trace.failed(self.id, upstream.label, reason)

    def is_carried_by(self, upstream: Upstream) -> bool:
        return upstream is self.first or upstream is self.second

    def began_at(self, upstream: Upstream) -> float:
        """When the attempt under way with this upstream began."""
        return self.first_at if upstream is self.first else self.second_at

    def is_under_way(self) -> bool:
        return self.first is not None or self.second is not None

    def under_way(self) -> list[Upstream]:
        return [upstream for upstream in (self.first, self.second) if upstream is not None]

    def newest(self, now: float) -> tuple[Upstream | None, float]:
        """The upstream of the newest attempt, and the attempt's age."""
        first, second = self.first, self.second
        if first is None or (second is not None and self.second_at > self.first_at):
            return second, now - self.second_at
        return first, now - self.first_at

    def leave_older(self, now: float) -> None:
        """Make room for another attempt: of two, the older one is given up."""
        if self.first is not None and self.second is not None:
            oldest = self.first if self.first_at < self.second_at else self.second
            began = self.ended(oldest)
            oldest.leave(self)
            self.note(oldest, began, now, "given up: too slow")
            oldest.count_late(began, now)

    def leave_others(self, upstream: Upstream) -> None:
        """Give up the attempts on other upstreams."""
        for other in self.under_way():
            if other is not upstream:
                self.ended(other)
                other.leave(self)

    def leave_attempts(self, now: float) -> None:
        """Give up the remaining attempts. Those that began before the answered one count as late."""
        answered_began = self.last_began
        if self.answered_by is not None and self.attempt_log is None:
            self.note(self.answered_by, answered_began, now, "answered")
        for upstream in self.under_way():
            began = self.ended(upstream)
            upstream.leave(self)
            if self.answered_by is not None:
                self.note(upstream, began, now, "given up: another upstream was faster")
            if began < answered_began:
                upstream.count_late(began, now)

    def suspect(self, upstream: Upstream) -> None:
        """The upstream reports that it is unhealthy. Since a client can send calls that make every upstream do so, this
        counts against the upstream only once another one has replied."""
        upstream.health.server_error()
        self.suspects += (upstream.health,)

    def blame_suspects(self, now: float) -> None:
        """Another upstream replied, so the call itself was not the cause."""
        for health in self.suspects:
            health.count_failure(now, by_call=True)
        self.suspects = ()

    def note_error(self, error: bytes, weight: int) -> None:
        """Keep the most useful of the errors: see `ErrorMeaning.weight`."""
        if weight > self.fallback_weight:
            self.fallback_error, self.fallback_weight = error, weight

    # Waiters. An exception of one must reach neither the others nor the connection, which carries calls of other clients.

    def deliver(self, result: bytes | msgspec.Raw) -> None:
        for waiter in self.waiters:
            try:
                waiter.on_result(result)
            except Exception:
                self._log_exception()

    def deliver_error(self, error: bytes) -> None:
        for waiter in self.waiters:
            try:
                waiter.on_error(error)
            except Exception:
                self._log_exception()

    def deliver_fault(self, fault: Fault) -> None:
        for waiter in self.waiters:
            try:
                waiter.on_fault(fault)
            except Exception:
                self._log_exception()

    def _log_exception(self) -> None:
        log.exception("a reply was not delivered", extra={"method": self.policy.method.name})

    def repeat(self, other: Flight, client: str) -> None:
        """Make the same call as the other flight, for one of its clients."""
        self.client = client
        self.least_head, self.archive, self.reports_head = other.least_head, other.archive, other.reports_head

    def pass_on(self) -> None:
        """The call now belongs to the next account that joined it."""
        self.client, self.joined_by = self.joined_by[0], self.joined_by[1:]
        self.tried = 0

    def join(self, caller: Caller, client: str) -> None:
        """Another caller makes the same call."""
        self.waiters.append(caller)
        if self.joined is None:
            self.joined = []
        self.joined.append((caller, client))
        if client != self.client and client not in self.joined_by:
            self.joined_by += (client,)

    def take_joined(self) -> list[tuple[Caller, str]]:
        """The callers that joined and have not left. They no longer wait for this flight."""
        present = {id(waiter) for waiter in self.waiters}
        found = [(caller, client) for caller, client in self.joined or () if id(caller) in present]
        self.waiters = self.waiters[:1]
        self.joined, self.joined_by = None, ()
        return found

    def leave(self, waiter: Waiter) -> None:
        """The waiter no longer wants the result. A read without waiters is cancelled; a write is completed."""
        if self.done or waiter not in self.waiters:
            return
        self.waiters[self.waiters.index(waiter)] = ABSENT_WAITER
        is_unwanted = self.policy.may_repeat and all(each is ABSENT_WAITER for each in self.waiters)
        if self.streaming or is_unwanted:
            self.handler.on_abandoned(self)

    # A sink of its connections

    def on_reply(self, connection: UpstreamConnection, head: ReplyHead, body: bytes) -> None:
        self.handler.on_reply(self, connection, head, body)

    def on_fail(self, upstream: Upstream, reason: str, *, sent: bool) -> None:
        self.handler.on_fail(self, upstream, reason, sent=sent, blame=True)

    def on_large(self, connection: UpstreamConnection, head: ReplyHead, beginning: Piece) -> bool:
        return self.handler.on_large(self, connection, head, beginning)

    def on_piece(self, connection: UpstreamConnection, piece: Piece) -> None:
        self.waiters[0].on_stream_piece(piece)

    def on_end(self, connection: UpstreamConnection) -> None:
        self.handler.on_end(self, connection)

    def on_tick(self, connection: UpstreamConnection | None, now: float) -> None:
        self.handler.on_tick(self, connection, now)


class Caller(Waiter, Protocol):
    """A waiter that stores what its reply needs."""

    policy: MethodPolicy | None
    flight: Flight | None
    units: int
    cache: str
    block: int


def result_at(policy: MethodPolicy, id_: bytes, head: ReplyHead, beginning: Piece) -> int:
    """The offset of the result in a large reply to our call; 0 if it must not be streamed. A result that names a block is
    read first."""
    start = result_start(id_)
    is_good = head.status == 200 and head.plain and not policy.reports_block and beginning[: len(start)] == start
    return len(start) if is_good else 0
