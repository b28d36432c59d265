"""A call on its way to an upstream, and what becomes of it.

A `Flight` is one question to a network. It is sent to one upstream, perhaps to a second when the first is late (a hedge) or
fails (a retry), and lands once: with a result, an error of the upstream's, or a fault of ours. Whoever waits for it is told,
be it one client or all that asked the same at the same time.

The rules: a read may be asked again elsewhere, within the budget; a write only if it certainly never left us. An answer
that is empty, from an upstream behind the network's head, is asked elsewhere before it is believed; it is kept as the
*spare*, in case nobody has a better one. What cannot be read as the reply to our call is never passed on. Nothing here
waits: callbacks change state and send what has to be sent.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

import msgspec

from proxy.core import dialect, jsonrpc
from proxy.core.routing import HEDGE_FLOOR_S
from proxy.errors import Fault, InternalError, Unavailable, UpstreamTimeout
from proxy.services.rpc.attempts import FlightAttempts
from proxy.services.rpc.waiters import ABSENT_WAITER, Waiter
from proxy.wire.http1 import ReplyHead
from proxy.wire.upstream import OUT_OF_STEP, STALE, TOO_LARGE, Piece, Upstream, UpstreamConnection

if TYPE_CHECKING:
    from proxy.services.rpc.method_policy import MethodPolicy
    from proxy.services.rpc.networks import Route

# Upstreams asked for one read, counting the first.
MOST_TRIES = 3
# Beyond those of the short way (wire/upstream), so that the two never meet.
next_id = itertools.count(1000).__next__
_monotonic = time.monotonic


def result_at(policy: MethodPolicy, id_: bytes, head: ReplyHead, beginning: Piece) -> int:
    """Where the result begins in a large reply to our call; 0 where it may not be passed on as it comes. What tells of a block
    is read first."""
    start = jsonrpc.result_start(id_)
    is_good = head.status == 200 and head.plain and not policy.tells_block and beginning[: len(start)] == start
    return len(start) if is_good else 0


class Flight(FlightAttempts):
    __slots__ = (
        "_spare", "_spare_error", "_streaming", "_tries", "answered_by", "archive", "began", "done", "id", "is_handed_on",
        "is_piece", "least_head", "moves", "params", "policy", "route", "slot", "tells_head", "tried", "waiters",
    )  # fmt: skip

    def __init__(self, route: Route, policy: MethodPolicy, params: bytes, waiter: Waiter, now: float) -> None:
        self.route = route
        self.policy = policy
        self.params = params
        self.waiters = [waiter]
        self.id = b"%d" % next_id()
        self.slot: bytes | None = None
        # How often the head had moved when the question was asked: an answer from before a move is old.
        self.moves = route.replies.moves
        self.least_head = 0
        self.tells_head = False
        # A piece of a larger question: it is not cut again on its way.
        self.is_piece = False
        # Somebody else looks for the answer: what fails from then on is no outcome.
        self.is_handed_on = False
        self.archive = False
        self.done = False
        # The place of the upstream whose reply came last.
        self.answered_by = -1
        self.began = now
        self._first = self._second = None
        self._first_at = self._second_at = self._asked_at = 0.0
        self._accused = ()
        self._streaming = False
        # An answer that will do if nobody gives a better one.
        self._spare: bytes | None = None
        self._spare_error = b""
        # The upstreams that were asked, as a bit set of their places.
        self.tried = 0
        self._tries = 0

    def __repr__(self) -> str:
        state = "done" if self.done else "streaming" if self._streaming else f"{self._tries} sent"
        return f"<Flight {self.policy.method.name} {state}, {len(self.waiters)} waiting>"

    @property
    def answered_label(self) -> str:
        """The name of the upstream whose reply came last; empty while none has."""
        return self.route.upstreams[self.answered_by].label if self.answered_by >= 0 else ""

    # Sending

    def start(self, now: float) -> None:
        """Send it to the best upstream there is."""
        upstream = self.route.choose(self, now, self.tried)
        if upstream is None:
            self.land_fault(Unavailable(f"no upstream of {self.route.network.id} takes calls at the moment"))
            return
        self.send(upstream, now)

    def send(self, upstream: Upstream, now: float, *, fresh: bool = False) -> None:
        if self._first is None:
            self._first, self._first_at = upstream, now
        else:
            self._second, self._second_at = upstream, now
        health = upstream.health
        self.tried |= 1 << health.index
        self._tries += 1
        health.begin(now)
        policy = self.policy
        body = (jsonrpc.HEAD, self.id, policy.request_tail, self.params, b"}")
        upstream.submit(self, *body, once=not policy.may_repeat, fresh=fresh)

    @classmethod
    def taking_over(
        cls,
        route: Route,
        policy: MethodPolicy,
        params: bytes,
        waiter: Waiter,
        upstream: Upstream,
        *,
        id_: bytes,
        began: float,
    ) -> Flight:
        """A call that somebody sent on the short way and that did not go as usual."""
        flight = cls(route, policy, params, waiter, began)
        flight.id = id_
        flight._first, flight._first_at = upstream, began
        flight.tried = 1 << upstream.health.index
        flight._tries = 1
        return flight

    def on_tick(self, connection: UpstreamConnection | None, now: float) -> None:
        """Called by the sweep: the deadline, and the hedge."""
        if self.done or self.is_handed_on:
            return
        if self._streaming:
            if connection is not None and connection.is_stuck(now, self.route.call_timeout_s):
                connection.fail("the reply stopped")
        elif now - self.began > self.route.call_timeout_s:
            for upstream in self._under_way():
                upstream.health.overdue(self.began, now)
            self._fail(UpstreamTimeout(self._words(f"no upstream answered within {self.route.call_timeout_s:g} s")))
        elif self._is_late(now):
            self._hedge(now)

    def _is_late(self, now: float) -> bool:
        """Whether the upstream that was asked last takes longer than it mostly does."""
        newest, age = self._newest(now)
        if newest is None or age < HEDGE_FLOOR_S or not self.policy.may_repeat:
            return False
        return age > self.route.group.hedge_after_s(newest.health)

    def _hedge(self, now: float) -> None:
        """Ask one more. Two are waited for at the most: where both are late, the one that was asked first is given up."""
        upstream = self._another(now)
        if upstream is None:
            return
        if self._first is not None and self._second is not None:
            oldest = self._first if self._first_at < self._second_at else self._second
            began = self._ended(oldest)
            oldest.leave(self)
            oldest.health.late(now - began, now)
        self.send(upstream, now)

    # Being carried by a convoy, which sends and receives for us

    def carried_by(self, upstream: Upstream, now: float) -> None:
        self._first, self._first_at = upstream, now
        self.tried |= 1 << upstream.health.index
        self._tries += 1
        upstream.health.begin(now)

    def arrived(self, upstream: Upstream) -> None:
        self._ended(upstream)

    def was_limited(self, upstream: Upstream, now: float, retry_after_s: int) -> None:
        self._ended(upstream)
        self._limited(upstream, now, retry_after_s)

    def _another(self, now: float) -> Upstream | None:
        """One more upstream to ask, if one is left and the budget allows."""
        if not self.policy.may_repeat or self._tries >= MOST_TRIES:
            return None
        upstream = self.route.choose(self, now, self.tried)
        return upstream if upstream is not None and self.route.budget.spend() else None

    def _send_another(self, now: float) -> bool:
        upstream = self._another(now)
        if upstream is not None:
            self.send(upstream, now)
        return upstream is not None

    # What the connection tells

    def on_reply(self, connection: UpstreamConnection, head: ReplyHead, body: bytes) -> None:
        upstream = connection.upstream
        now = _monotonic()
        began = self._ended(upstream)
        if head.wants_rest:
            self._limited(upstream, now, head.retry_after_s)
            return
        try:
            if not head.plain:
                raise ValueError("compressed")
            reply = jsonrpc.read_reply(body, self.id)
        except ValueError:
            if head.status < 400:
                connection.fail(OUT_OF_STEP)
                upstream.health.failed(now)
            else:  # Whatever stands before the upstream speaks HTTP: the next reply is the next call's.
                self.accuse(upstream)
            self._after_failure(now, "an upstream sent no valid reply", sent=True)
            return
        self.receive(reply, upstream, now, now - began)

    def receive(self, reply: jsonrpc.UpstreamReply, upstream: Upstream, now: float, took_s: float) -> None:
        """A reply to our call, read and found valid."""
        self.answered_by = upstream.health.index
        if not reply.result:
            self._on_error(bytes(reply.error), upstream, now, took_s)
            return
        upstream.health.succeeded(took_s)
        if self._accused:
            self._blame(now)
        if self.policy.method.empty and self._is_doubtful(reply.result, upstream, now):
            return
        if self.tells_head and not self._agrees_with_head(reply, upstream, now):
            return
        if self.policy.asks_on and self.route.is_null(reply.result) and self.route.ask_on(self):
            self.is_handed_on = True
            return
        self.land(reply.result)

    def on_fail(self, upstream: Upstream, reason: str, *, sent: bool, blame: bool = True) -> None:
        """`blame`: whether this is the upstream's failure, and not a part of one that was counted."""
        # Where too many wait, the refusal comes a turn later: the attempt may have been given up meanwhile.
        if not self.is_carried_by(upstream):
            return
        now = _monotonic()
        self._ended(upstream)
        if reason == STALE and self.policy.may_repeat and not self._is_under_way() and self._tries < MOST_TRIES:
            self.send(upstream, now, fresh=True)
            return
        if blame and reason == TOO_LARGE:
            self.accuse(upstream)
        elif blame:
            upstream.health.failed(now)
        if self._streaming:
            self._streaming = False
            self.done = True
            self.route.landed(self)
            self.waiters[0].on_stream_broken()
            return
        self._after_failure(now, f"an upstream failed: {reason}", sent=sent)

    def on_large(self, connection: UpstreamConnection, head: ReplyHead, beginning: Piece) -> bool:
        """Pass a large result on as it comes, if one waits who can take it and the beginning is a reply to our call."""
        if len(self.waiters) != 1 or not self.waiters[0].streams or self.tells_head or self.is_handed_on:
            return False
        start = result_at(self.policy, self.id, head, beginning)
        if not start:
            return False
        self._streaming = True
        self.answered_by = connection.upstream.health.index
        self.route.landed(self)  # Nobody joins a reply that has begun.
        for other in self._under_way():
            if other is not connection.upstream:
                self._ended(other)
                other.leave(self)
        left = head.length - start if head.length >= 0 else None
        self.waiters[0].on_stream(memoryview(beginning)[start:], left, connection)
        return True

    def on_piece(self, connection: UpstreamConnection, piece: Piece) -> None:
        self.waiters[0].on_stream_piece(piece)

    def on_end(self, connection: UpstreamConnection) -> None:
        began = self._ended(connection.upstream)
        now = _monotonic()
        connection.upstream.health.succeeded(now - began)
        self._blame(now)
        self._streaming = False
        self.done = True
        self.route.landed(self)
        self.waiters[0].on_stream_end()

    # Deciding

    def _limited(self, upstream: Upstream, now: float, retry_after_s: int) -> None:
        """The upstream wants to be left alone. That is not a failure of its."""
        upstream.health.rest(now, retry_after_s or 1.0)
        self._after_failure(now, "an upstream is rate limited", sent=True)

    def _on_error(self, error: bytes, upstream: Upstream, now: float, took_s: float) -> None:
        verdict = dialect.classify(error, self.policy.family.verdicts)
        if verdict.kind == "rate_limited":
            upstream.health.rest(now, 1.0)
        elif verdict.blame:
            self.accuse(upstream)
        else:
            upstream.health.succeeded(took_s)
            self._blame(now)
        if verdict.kind == "already_known" and (known := self.policy.already_known(self.params)):
            self.land(known)
            return
        if self.is_handed_on:
            return
        told = dialect.told(error, verdict, in_our_codes=self.policy.normalises)
        if verdict.retry_elsewhere:
            if not verdict.blame:
                self._spare_error = told
            if self._is_under_way() or self._send_another(now):
                return
        elif verdict.kind == "range_too_large" and not self.is_piece and self.route.split(self, error):
            self.is_handed_on = True
            return
        if self._spare is not None:
            self.land(self._spare)
        else:
            self.land_error(told)

    def _is_doubtful(self, result: msgspec.Raw, upstream: Upstream, now: float) -> bool:
        """An empty answer from an upstream that may not have the block yet: somebody else is asked first."""
        spare = bytes(result)
        if not self.policy.family.is_empty(self.policy.method, spare):
            return False
        if upstream.health.head >= self.route.heads.tip:
            return False
        self._spare = spare
        return self._is_under_way() or self._send_another(now)

    def _agrees_with_head(self, reply: jsonrpc.UpstreamReply, upstream: Upstream, now: float) -> bool:
        """An answer that tells the head: what we have told before never goes back, and the future is not believed."""
        verdict = self.route.compare_head(bytes(reply.result), upstream.health, now)
        if verdict == "future":
            upstream.health.failed(now)
            self._after_failure(now, "an upstream claims a block that cannot be", sent=True)
            return False
        if verdict == "behind" and self.policy.is_head_number:
            reply.result = msgspec.Raw(self.route.head_number())
        elif verdict == "behind":
            if not self._is_under_way() and not self._send_another(now):
                self.land_fault(Unavailable(self._words("no upstream has the newest block at the moment")))
            return False
        return True

    def _after_failure(self, now: float, reason: str, *, sent: bool) -> None:
        if self._is_under_way() or self.is_handed_on:
            return
        if (self.policy.may_repeat or not sent) and self._tries < MOST_TRIES:
            upstream = self.route.choose(self, now, self.tried)
            if upstream is None and sent:
                # Nobody else is there: the same one again, on another connection. One that was idle may be closed by the
                # upstream in the very moment in which it is used.
                upstream = self.route.choose(self, now, 0)
            # What never left us costs no upstream anything: it needs no budget.
            if upstream is not None and (not sent or self.route.budget.spend()):
                self.send(upstream, now)
                return
        self._fail(InternalError(self._words(reason)))

    def _fail(self, fault: Fault) -> None:
        """Nobody is left to ask: what one upstream said is better than nothing."""
        if self._spare is not None:
            self.land(self._spare)
        elif self._spare_error:
            self.land_error(self._spare_error)
        else:
            self.land_fault(fault)

    def _words(self, reason: str) -> str:
        return f"the call failed on {self.route.network.id}: {reason}"

    # Landing

    def land(self, result: bytes | msgspec.Raw) -> None:
        self._close()
        self.route.keep(self, result)
        for waiter in self.waiters:
            waiter.on_result(result)

    def land_error(self, error: bytes) -> None:
        self._close()
        for waiter in self.waiters:
            waiter.on_error(error)

    def land_fault(self, fault: Fault) -> None:
        self._close()
        for waiter in self.waiters:
            waiter.on_fault(fault)

    def _close(self) -> None:
        """Nothing more is expected: whoever is still asked is left alone."""
        self.done = True
        self.route.landed(self)
        if self._first is not None or self._second is not None:
            self._drop_attempts()

    def _drop_attempts(self) -> None:
        """Whoever was asked before the one that answered, and has not answered yet, is late."""
        now, asked_at = _monotonic(), self._asked_at
        for upstream in self._under_way():
            began = self._ended(upstream)
            upstream.leave(self)
            if began < asked_at:
                upstream.health.late(now - began, now)

    def leave(self, waiter: Waiter) -> None:
        """The waiter is gone. A read that nobody waits for is given up; a write goes on to its end."""
        if self.done or waiter not in self.waiters:
            return
        self.waiters[self.waiters.index(waiter)] = ABSENT_WAITER
        is_unwanted = self.policy.may_repeat and all(each is ABSENT_WAITER for each in self.waiters)
        if self._streaming or is_unwanted:
            self._close()
