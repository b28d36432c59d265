"""Sending calls to a network's upstreams, and deciding what their replies mean.

The rules: a read may be repeated on another upstream, within the retry budget; a write only if it certainly was not executed:
it was not sent, the upstream does not have the method, or it limits our rate. An empty result from an upstream behind the
network's head is verified with another upstream first; it is kept as the *fallback* in case no upstream has a better one. Only
valid replies to our own calls are passed on. Nothing here waits: callbacks change the state of a flight and send what has to be
sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import assert_never

import msgspec

from proxy.core import jsonrpc, upstream_errors
from proxy.core.directives import Directives
from proxy.core.retry_budget import RetryBudget
from proxy.errors import DeadlinePassed, Fault, InternalError, Unavailable, UpstreamTimeout
from proxy.services.rpc.error_replies import count_invalid_reply, error_for_caller, judge_error
from proxy.services.rpc.flights import MAX_TRIES, Flight, FlightHandler
from proxy.services.rpc.hedging import is_late, upstream_that_is_back
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.network_state import NetworkState
from proxy.services.rpc.reply_share import NO_ROOM
from proxy.services.rpc.result_checks import is_doubtful, may_lack_blocks
from proxy.services.rpc.streamed_results import begin_stream, break_stream, end_stream, start_of_stream
from proxy.services.rpc.upstream_choice import choose_upstream, lacks_block, needs_block
from proxy.services.rpc.waiters import ABSENT_WAITER, Waiter
from proxy.wire.http1 import ReplyHead
from proxy.wire.upstream import CROWDED, NO_MEMORY, OUT_OF_STEP, STALE, TOO_LARGE, Piece, Upstream, UpstreamConnection

_monotonic = time.monotonic


class Dispatcher(FlightHandler):
    """Chooses upstreams for the flights of one network, sends them, and ends them."""

    __slots__ = ("budget", "call_timeout_s", "on_behind", "on_null", "on_partial", "on_split", "on_unleased", "state")

    def __init__(self, state: NetworkState, *, call_timeout_s: float) -> None:
        self.state = state
        self.call_timeout_s = call_timeout_s
        self.budget = RetryBudget()
        # Take over a flight whose range was refused, or whose result is null. They return False if they decline.
        self.on_split: Callable[[Flight, bytes], bool] | None = None
        self.on_null: Callable[[Flight], bool] | None = None
        # Lets a flight wait for an upstream that has its block.
        self.on_behind: Callable[[Flight], None] | None = None
        # Lets a flight wait for a token of an upstream's limit; False if it declines.
        self.on_unleased: Callable[[Flight], bool] | None = None
        # Takes over a flight whose result may lack the last blocks of its range.
        self.on_partial: Callable[[Flight, bytes, Upstream], None] | None = None

    def __repr__(self) -> str:
        return f"<Dispatcher {self.state!r}>"

    # Sending

    def new_flight(self, policy: MethodPolicy, params: bytes, waiter: Waiter, now: float) -> Flight:
        return Flight(self, policy, params, waiter, now, self.state.replies.moves, self.state.tip)

    def take_over(
        self,
        policy: MethodPolicy,
        params: bytes,
        waiter: Waiter,
        upstream: Upstream,
        *,
        id_: bytes,
        began: float,
        client: str,
        block: int,
    ) -> Flight:
        """A flight for a call that was sent on the short path and did not complete there."""
        flight = self.new_flight(policy, params, waiter, began)
        flight.client = client
        flight.block = block
        flight.was_sent(upstream, id_)
        return flight

    def direct(self, flight: Flight, directives: Directives) -> None:
        """Obey the directives of the call. A deadline of the caller's says nothing about the upstreams."""
        flight.directives = directives
        flight.most_tries = 1 + directives.retry
        if directives.timeout_ms:
            left_s = flight.began + directives.timeout_ms / 1000 - _monotonic()
            asyncio.get_running_loop().call_later(max(0.0, left_s), self._expire, flight)

    def _expire(self, flight: Flight) -> None:
        if not flight.done and not flight.streaming:
            assert flight.directives is not None
            for upstream in flight.under_way():
                flight.note(upstream, flight.began_at(upstream), _monotonic(), "no reply before the request's deadline")
            reason = f"no upstream replied within {flight.directives.timeout_ms} ms, the request's X-Timeout-Ms"
            self._give_up(flight, DeadlinePassed(self._message(reason)))

    def launch(self, flight: Flight, now: float) -> None:
        """Send the flight to the best upstream."""
        if self.state.only is None:
            self.budget.earn()
        upstream = self.choose(flight, now, flight.tried)
        if upstream is None and self.on_behind is not None and needs_block(flight):
            self.on_behind(flight)
            return
        if upstream is not None:
            self.send(flight, upstream, now)
        elif self.on_unleased is None or not self.on_unleased(flight):
            self.refuse(flight)

    def refuse(self, flight: Flight) -> None:
        self.complete_with_fault(flight, Unavailable(f"no upstream of {self.state.network_id} accepts calls at the moment"))

    def choose(self, flight: Flight, now: float, tried: int) -> Upstream | None:
        return choose_upstream(self.state, flight, now, tried)

    def send(self, flight: Flight, upstream: Upstream, now: float, *, fresh: bool = False) -> None:
        header = flight.begin(upstream, now)
        if flight.directives is not None:
            flight.block = max(flight.block, flight.directives.min_block)
        policy = flight.policy
        body = (jsonrpc.HEAD, flight.id, policy.request_tail, flight.params, b"}")
        upstream.submit(flight, *body, once=not policy.may_repeat, fresh=fresh, header=header)

    def _another(
        self, flight: Flight, now: float, *, was_refused: bool = False, has_block: bool = False
    ) -> Upstream | None:
        """Another upstream for the flight, if one is left, has room, and the budget allows it. `was_refused`: the last one
        certainly did not execute the call, so even a write may be sent again. `has_block`: only one that is not behind."""
        if not (flight.policy.may_repeat or was_refused) or flight.tries >= flight.most_tries:
            return None
        upstream = self.choose(flight, now, flight.tried)
        if upstream is None or upstream.is_crowded or (has_block and lacks_block(flight, upstream)):
            return None
        return upstream if self.budget.spend(now, flight.client) else None

    def _send_another(self, flight: Flight, now: float, *, was_refused: bool = False) -> bool:
        upstream = self._another(flight, now, was_refused=was_refused)
        if upstream is not None:
            self.send(flight, upstream, now)
        return upstream is not None

    # Deadlines and hedges

    def on_tick(self, flight: Flight, connection: UpstreamConnection | None, now: float) -> None:
        """Called by the sweep."""
        if flight.done or flight.handed_over:
            return
        if flight.streaming:
            if connection is not None and connection.is_stuck(now, self.call_timeout_s):
                connection.fail("the reply stopped")
        elif now - flight.began > self.call_timeout_s:
            for upstream in flight.under_way():
                upstream.count_overdue(flight.began, now)
                flight.note(upstream, flight.began_at(upstream), now, "no reply in time")
            reason = f"no upstream replied within {self.call_timeout_s:g} s"
            self._give_up(flight, UpstreamTimeout(self._message(reason)))
        elif is_late(self.state, flight, now):
            self._hedge(flight, now)

    def _hedge(self, flight: Flight, now: float) -> None:
        """Send one more attempt; to an upstream that is behind only if the last one is silent. If two are in flight already,
        the older one is given up."""
        newest = flight.newest(now)[0]
        upstream = self._another(flight, now, has_block=newest is None or not newest.health.silent)
        if upstream is None:
            self._repeat(flight, now)
            return
        flight.leave_older(now)
        self.send(flight, upstream, now)

    def _repeat(self, flight: Flight, now: float) -> None:
        """The call hangs on every upstream. One that was silent and is back gets it again."""
        upstream = upstream_that_is_back(self.state, flight, now)
        if upstream is None:
            return
        if flight.is_carried_by(upstream):
            flight.ended(upstream)
            upstream.leave(flight)
        else:
            flight.leave_older(now)
        self.send(flight, upstream, now, fresh=True)

    # Replies and failures

    def on_reply(self, flight: Flight, connection: UpstreamConnection, head: ReplyHead, body: bytes) -> None:
        upstream = connection.upstream
        now = _monotonic()
        if head.status >= 400:
            flight.note_failure(upstream, f"status {head.status}")
        began = flight.ended(upstream)
        if head.wants_rest:
            self.rate_limited(flight, upstream, now, head)
            return
        try:
            if not head.plain:
                raise ValueError("compressed")
            reply = jsonrpc.read_reply(body, flight.id)
        except ValueError as exc:
            count_invalid_reply(flight, connection, head, now, is_foreign=isinstance(exc, jsonrpc.ForeignReply))
            flight.note(upstream, began, now, f"invalid reply, HTTP status {head.status}")
            self._after_failure(flight, now, "an upstream sent an invalid reply", sent=True)
            return
        self.receive(flight, reply, upstream, now, now - began)

    def receive(
        self, flight: Flight, reply: jsonrpc.UpstreamReply, upstream: Upstream, now: float, took_s: float
    ) -> None:
        """A valid reply to our call."""
        flight.answered_by = upstream
        policy = flight.policy
        if flight.attempt_log is not None and reply.result:
            flight.note(upstream, flight.last_began, now, "answered")
        if not reply.result:
            self._on_error(flight, reply, upstream, now, took_s)
            return
        upstream.health.succeeded(took_s)
        if flight.suspects:
            flight.blame_suspects(now)
        if policy.method.empty and is_doubtful(self.state, flight, upstream, reply.result):
            flight.fallback_result = bytes(reply.result)
            flight.note(upstream, flight.last_began, now, "empty, and the upstream is behind")
            if flight.is_under_way() or self._send_another(flight, now):
                return
        if flight.reports_head and not self._agrees_with_head(flight, reply, upstream, now):
            return
        if policy.by_range and self.on_partial and may_lack_blocks(self.state, flight, upstream, now, reply.result):
            self.on_partial(flight, bytes(reply.result), upstream)
            flight.handed_over = True
            return
        if policy.looks_up_null and self.state.is_null(reply.result) and self.on_null and self.on_null(flight):
            flight.handed_over = True
            return
        self.complete(flight, reply.result)

    def on_fail(self, flight: Flight, upstream: Upstream, reason: str, *, sent: bool, blame: bool) -> None:
        """`blame`: whether the failure counts against the upstream. It does not where the same failure was counted already."""
        # A full queue reports its refusal one loop turn later: the attempt may have been given up meanwhile.
        if not flight.is_carried_by(upstream):
            return
        now = _monotonic()
        flight.note_failure(upstream, reason)
        flight.note(upstream, flight.ended(upstream), now, reason)
        if reason == STALE and flight.policy.may_repeat and not flight.is_under_way() and flight.tries < MAX_TRIES:
            self.send(flight, upstream, now, fresh=True)
            return
        if reason == CROWDED:
            self._after_refusal(flight, now)
            return
        if reason in (NO_MEMORY, TOO_LARGE) and flight.joined is not None and not flight.handed_over:
            self._send_separately(flight, now)
            return
        if reason == NO_MEMORY:
            self._after_no_memory(flight)
            return
        if blame and reason == TOO_LARGE:
            flight.suspect(upstream)
        elif blame and reason != OUT_OF_STEP:  # The call with that reply was counted.
            upstream.health.failed(now, by_call=sent)
        if flight.streaming:
            break_stream(self.state, flight)
            return
        self._after_failure(flight, now, f"an upstream failed: {reason}", sent=sent)

    def _after_refusal(self, flight: Flight, now: float) -> None:
        """The call waited for too long. It goes to an upstream that has room, or its client tries again later."""
        if flight.is_under_way() or flight.handed_over:
            return
        upstream = self.choose(flight, now, flight.tried) if flight.tries < flight.most_tries else None
        if upstream is not None and not upstream.is_crowded:
            self.send(flight, upstream, now)
            return
        if flight.joined_by:
            self._send_for_another(flight, now)
            return
        self._give_up(flight, Unavailable(self._message("the upstreams are overloaded; try again shortly")))

    def _after_no_memory(self, flight: Flight) -> None:
        """The account that made the call holds too many large replies. This is no fault of the upstream."""
        if not flight.is_under_way() and not flight.handed_over:
            self.complete_with_error(flight, NO_ROOM)

    def _send_separately(self, flight: Flight, now: float) -> None:
        """Several callers wait for a reply that is too large to be held for them. Each gets its own, which can be streamed:
        a call must not fail because others make it too."""
        self.state.unregister(flight)  # No other caller joins it.
        for caller, client in flight.take_joined():
            caller.cache = "miss"
            caller.flight = alone = self.new_flight(flight.policy, flight.params, caller, flight.began)
            alone.repeat(flight, client)
            self.launch(alone, now)
        if flight.waiters[0] is ABSENT_WAITER:
            self._close(flight)
        elif not flight.is_under_way():
            flight.tried = flight.tries = 0
            self.launch(flight, now)

    def _send_for_another(self, flight: Flight, now: float) -> None:
        """The account that made the call has too many of them. Others that joined it get it in their own turn."""
        flight.pass_on()
        self.launch(flight, now)

    def rate_limited(self, flight: Flight, upstream: Upstream, now: float, head: ReplyHead) -> None:
        """The upstream limits our rate. This does not count as a failure."""
        upstream.health.rest(now, head.retry_after_s or 1.0)
        flight.note(upstream, flight.last_began, now, f"rate limited, HTTP status {head.status}")
        # RFC 6585, 4: a 429 refuses the request, so a write was not executed. A private one is still for this upstream alone.
        was_refused = head.status == 429 and not flight.policy.method.private
        self._after_failure(flight, now, "an upstream is rate limited", sent=not was_refused)

    def _on_error(
        self, flight: Flight, reply: jsonrpc.UpstreamReply, upstream: Upstream, now: float, took_s: float
    ) -> None:
        error = bytes(reply.error)
        verdict = judge_error(flight, error, upstream, now, took_s)
        if verdict.kind == "already_known" and (known := flight.policy.already_known(flight.params)):
            self.complete(flight, known)
        elif flight.handed_over:
            return
        elif verdict.retry_elsewhere:
            flight.note_error(error_for_caller(flight, reply, verdict, upstream), verdict.weight)
            self._after_own_error(flight, verdict, now)
        elif verdict.kind == "range_too_large" and self._split(flight, error):
            flight.handed_over = True
        else:
            self._complete_best(flight, error_for_caller(flight, reply, verdict, upstream))

    def _after_own_error(self, flight: Flight, verdict: upstream_errors.UpstreamError, now: float) -> None:
        """The error is about the upstream: another one may do better."""
        method = flight.policy.method
        # A private write is for one upstream alone, unless that one cannot take it at all.
        was_refused = verdict.lacks_method or (verdict.wants_rest and not method.private)
        if flight.is_under_way() or self._send_another(flight, now, was_refused=was_refused):
            return
        is_lack = verdict.lacks_method and flight.fallback_weight == upstream_errors.LACK
        if is_lack and self.state.group.may_have(method.name, now):
            reason = "no upstream that has this method is available at the moment"
            self.complete_with_fault(flight, Unavailable(self._message(reason)))
        else:
            self._complete_best(flight, flight.fallback_error)

    def _complete_best(self, flight: Flight, error: bytes) -> None:
        """End with the fallback result, or with the error if there is none."""
        if flight.fallback_result is not None:
            self.complete(flight, flight.fallback_result)
        else:
            self.complete_with_error(flight, error)

    def _split(self, flight: Flight, error: bytes) -> bool:
        return not flight.is_piece and self.on_split is not None and self.on_split(flight, error)

    def _agrees_with_head(self, flight: Flight, reply: jsonrpc.UpstreamReply, upstream: Upstream, now: float) -> bool:
        """Whether a result that contains the head may be passed on: the head must neither go back nor be implausibly high."""
        match self.state.compare_head(bytes(reply.result), upstream.health, now):
            case "current":
                return True
            case "future":
                upstream.health.failed(now, by_call=True)
                self._after_failure(flight, now, "an upstream reported an impossible block", sent=True)
                return False
            case "behind":
                flight.note(upstream, flight.last_began, now, "behind the newest block")
                if flight.policy.is_head_number:
                    reply.result = msgspec.Raw(self.state.head_number())
                    return True
                if not flight.is_under_way() and not self._send_another(flight, now):
                    reason = "no upstream has the newest block at the moment"
                    self.complete_with_fault(flight, Unavailable(self._message(reason)))
                return False
            case other:
                assert_never(other)

    def _after_failure(self, flight: Flight, now: float, reason: str, *, sent: bool) -> None:
        if flight.is_under_way() or flight.handed_over:
            return
        if (flight.policy.may_repeat or not sent) and flight.tries < flight.most_tries:
            upstream = self.choose(flight, now, flight.tried)
            if sent and (upstream is None or (flight.tries == 1 and lacks_block(flight, upstream))):
                # No other upstream is left, or none that has the block: use the same one on another connection. The upstream
                # may have closed an idle connection in the moment in which it was used.
                upstream = self.choose(flight, now, 0)
            # A call that was not sent puts no load on an upstream, so it needs no budget.
            if upstream is not None and (not sent or self._may_retry(flight, now)):
                self.send(flight, upstream, now)
                return
        self._give_up(flight, InternalError(self._message(reason)))

    def _may_retry(self, flight: Flight, now: float) -> bool:
        """The retries of all accounts that wait for the call are spent on it: the first may have none left."""
        return any(self.budget.spend(now, client) for client in (flight.client, *flight.joined_by))

    def _give_up(self, flight: Flight, fault: Fault) -> None:
        """No upstream is left to try. The fallback result is better than a fault, and so is an error that is about the call."""
        if flight.fallback_result is not None or flight.fallback_weight > upstream_errors.TROUBLE:
            self._complete_best(flight, flight.fallback_error)
        else:
            self.complete_with_fault(flight, fault)

    def _message(self, reason: str) -> str:
        return f"the call failed on {self.state.network_id}: {reason}"

    # Large replies

    def on_large(self, flight: Flight, connection: UpstreamConnection, head: ReplyHead, beginning: Piece) -> bool:
        start = start_of_stream(flight, head, beginning)
        may_be_partial = flight.policy.by_range and self.on_partial is not None
        if not start or (may_be_partial and may_lack_blocks(self.state, flight, connection.upstream, _monotonic())):
            return False
        left = head.length - start if head.length >= 0 else None
        begin_stream(self.state, flight, connection, memoryview(beginning)[start:], left)
        return True

    def on_end(self, flight: Flight, connection: UpstreamConnection) -> None:
        end_stream(self.state, flight, connection)

    # The end of a flight

    def complete(self, flight: Flight, result: bytes | msgspec.Raw) -> None:
        self._close(flight)
        self.state.keep(flight, result)
        exchange = self.state.exchange
        if exchange is not None and flight.policy.method.kind == "write":
            exchange.wrote(self.state.network_id, partial(flight.deliver, result))
        else:
            flight.deliver(result)

    def complete_with_error(self, flight: Flight, error: bytes) -> None:
        self._close(flight)
        flight.deliver_error(error)

    def complete_with_fault(self, flight: Flight, fault: Fault) -> None:
        self._close(flight)
        flight.deliver_fault(fault)

    def on_abandoned(self, flight: Flight) -> None:
        self._close(flight)

    def _close(self, flight: Flight) -> None:
        """End the flight and give up the attempts that are left."""
        flight.done = True
        self.state.unregister(flight)
        if flight.first is not None or flight.second is not None:
            flight.leave_attempts(_monotonic())
