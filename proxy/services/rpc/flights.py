"""A call on its way to an upstream: what it is, and what happens to it.

A `Call` is immutable. A `Flight` is the state of one call under way. It is sent to one upstream, perhaps to a second one when
the first is late (a hedge) or fails (a retry). One client waits for it, or all that made the same call at the same time. Its
handler, the `Dispatcher`, decides; the state changes only through the methods of the flight, which are named after events.

The rules:

* A flight is *open* until its outcome is known. Attempts begin and end meanwhile, two at a time at most.
* Other code may take over an open flight to look for the result itself (`Takeovers`). The flight is then *handed over*:
  failures of attempts that are left no longer end it, a good reply still does.
* A large result is *streaming* to its only waiter. No other attempt is left, and no caller can join.
* A flight that is *done* has ended once: with a result, an error from the upstream, a fault of ours, or because all waiters
  left. No attempt is left, and nothing happens to it any more.

`TRANSITIONS` has these rules as a table. An event that a state does not list is a bug, and raises an error.
"""

from __future__ import annotations

import itertools
import logging
from typing import Final, Literal, Protocol, TypeAlias, final

import msgspec

from proxy.core.access import Key
from proxy.core.credits import Spender
from proxy.core.directives import Directives
from proxy.core.jsonrpc import result_start
from proxy.core.request_records import RecordedAttempt
from proxy.core.upstream_health import UpstreamHealth
from proxy.errors import Fault
from proxy.services.accounts.metering import Meter
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.waiters import ABSENT_WAITER, Waiter
from proxy.wire.http1 import ReplyHeaders
from proxy.wire.upstream import Piece, Upstream, UpstreamConnection

log = logging.getLogger("penstock.flights")

# Attempts for one read, including the first.
MAX_TRIES = 3
# A key, or the meter of a request.
Payer: TypeAlias = Key | Meter
FlightState = Literal["open", "handed_over", "streaming", "done"]
FlightEvent = Literal["hand_over", "stream", "end"]
TRANSITIONS: Final[dict[FlightState, dict[FlightEvent, FlightState]]] = {
    # A second attempt may have the same unusual result as the one that was handed over.
    "open": {"hand_over": "handed_over", "stream": "streaming", "end": "done"},
    "handed_over": {"hand_over": "handed_over", "end": "done"},
    "streaming": {"end": "done"},
    "done": {},
}
# Above the ids of the short path (wire/http_upstream), so that the two never collide.
next_id = itertools.count(1000).__next__


@final
class Call:
    """The description of a call. It is made once and never changes: `mypy` refuses assignments to `Final` attributes."""

    __slots__ = (
        "archive",
        "cache_key",
        "client",
        "directives",
        "excluded",
        "holder",
        "is_piece",
        "least_head",
        "oldest",
        "params",
        "payer",
        "policy",
        "reports_head",
    )

    def __init__(
        self,
        policy: MethodPolicy,
        params: bytes,
        *,
        client: str = "",
        payer: Payer | None = None,
        directives: Directives | None = None,
        cache_key: bytes | None = None,
        least_head: int = 0,
        reports_head: bool = False,
        archive: bool = False,
        oldest: int = -1,
        is_piece: bool = False,
        excluded: int = 0,
        holder: Upstream | None = None,
    ) -> None:
        self.policy: Final = policy
        self.params: Final = params
        # The account that makes the call; empty for our own calls.
        self.client: Final = client
        # The key or the request's meter that pays for the call; None for our own calls.
        self.payer: Final = payer
        # The caller's directives about attempts.
        self.directives: Final = directives
        # The cache key of the result, if the result may be cached or shared.
        self.cache_key: Final = cache_key
        # The head that an upstream must have reached to receive the call.
        self.least_head: Final = least_head
        # Whether the result contains the head of the chain.
        self.reports_head: Final = reports_head
        # Whether it reads old data, which may cost more; and the oldest block, unless all upstreams have it.
        self.archive: Final = archive
        self.oldest: Final = oldest
        # Whether this is a part of a larger call, and so is not split again.
        self.is_piece: Final = is_piece
        # Upstreams that must not receive the call, as a bit set of their indexes.
        self.excluded: Final = excluded
        # The upstream to ask first: it has received the write that the call is about.
        self.holder: Final = holder

    def __repr__(self) -> str:
        return f"<Call {self.policy.method.name} of {self.client or 'our own'}>"

    def alone(self, client: str, payer: Payer | None) -> Call:
        """The same call for one of the clients that shared it. Its result is neither cached nor shared."""
        return Call(
            self.policy,
            self.params,
            client=client,
            payer=payer,
            least_head=self.least_head,
            reports_head=self.reports_head,
            archive=self.archive,
            oldest=self.oldest,
        )


def all_but(upstream: Upstream) -> int:
    """A bit set of all upstreams except this one, for calls that no other upstream may receive."""
    return ~(1 << upstream.health.index)


class FlightHandler:
    """Decides what happens to flights. The dispatcher implements it."""

    __slots__ = ()

    def on_reply(self, flight: Flight, connection: UpstreamConnection, headers: ReplyHeaders, body: bytes) -> None:
        raise NotImplementedError

    def on_fail(self, flight: Flight, upstream: Upstream, reason: str, *, sent: bool, blame: bool) -> None:
        raise NotImplementedError

    def on_large(self, flight: Flight, connection: UpstreamConnection, headers: ReplyHeaders, beginning: Piece) -> bool:
        raise NotImplementedError

    def on_end(self, flight: Flight, connection: UpstreamConnection) -> None:
        raise NotImplementedError

    def on_tick(self, flight: Flight, connection: UpstreamConnection | None, now: float) -> None:
        raise NotImplementedError

    def on_late(self, flight: Flight, upstream: Upstream, headers: ReplyHeaders, body: bytes) -> None:
        raise NotImplementedError

    def on_abandoned(self, flight: Flight) -> None:
        raise NotImplementedError


class Flight:
    # Other accounts that wait for the same result.
    joined_by: tuple[str, ...] = ()
    # The callers that joined the first one, each with its account and who pays.
    joined: list[tuple[Caller, str, Payer | None]] | None = None
    state: FlightState = "open"
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
    # The number of attempts, and of those that do not count. See `not_read`.
    tries = 0
    free_tries = 0
    # The cost of its attempts, and of the calls that it was split into, in billionths of a dollar.
    cost = 0

    def __init__(
        self, handler: FlightHandler, call: Call, waiter: Waiter, now: float, *, moves: int = 0, tip: int = 0
    ) -> None:
        self.handler = handler
        self.call = call
        self.policy = call.policy
        self.params = call.params
        # The account that the call belongs to now. See `pass_on`.
        self.client = call.client
        self.waiters = [waiter]
        self.id = b"%d" % next_id()
        # How often the head had moved when the call was made: a result from before a move is out of date.
        self.moves = moves
        # A block that the state behind the result has certainly reached; 0 if it is unknown.
        self.block = tip
        # The upstreams that were tried or are excluded, as a bit set of their indexes.
        self.tried = call.excluded
        self.began = now

    def __repr__(self) -> str:
        return f"<Flight {self.policy.method.name} {self.state}, {self.tries} sent, {len(self.waiters)} waiting>"

    def _on(self, event: FlightEvent) -> None:
        self.state = TRANSITIONS[self.state][event]

    @property
    def done(self) -> bool:
        return self.state == "done"

    @property
    def streaming(self) -> bool:
        return self.state == "streaming"

    @property
    def handed_over(self) -> bool:
        return self.state == "handed_over"

    @property
    def most_tries(self) -> int:
        return self.free_tries + (MAX_TRIES if self.call.directives is None else 1 + self.call.directives.retry)

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
        if health.head < self.block or health.ahead:
            self.block = 0 if health.ahead else health.head
        health.begin(now)
        if health.method_limits:
            health.begin_method(self.policy.method.name, now)
        if health.meter is not None:
            self.add_cost(health.meter.began(self._spender(), archive=self.call.archive))
        directives = self.call.directives
        if directives is None:
            return b""
        # Only an upstream that has reached the block was chosen, even if it has not reported that.
        self.block = max(self.block, directives.min_block)
        return (
            b""
            if directives.trace is None
            else directives.trace.began(self.id, upstream.label, self.policy.method.name)
        )

    def was_sent(self, upstream: Upstream, id_: bytes, block: int) -> None:
        """The call was sent under this id, when the state had reached this block, before there was a flight for it."""
        self.id = id_
        self.block = block
        self.first, self.first_at = upstream, self.began
        self.tried = 1 << upstream.health.index
        self.tries = 1

    def ended(self, upstream: Upstream) -> float:
        """An attempt is over. Returns when it began."""
        upstream.health.ended()
        if self.call.directives is not None and self.call.directives.trace is not None:
            self.call.directives.trace.ended(self.id, upstream.label)
        if upstream is self.first:
            self.first = None
            self.last_began = self.first_at
        else:
            self.second = None
            self.last_began = self.second_at
        return self.last_began

    # Cost

    def _spender(self) -> Spender:
        """Return who pays for its attempts."""
        payer = self.call.payer
        key = payer.key if isinstance(payer, Meter) else payer
        is_own = key is not None and key.account.id == self.client
        return self.policy.method.name, self.client, key.id if key is not None and is_own else ""

    def add_cost(self, nanos: int) -> None:
        """Count what an attempt costs, or what it turned out to cost less."""
        self.cost += nanos
        if isinstance(self.call.payer, Meter):
            self.call.payer.add_cost(nanos)

    def not_billed(self, upstream: Upstream) -> None:
        """An attempt was never sent, so its provider does not bill it."""
        meter = upstream.health.meter
        if meter is not None:
            self.add_cost(meter.not_sent(self._spender(), archive=self.call.archive))

    def billed_as(self, upstream: Upstream, outcome: str) -> None:
        """An attempt failed in this way, and its provider may bill less for that."""
        meter = upstream.health.meter
        if meter is not None:
            self.add_cost(meter.failed(self._spender(), outcome, archive=self.call.archive))

    def not_read(self) -> None:
        """The upstream had closed the connection between calls, so it did not read this one. The first such attempt is free."""
        self.free_tries = 1

    def leave_upstream(self, upstream: Upstream) -> None:
        """Give up an attempt. A call that still waits to be sent is not sent any more."""
        if upstream.leave(self):
            self.not_billed(upstream)

    def reply_arrived(self, upstream: Upstream) -> None:
        self.answered_by = upstream

    def also_tried(self, upstream: Upstream) -> None:
        """Other code has made the same call to this upstream."""
        self.tried |= 1 << upstream.health.index

    def start_over(self) -> None:
        """Any upstream may be tried again."""
        self.tried = self.call.excluded
        self.tries = 0

    def read_at(self, block: int) -> None:
        """The result is of the state at this block or a later one."""
        self.block = block

    def note(self, upstream: Upstream, began: float, now: float, outcome: str) -> None:
        """Record how an attempt ended, for `attempts`."""
        if self.attempt_log is None:
            self.attempt_log = []
        self.attempt_log.append((upstream.label, began - self.began, now - began, outcome))

    def attempts(self, now: float) -> list[RecordedAttempt]:
        """All attempts so far, in the order in which they ended."""
        attempts = [] if self.attempt_log is None else list(self.attempt_log)
        if self.attempt_log is None and self.answered_by is not None:
            attempts.append((self.answered_by.label, self.last_began - self.began, now - self.last_began, "answered"))
        if self.first is not None:
            attempts.append((self.first.label, self.first_at - self.began, now - self.first_at, "under way"))
        if self.second is not None:
            attempts.append((self.second.label, self.second_at - self.began, now - self.second_at, "under way"))
        return attempts

    def last_sent(self, upstream: Upstream) -> float:
        """When the last attempt with this upstream that has ended began; 0 if there was none."""
        began_at = 0.0
        for label, after_s, _, _ in self.attempt_log or ():
            if label == upstream.label:
                began_at = max(began_at, self.began + after_s)
        return began_at

    def note_failure(self, upstream: Upstream, reason: str) -> None:
        """For the trace of the call, if there is one: an attempt that is about to end has failed."""
        if self.call.directives is not None and self.call.directives.trace is not None:
            self.call.directives.trace.failed(self.id, upstream.label, reason)

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
            self.leave_upstream(oldest)
            self.note(oldest, began, now, "given up: too slow")
            oldest.count_late(began, now)

    def leave_others(self, upstream: Upstream) -> None:
        """Give up the attempts on other upstreams."""
        for other in self.under_way():
            if other is not upstream:
                self.ended(other)
                self.leave_upstream(other)

    def leave_attempts(self, now: float) -> None:
        """Give up the remaining attempts. Those that began before the answered one count as late."""
        answered_began = self.last_began
        if self.answered_by is not None and self.attempt_log is None:
            self.note(self.answered_by, answered_began, now, "answered")
        for upstream in self.under_way():
            began = self.ended(upstream)
            self.leave_upstream(upstream)
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

    def keep_fallback(self, result: bytes) -> None:
        """Keep a doubtful result, in case no upstream gives a better one."""
        self.fallback_result = result

    def note_error(self, error: bytes, weight: int) -> None:
        """Keep the most useful of the errors: see `ErrorMeaning.weight`."""
        if weight > self.fallback_weight:
            self.fallback_error, self.fallback_weight = error, weight

    # The outcome

    def hand_over(self) -> None:
        """Other code looks for the result."""
        self._on("hand_over")

    def end(self) -> None:
        """The outcome is known, or no waiter is left. Attempts that are left must be given up next."""
        self._on("end")

    def begin_stream(self, connection: UpstreamConnection, beginning: memoryview, left: int | None) -> None:
        """Pass on the beginning of a large result. `left`: its length, if it is known."""
        self._on("stream")
        self.answered_by = connection.upstream
        self.leave_others(connection.upstream)
        self.waiters[0].on_stream(beginning, left, connection)

    def end_stream(self) -> None:
        self._on("end")
        self.waiters[0].on_stream_end()

    def break_stream(self) -> None:
        """The upstream failed in the middle of the result."""
        self._on("end")
        self.waiters[0].on_stream_broken()

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

    def charge(self, key: Key, units: int, fault: Fault | None) -> None:
        """Count the price of further upstream calls, which the key has paid. It is added to the `fault` that is about to be
        delivered, to the price of the first caller, or to the usage of the key if all callers have left."""
        if not units:
            return
        if fault is not None and not self.done:
            fault.keep(units)
            return
        for waiter in self.waiters:
            if waiter.on_charged(units):
                return
        key.tallies[self.policy.tally].add_units(units)

    def on_waited(self, waited_s: float) -> None:
        """Further upstream calls have waited this long for the account's units."""
        for waiter in self.waiters:
            waiter.on_waited(waited_s)

    def _log_exception(self) -> None:
        log.exception("a reply was not delivered", extra={"method": self.policy.method.name})

    def pass_on(self) -> None:
        """The call now belongs to the next account that joined it."""
        self.client, self.joined_by = self.joined_by[0], self.joined_by[1:]
        self.tried = self.call.excluded

    def join(self, caller: Caller, client: str, payer: Payer | None) -> None:
        """Another caller makes the same call."""
        self.waiters.append(caller)
        if self.joined is None:
            self.joined = []
        self.joined.append((caller, client, payer))
        if client != self.client and client not in self.joined_by:
            self.joined_by += (client,)

    def take_joined(self) -> list[tuple[Caller, Call]]:
        """The callers that joined and have not left, each with the call for it alone. They no longer wait for this flight."""
        present = {id(waiter) for waiter in self.waiters}
        joined = [
            (caller, self.call.alone(client, payer))
            for caller, client, payer in self.joined or ()
            if id(caller) in present
        ]
        self.waiters = self.waiters[:1]
        self.joined, self.joined_by = None, ()
        return joined

    def leave(self, waiter: Waiter) -> None:
        """The waiter no longer wants the result. A read without waiters is cancelled; a write is completed."""
        if self.done or waiter not in self.waiters:
            return
        self.waiters[self.waiters.index(waiter)] = ABSENT_WAITER
        is_unwanted = self.policy.may_repeat and all(each is ABSENT_WAITER for each in self.waiters)
        if self.streaming or is_unwanted:
            self.handler.on_abandoned(self)

    # A sink of its connections

    def on_reply(self, connection: UpstreamConnection, headers: ReplyHeaders, body: bytes) -> None:
        self.handler.on_reply(self, connection, headers, body)

    def on_fail(self, upstream: Upstream, reason: str, *, sent: bool) -> None:
        self.handler.on_fail(self, upstream, reason, sent=sent, blame=True)

    def on_large(self, connection: UpstreamConnection, headers: ReplyHeaders, beginning: Piece) -> bool:
        return self.handler.on_large(self, connection, headers, beginning)

    def on_piece(self, connection: UpstreamConnection, piece: Piece) -> None:
        self.waiters[0].on_stream_piece(piece)

    def on_end(self, connection: UpstreamConnection) -> None:
        self.handler.on_end(self, connection)

    def on_tick(self, connection: UpstreamConnection | None, now: float) -> None:
        self.handler.on_tick(self, connection, now)

    def on_late(self, upstream: Upstream, headers: ReplyHeaders, body: bytes) -> None:
        self.handler.on_late(self, upstream, headers, body)


class Caller(Waiter, Protocol):
    """A waiter that keeps what its reply needs. These events report it, in this order, as far as the call gets."""

    @property
    def policy(self) -> MethodPolicy | None: ...
    @property
    def flight(self) -> Flight | None: ...
    @property
    def units(self) -> int: ...
    @property
    def cache(self) -> str: ...
    @property
    def block(self) -> int: ...
    @property
    def waited_s(self) -> float: ...

    def on_checked(self, policy: MethodPolicy) -> None:
        """The policy of its method is known."""

    def on_admitted(self, units: int) -> None:
        """The call was charged this price."""

    def on_source(self, cache: str, block: int) -> None:
        """It is known how the result is found: `cache` is the value of the header. The state behind the result has reached
        this block, unless there is a flight, which has its own; 0 if it is unknown."""

    def on_flight(self, flight: Flight) -> None:
        """The call waits for this flight, from now on or instead of an earlier one."""


def cost_of(flight: Flight | None, cache: str) -> int:
    """The cost of a call at upstreams' providers, in billionths of a dollar. One that joined another call cost nothing."""
    return 0 if flight is None or cache == "join" else flight.cost


def result_at(policy: MethodPolicy, id_: bytes, headers: ReplyHeaders, beginning: Piece) -> int:
    """The offset of the result in a large reply to our call; 0 if it must not be streamed. A result that names a block is
    read first."""
    start = result_start(id_)
    is_good = headers.status == 200 and headers.plain and not policy.reports_block and beginning[: len(start)] == start
    return len(start) if is_good else 0
