"""Sending calls to a network's upstreams, and deciding what their replies mean.

The rules: a read may be repeated on another upstream, within the retry budget; a write only if it certainly was not executed:
it was not sent, the upstream does not have the method, or it limits our rate. An empty result from an upstream behind the
network's head is verified with another upstream first; it is kept as the *fallback* in case no upstream has a better one. Only
valid replies to our own calls are passed on. Nothing here waits: callbacks change the state of a flight and send what has to be
sent.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import time
from dataclasses import dataclass
from functools import partial
from typing import Protocol, assert_never

import msgspec

from proxy.core import jsonrpc, upstream_errors
from proxy.core.access import Key
from proxy.core.budgets import period_end
from proxy.core.credits import outcome_of_error
from proxy.core.directives import Directives
from proxy.core.jsonrpc import UpstreamReply
from proxy.core.retry_budget import RetryBudget
from proxy.core.routing import HEDGE_CEILING_S, HEDGE_FLOOR_S
from proxy.core.routing_rules import exclusions, steered
from proxy.core.upstream_errors import UpstreamError
from proxy.core.upstream_health import UpstreamHealth
from proxy.errors import DeadlinePassed, Fault, InternalError, NotSent, Unavailable, UpstreamTimeout
from proxy.services.rpc.flights import Call, Flight, FlightHandler, result_at
from proxy.services.rpc.held_body import NO_ROOM
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.network_state import NetworkState
from proxy.services.rpc.waiters import ABSENT_WAITER, Waiter
from proxy.store.valkey.upstream_leases import LeasedRate
from proxy.wire.http1 import ReplyHeaders
from proxy.wire.upstream import (
    CROWDED,
    MOST_SHARED,
    NO_MEMORY,
    OUT_OF_STEP,
    STALE,
    TOO_LARGE,
    UNCHECKED,
    Piece,
    Upstream,
    UpstreamConnection,
)

log = logging.getLogger("penstock.dispatcher")

_monotonic = time.monotonic
# facts.md 4.2: the code of data that an upstream does not have.
MISSING_DATA = -32014
# The beginning of the error of a call that a contract reverted: the only error that is an answer.
_REVERT = b'{"code":3,'
# How long a call waits for credits of a budget to be leased.
LONGEST_LEASE_S = 2.0
# A call that is late by this factor goes to an upstream whose soft budget is used up, if no other is left.
WORTH_MONEY = 4.0


class LogRanges(Protocol):
    """Takes over calls for the logs of a range."""

    def split(self, dispatcher: Dispatcher, flight: Flight, error: bytes) -> bool:
        """An upstream refused the range as too large. Returns False to leave the flight as it is."""

    def complete(self, dispatcher: Dispatcher, flight: Flight, result: bytes, upstream: Upstream) -> None:
        """The result may lack the last blocks of the range."""


class NullResults(Protocol):
    """Takes over calls whose result is null, and looks for a better one."""

    def take(self, dispatcher: Dispatcher, flight: Flight) -> bool:
        """Returns False to leave the flight as it is."""


class BlockQueue(Protocol):
    """Lets calls wait until an upstream has their block."""

    def take(self, dispatcher: Dispatcher, flight: Flight) -> None: ...


class RestQueue(Protocol):
    """Lets calls wait for upstreams that limit our rate."""

    def take(self, dispatcher: Dispatcher, flight: Flight) -> bool:
        """Returns False if waiting would not help."""


@dataclass(frozen=True, slots=True)
class Takeovers:
    """The objects that take over calls which one upstream alone cannot answer. Without them, the upstream's reply is final."""

    logs: LogRanges | None = None
    nulls: NullResults | None = None
    block_waits: BlockQueue | None = None
    rest_waits: RestQueue | None = None


class Dispatcher(FlightHandler):
    """Chooses upstreams for the flights of one network, sends them, and ends them."""

    __slots__ = ("budget", "call_timeout_s", "state", "takeovers")

    def __init__(self, state: NetworkState, *, call_timeout_s: float, takeovers: Takeovers) -> None:
        self.state = state
        self.call_timeout_s = call_timeout_s
        self.budget = RetryBudget()
        self.takeovers = takeovers

    def __repr__(self) -> str:
        return f"<Dispatcher {self.state!r}>"

    # Sending

    def new_flight(self, call: Call, waiter: Waiter, now: float) -> Flight:
        flight = Flight(self, call, waiter, now, moves=self.state.replies.moves, tip=self.state.tip)
        if call.directives is not None and call.directives.timeout_ms:
            # The caller chose this deadline, so missing it says nothing about the upstreams.
            left_s = now + call.directives.timeout_ms / 1000 - _monotonic()
            asyncio.get_running_loop().call_later(max(0.0, left_s), self._expire, flight)
        return flight

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
        flight = self.new_flight(Call(policy, params, client=client), waiter, began)
        flight.was_sent(upstream, id_, block)
        return flight

    def _expire(self, flight: Flight) -> None:
        if not flight.done and not flight.streaming:
            assert flight.call.directives is not None
            for upstream in flight.under_way():
                flight.note(upstream, flight.began_at(upstream), _monotonic(), "no reply before the request's deadline")
            reason = f"no upstream replied within {flight.call.directives.timeout_ms} ms, the request's X-Timeout-Ms"
            self._give_up(flight, DeadlinePassed(self._message(reason)))

    def launch(self, flight: Flight, now: float) -> None:
        """Send the flight to the best upstream."""
        if self.state.only is None:
            self.budget.earn()
        upstream = self.choose(flight.call, now, flight.tried)
        if upstream is not None:
            self.send(flight, upstream, now)
        elif (oldest := first_available(self.state, flight.call)) >= 0:
            self.complete_with_error(flight, too_old(flight.call, self.state.network_id, oldest))
        elif self.takeovers.block_waits is not None and needs_block(flight):
            self.takeovers.block_waits.take(self, flight)
        else:
            self._await_lease(flight, now)

    def _await_lease(self, flight: Flight, began: float) -> None:
        """Let the flight wait, if the limit of an upstream is leased and Valkey has to be asked for a token, or if credits of
        its budget have to be leased. Otherwise, no upstream accepts calls."""
        name, archive = flight.policy.method.name, flight.call.archive
        for upstream in self.state.upstreams:
            health = upstream.health
            meter, limit = health.meter, None if health.admits(name, began) else health.limit_of(name)
            rate = health.rate if limit is None else limit.rate
            may_wait = meter is not None and _monotonic() - began < LONGEST_LEASE_S
            if may_wait and meter is not None and meter.may_wait(name, archive=archive) and meter.budget is not None:
                meter.budget.when_leased(partial(self._after_lease, flight, began))
                return
            if isinstance(rate, LeasedRate) and rate.waits(began):
                rate.when_leased(partial(self._after_lease, flight, began))
                return
        if not self._waits_for_rest(flight, _monotonic()):
            self.refuse(flight)

    def refuse(self, flight: Flight) -> None:
        directives = flight.call.directives
        at_cost = " at the cost of X-Max-Cost" if directives is not None and directives.max_cost >= 0 else ""
        reason = f"no upstream of {self.state.network_id} accepts calls{at_cost} at the moment"
        if required := required_labels(flight.call):
            reason = f"no upstream of {self.state.network_id} with the labels {required} accepts calls at the moment"
        elif self.state.group.has_account_shares and self.state.group.used_up_by(flight.call.client):
            reason = f"{reason}: your account has used its part of the budget of upstreams"
        elif excluded := sorted({*exclusions_for(self.state, flight.call)}):
            reason = f"{reason}: {'; '.join(excluded)}"
        self.complete_with_fault(flight, Unavailable(reason, reason="upstream"))

    def _waits_for_rest(self, flight: Flight, now: float) -> bool:
        """Let the flight wait if no upstream takes it now, and one that could serve it limits our rate."""
        waits, call = self.takeovers.rest_waits, flight.call
        if waits is None or flight.is_under_way() or flight.handed_over:
            return False
        # A call for one upstream alone is answered by it or not at all. X-Retry limits repetitions.
        if call.excluded or (call.directives is not None and flight.tries >= flight.most_tries):
            return False
        return self.choose(call, now, flight.tried) is None and waits.take(self, flight)

    def _after_lease(self, flight: Flight, began: float) -> None:
        if flight.done:
            return
        now = _monotonic()
        upstream = self.choose(flight.call, now, flight.tried)
        if upstream is not None:
            self.send(flight, upstream, now)
        else:
            self._await_lease(flight, began)

    def choose(self, call: Call, now: float, tried: int) -> Upstream | None:
        return choose_upstream(self.state, call, now, tried)

    def send(self, flight: Flight, upstream: Upstream, now: float, *, fresh: bool = False) -> None:
        policy = flight.policy
        health = upstream.health
        if health.meter is not None and not health.affords(policy.method.name, archive=flight.call.archive):
            reason = Unavailable(self._message("the budget of the upstream is used up"), reason="upstream")
            self._after_failure(flight, now, reason, sent=False)
            return
        if health.method_limits and not health.admits(policy.method.name, now, softly=True):
            message = self._message(f"the upstream's limit of {policy.method.name} is reached")
            self._after_failure(flight, now, Unavailable(message, reason="upstream"), sent=False)
            return
        header = flight.begin(upstream, now)
        directives = flight.call.directives
        if directives is not None and directives.min_block > self.state.tip:
            # The reply names this block, and cached replies from before it must not follow.
            self.state.compare_number(directives.min_block, upstream.health, now)
        body = (jsonrpc.ENVELOPE_START, flight.id, policy.request_tail, flight.params, b"}")
        upstream.submit(flight, *body, once=not policy.may_repeat, fresh=fresh, header=header)

    def _another(
        self,
        flight: Flight,
        now: float,
        *,
        was_refused: bool = False,
        has_block: bool = False,
        has_credits: bool = False,
        is_unrelated: bool = False,
    ) -> Upstream | None:
        """Another upstream for the flight, if one is left, has room, and the retry budget allows it. `was_refused`: the last
        one certainly did not execute the call, so even a write may be sent again. `has_block`: only one that is not behind.
        `has_credits`: only one whose own budget is not used up. `is_unrelated`: only one of an operator that was not tried."""
        if not (flight.policy.may_repeat or was_refused) or flight.tries >= flight.most_tries:
            return None
        related = of_same_operators(self.state, flight.tried) if is_unrelated else 0
        upstream = self.choose(flight.call, now, flight.tried | related)
        if upstream is None or upstream.is_crowded or (has_block and lacks_block(self.state, flight.call, upstream)):
            return None
        if has_credits and upstream.health.is_over_budget:
            return None
        return upstream if self.budget.spend(now, flight.client) else None

    def _send_another(
        self, flight: Flight, now: float, *, was_refused: bool = False, is_unrelated: bool = False
    ) -> bool:
        upstream = self._another(flight, now, was_refused=was_refused, is_unrelated=is_unrelated)
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
        """Send one more attempt; to an upstream that is behind only if the last one is silent, and to one whose budget is used
        up only if the call is very late: being a little faster is not worth the money. If two are in flight already, the
        older one is given up."""
        newest, age = flight.newest(now)
        answers = newest is None or not newest.health.silent
        usual = HEDGE_CEILING_S if newest is None else self.state.group.hedge_after_s(newest.health)
        saves = answers and age < min(WORTH_MONEY * usual, HEDGE_CEILING_S)
        upstream = self._another(flight, now, has_block=answers, has_credits=saves)
        if upstream is None:
            self._repeat(flight, now)
            if age >= HEDGE_CEILING_S and not flight.done and flight.newest(now)[1] >= HEDGE_CEILING_S:
                self._settle(flight, now)
            return
        flight.leave_older(now)
        self.send(flight, upstream, now)

    def _settle(self, flight: Flight, now: float) -> None:
        """The call hangs on the last upstream, and another one has replied with an error that is about the call or with a
        doubtful result: that is better than a timeout."""
        if flight.fallback_result is not None or flight.fallback_weight > upstream_errors.TROUBLE:
            for upstream in flight.under_way():
                upstream.count_late(flight.began_at(upstream), now)
            self._complete_best(flight, flight.fallback_error)

    def _repeat(self, flight: Flight, now: float) -> None:
        """The call hangs on every upstream. Send it again to an upstream that was silent and is back."""
        upstream = upstream_that_is_back(self.state, flight, now)
        if upstream is None:
            return
        if flight.is_carried_by(upstream):
            flight.ended(upstream)
            flight.leave_upstream(upstream)
        else:
            flight.leave_older(now)
        self.send(flight, upstream, now, fresh=True)

    # Replies and failures

    def on_reply(self, flight: Flight, connection: UpstreamConnection, headers: ReplyHeaders, body: bytes) -> None:
        upstream = connection.upstream
        now = _monotonic()
        if headers.status >= 400:
            flight.note_failure(upstream, f"status {headers.status}")
        began = flight.ended(upstream)
        if headers.wants_rest:
            note_capacity(upstream, body.decode("utf-8", "replace"), now)
            self.rate_limited(flight, upstream, now, headers)
            return
        try:
            if not headers.plain:
                raise ValueError("compressed")
            reply = jsonrpc.read_reply(body, flight.id)
        except ValueError as exc:
            count_invalid_reply(flight, connection, headers, now, is_foreign=isinstance(exc, jsonrpc.ForeignReply))
            flight.note(upstream, began, now, f"invalid reply, HTTP status {headers.status}")
            if headers.status >= 400:
                flight.billed_as(upstream, str(headers.status))
            self._after_failure(flight, now, "an upstream sent an invalid reply", sent=True)
            return
        self.receive(flight, reply, upstream, now, now - began)

    def on_late(self, flight: Flight, upstream: Upstream, headers: ReplyHeaders, body: bytes) -> None:
        """The attempt was given up, so only the price of its reply matters."""
        outcome = failure_in(headers, body, flight.id)
        if outcome:
            flight.billed_as(upstream, outcome)

    def receive(
        self, flight: Flight, reply: jsonrpc.UpstreamReply, upstream: Upstream, now: float, took_s: float
    ) -> None:
        """A valid reply to our call."""
        flight.reply_arrived(upstream)
        policy = flight.policy
        if flight.attempt_log is not None and reply.result:
            flight.note(upstream, flight.last_began, now, "answered")
        if not reply.result:
            self._on_error(flight, reply, upstream, now, took_s)
            return
        upstream.health.succeeded(took_s, policy.method.name)
        if flight.suspects:
            flight.blame_suspects(now)
        if doubt := doubt_of(self.state, flight, upstream, reply.result):
            if not flight.call.reports_head:  # One that was not compared with the head answers nobody.
                flight.keep_fallback(bytes(reply.result))
            flight.note(upstream, flight.last_began, now, doubt)
            if flight.is_under_way() or self._send_another(flight, now):
                return
        result = reply.result
        if flight.call.reports_head:
            current = self._with_current_head(flight, reply.result, upstream, now)
            if current is None:
                return
            result = current
        logs, nulls = self.takeovers.logs, self.takeovers.nulls
        if policy.by_range and logs is not None and may_lack_blocks(self.state, flight, upstream, now, reply.result):
            logs.complete(self, flight, bytes(reply.result), upstream)
            flight.hand_over()
            return
        if policy.looks_up_null and self.state.is_null(reply.result) and nulls is not None and nulls.take(self, flight):
            flight.hand_over()
            return
        self.complete(flight, result)

    def on_fail(self, flight: Flight, upstream: Upstream, reason: str, *, sent: bool, blame: bool) -> None:
        """`blame`: whether the failure counts against the upstream. It does not where the same failure was counted already."""
        if not sent or reason == STALE:
            flight.not_billed(upstream)
        # A full queue reports its refusal one loop turn later: the attempt may have been given up meanwhile.
        if not flight.is_carried_by(upstream):
            return
        now = _monotonic()
        flight.note_failure(upstream, reason)
        flight.note(upstream, flight.ended(upstream), now, reason)
        if reason == STALE:
            flight.not_read()
            if flight.policy.may_repeat and not flight.is_under_way() and flight.tries < flight.most_tries:
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
        # The call with a reply out of step was counted, and a check that failed is a bug of ours.
        elif blame and reason not in (OUT_OF_STEP, UNCHECKED):
            upstream.health.failed(now, by_call=sent)
        if flight.streaming:
            self.state.unregister(flight)
            flight.break_stream()
            return
        self._after_failure(flight, now, f"an upstream failed: {reason}", sent=sent)

    def _after_refusal(self, flight: Flight, now: float) -> None:
        """The call waited for too long. It goes to an upstream that has room, or its client tries again later."""
        if flight.is_under_way() or flight.handed_over:
            return
        upstream = self.choose(flight.call, now, flight.tried) if flight.tries < flight.most_tries else None
        if upstream is not None and not upstream.is_crowded:
            self.send(flight, upstream, now)
            return
        if flight.joined_by:
            self._send_for_another(flight, now)
            return
        self._give_up(
            flight, Unavailable(self._message("the upstreams are overloaded; try again shortly"), reason="upstream")
        )

    def _after_no_memory(self, flight: Flight) -> None:
        """The account that made the call holds too many large replies. This is no fault of the upstream."""
        if not flight.is_under_way() and not flight.handed_over:
            self.complete_with_error(flight, NO_ROOM)

    def _send_separately(self, flight: Flight, now: float) -> None:
        """Several callers wait for a reply that is too large to be held for them: a call must not fail because others make it
        too."""
        self._separate(flight, now)
        if flight.waiters[0] is ABSENT_WAITER:
            self._close(flight)
        elif not flight.is_under_way():
            flight.start_over()
            self.launch(flight, now)

    def _separate(self, flight: Flight, now: float) -> None:
        """Send the call of each caller that joined the first one by itself: its reply can be streamed."""
        self.state.unregister(flight)  # No other caller joins it.
        for caller, call in flight.take_joined():
            alone = self.new_flight(call, caller, flight.began)
            caller.on_source("miss", alone.block)
            caller.on_flight(alone)
            self.launch(alone, now)

    def _send_for_another(self, flight: Flight, now: float) -> None:
        """The account that made the call has too many calls under way. Send it again for the next account that joined it."""
        flight.pass_on()
        self.launch(flight, now)

    def rate_limited(self, flight: Flight, upstream: Upstream, now: float, headers: ReplyHeaders) -> None:
        """The upstream limits our rate. This does not count as a failure."""
        upstream.health.limited(flight.policy.method.name, now, headers.retry_after_s or 1.0)
        flight.billed_as(upstream, str(headers.status))
        flight.note(upstream, flight.last_began, now, f"rate limited, HTTP status {headers.status}")
        # RFC 6585, 4: a 429 refuses the request, so a write was not executed. A private one is still for this upstream alone.
        was_refused = headers.status == 429 and not flight.policy.method.private
        if (was_refused or flight.policy.may_repeat) and self._waits_for_rest(flight, now):
            return
        reason = Unavailable(
            self._message("the upstreams limit the rate of calls; try again shortly"), reason="upstream"
        )
        self._after_failure(flight, now, reason, sent=not was_refused)

    def _on_error(
        self, flight: Flight, reply: jsonrpc.UpstreamReply, upstream: Upstream, now: float, took_s: float
    ) -> None:
        error = bytes(reply.error)
        verdict = judge_error(flight, error, upstream, now, took_s)
        if verdict.kind == "already_known" and (known := flight.policy.already_known(flight.params)):
            self.complete(flight, known)
        elif flight.handed_over:
            return
        elif verdict.retry_elsewhere and not (
            verdict.kind == "behind" and upstream.health.head >= self.state.heads.tip
        ):
            flight.note_error(error_for_caller(flight, reply, verdict, upstream), verdict.weight)
            if verdict.kind == "missing_data":
                self._note_missing_data(flight)
            self._after_own_error(flight, verdict, now)
        elif verdict.kind == "range_too_large" and self._split(flight, error):
            flight.hand_over()
        else:
            self._complete_best(flight, error_for_caller(flight, reply, verdict, upstream))

    def _note_missing_data(self, flight: Flight) -> None:
        """Find out what the upstreams have pruned. Where an ordinary one keeps a known number of blocks, reads of older ones
        were noted when they arrived."""
        if not flight.policy.family.kept_blocks and 0 < flight.call.least_head < self.state.heads.tip:
            self.state.old_data_read(flight.policy.data)

    def _after_own_error(self, flight: Flight, verdict: upstream_errors.UpstreamError, now: float) -> None:
        """The error is about the upstream: another one may do better."""
        method = flight.policy.method
        # A private write is for one upstream alone, unless that one does not have the method.
        was_refused = verdict.wants_rest and not method.private
        if flight.is_under_way():
            return
        if verdict.lacks_method:
            # Each upstream that can be asked is asked once. It then counts as lacking the method, so this costs little.
            may_try = flight.call.directives is None or flight.tries < flight.most_tries
            upstream = self.choose(flight.call, now, flight.tried) if may_try else None
            if upstream is not None and not upstream.health.lacks(method.name, now):
                self.send(flight, upstream, now)
                return
        elif self._send_another(flight, now, was_refused=was_refused):
            return
        if verdict.wants_rest and (was_refused or flight.policy.may_repeat) and self._waits_for_rest(flight, now):
            return
        self._complete_best(flight, flight.fallback_error)

    def _complete_best(self, flight: Flight, error: bytes) -> None:
        """End with the fallback result, or with the error if there is none."""
        if flight.fallback_result is not None:
            self.complete(flight, flight.fallback_result)
        else:
            self.complete_with_error(flight, error)

    def _split(self, flight: Flight, error: bytes) -> bool:
        logs = self.takeovers.logs
        return not flight.call.is_piece and logs is not None and logs.split(self, flight, error)

    def _with_current_head(
        self, flight: Flight, result: msgspec.Raw, upstream: Upstream, now: float
    ) -> msgspec.Raw | None:
        """Check a result that contains the head: the head must neither go back nor be implausibly high. Returns the result to
        pass on; None if another upstream is tried, or none is left."""
        match self.state.compare_head(bytes(result), upstream.health, now):
            case "current":
                return result
            case "future":
                upstream.health.failed(now, by_call=True)
                # Sent again, the same upstream would report the same, and so may others of its operator: any other one is
                # better, even one that is behind.
                is_sent = flight.is_under_way() or self._send_another(flight, now, is_unrelated=True)
                if not is_sent and not self._send_another(flight, now):
                    self._after_failure(flight, now, "an upstream reported an impossible block", sent=True)
                return None
            case "behind":
                flight.note(upstream, flight.last_began, now, "behind the newest block")
                if flight.policy.is_head_number:
                    return msgspec.Raw(self.state.head_number())
                message = self._message("no upstream has the newest block at the moment")
                reason = Unavailable(message, reason="upstream")
                self._after_failure(flight, now, reason, sent=True, needs_block=True)
                return None
            case other:
                assert_never(other)

    def _after_failure(
        self, flight: Flight, now: float, reason: str | Unavailable, *, sent: bool, needs_block: bool = False
    ) -> None:
        """`needs_block`: a reply from before the newest block is of no use."""
        if flight.is_under_way() or flight.handed_over:
            return
        if (flight.policy.may_repeat or not sent) and flight.tries < flight.most_tries:
            upstream = self.choose(flight.call, now, flight.tried)
            if sent and (upstream is None or needs_block or flight.tries == 1):
                upstream = self._or_same(flight, now, upstream)
            # A call that was not sent puts no load on an upstream, so it needs no budget.
            if upstream is not None and (not sent or self._may_retry(flight, now)):
                self.send(flight, upstream, now)
                return
        if isinstance(reason, str):
            kind = InternalError if sent else NotSent
            self._give_up(flight, kind(self._message(reason), reason="upstream"))
        else:
            self._give_up(flight, reason)

    def _or_same(self, flight: Flight, now: float, other: Upstream | None) -> Upstream | None:
        """This upstream, or one that was tried if only that has the block or no other is left. It may have closed an idle
        connection in the moment in which it was used, or have read the state from before the block."""
        if other is not None and not lacks_block(self.state, flight.call, other):
            return other
        same = self.choose(flight.call, now, flight.call.excluded)
        has_block = same is not None and not lacks_block(self.state, flight.call, same)
        return same if other is None or has_block else other

    def _may_retry(self, flight: Flight, now: float) -> bool:
        """Spend a retry of the first account that has one left, among all that wait for the call."""
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

    def on_large(self, flight: Flight, connection: UpstreamConnection, headers: ReplyHeaders, beginning: Piece) -> bool:
        is_shared = flight.joined is not None and flight.waiters[0] is not ABSENT_WAITER
        if is_shared and max(headers.length, len(beginning)) > MOST_SHARED and not flight.handed_over:
            self._separate(flight, _monotonic())
        start = start_of_stream(flight, headers, beginning)
        may_be_partial = flight.policy.by_range and self.takeovers.logs is not None
        if not start or (may_be_partial and may_lack_blocks(self.state, flight, connection.upstream, _monotonic())):
            return False
        left = headers.length - start if headers.length >= 0 else None
        self.state.unregister(flight)  # No caller may join a reply that has started.
        flight.begin_stream(connection, memoryview(beginning)[start:], left)
        return True

    def on_end(self, flight: Flight, connection: UpstreamConnection) -> None:
        began = flight.ended(connection.upstream)
        now = _monotonic()
        connection.upstream.health.succeeded(now - began, flight.policy.method.name)
        flight.blame_suspects(now)
        self.state.unregister(flight)
        flight.end_stream()

    # The end of a flight

    def complete(self, flight: Flight, result: bytes | msgspec.Raw) -> None:
        self._close(flight)
        self.state.keep(flight, result)
        note = self.state.note_write(flight) if flight.policy.method.kind == "write" else ""
        if note and self.state.exchange is not None:
            self.state.exchange.wrote(self.state.network_id, note, partial(flight.deliver, result))
        else:
            flight.deliver(result)
        if self.state.read_observers:
            for observer in self.state.read_observers:
                observer.answered(flight, bytes(result))

    def complete_cached(self, flight: Flight, result: bytes) -> None:
        """End with a result that is cached already."""
        self._close(flight)
        flight.deliver(result)

    def complete_with_error(self, flight: Flight, error: bytes) -> None:
        self._close(flight)
        flight.deliver_error(error)
        if self.state.read_observers and error.startswith(_REVERT):
            for observer in self.state.read_observers:
                observer.answered(flight, error, is_error=True)

    def complete_with_fault(self, flight: Flight, fault: Fault) -> None:
        self._close(flight)
        flight.deliver_fault(fault)

    def on_abandoned(self, flight: Flight) -> None:
        self._close(flight)

    def _close(self, flight: Flight) -> None:
        """End the flight and give up the attempts that are left."""
        flight.end()
        self.state.unregister(flight)
        if flight.first is not None or flight.second is not None:
            flight.leave_attempts(_monotonic())


# The choice of an upstream


def choose_upstream(state: NetworkState, call: Call, now: float, tried: int) -> Upstream | None:
    """The best upstream, if there is one. `tried`: those to leave out, as a bit set of their indexes."""
    if call.directives is not None:
        tried |= _left_out(state, call, call.directives)
    if state.group.has_account_shares:
        tried |= state.group.used_up_by(call.client)
    if call.policy.rules:
        never, last = steered(
            call.policy.rules,
            state.group.members,
            key_of(call),
            tip=state.tip,
            method=call.policy.method.name,
            archive=call.archive,
        )
        tried |= never
        upstream = _chosen(state, call, now, tried | last) if last else None
        if upstream is not None:
            return upstream
    return _chosen(state, call, now, tried)


def key_of(call: Call) -> str:
    """The id of the key that makes the call; empty for our own calls."""
    return call.payer.id if isinstance(call.payer, Key) else ""


def _chosen(state: NetworkState, call: Call, now: float, tried: int) -> Upstream | None:
    name = call.policy.method.name
    if (only := state.only) is not None:
        health = only.health
        takes_calls = health.takes_calls(now) or health.allows_fallback(now)
        takes_calls = takes_calls and health.affords(name, archive=call.archive)
        takes_calls = takes_calls and health.admits(name, now, softly=True)
        takes_calls = takes_calls and (
            call.oldest < 0 or health.bounds.holds(call.policy.data, call.oldest, health.head)
        )
        return only if takes_calls and not tried >> health.index & 1 and health.may_serve(name) else None
    doubtful = 0 if call.policy.may_repeat else state.group.doubtful_for_writes(now) & ~tried
    if call.holder is not None and _holder_takes(call.holder.health, name, now, tried | doubtful):
        return call.holder
    if doubtful:
        member = state.group.choose(now, name, tried=tried | doubtful)
        if member is not None:
            return state.upstreams[member.index]
    member = state.group.choose(
        now,
        name,
        tried=tried,
        head=least_head_of(state, call),
        archive=call.archive,
        oldest=call.oldest,
        data=call.policy.data,
    )
    return None if member is None else state.upstreams[member.index]


def _holder_takes(health: UpstreamHealth, method: str, now: float, tried: int) -> bool:
    """Whether the upstream that has received the write that a call is about can be asked. One that lags behind would describe
    an older block than the others have."""
    is_left = not tried >> health.index & 1 and health.may_serve(method) and not health.lacks(method, now)
    takes_calls = health.takes_calls(now) and health.affords(method) and health.admits(method, now)
    return is_left and not health.lagging and takes_calls


def _left_out(state: NetworkState, call: Call, directives: Directives) -> int:
    """A bit set of the upstreams to exclude: all but the named one, those that cost too much, and those that have not reached
    the block or report a head that cannot be true."""
    left_out, method = 0, call.policy.method.name
    for upstream in state.upstreams:
        health = upstream.health
        is_other = directives.upstream not in ("", upstream.label) and directives.upstream not in health.words
        has_block = health.head >= directives.min_block and not health.ahead
        is_dear = health.meter is not None and 0 <= directives.max_cost < health.meter.cost_of(
            method, archive=call.archive
        )
        if is_other or is_dear or (directives.min_block and not has_block):
            left_out |= 1 << health.index
    return left_out


def required_labels(call: Call) -> str:
    """The labels that rules for the call require."""
    rules = [rule for rule in call.policy.rules if not rule.keys or key_of(call) in rule.keys]
    return ", ".join(label for rule in rules for label in rule.require)


def exclusions_for(state: NetworkState, call: Call) -> list[str]:
    """Why rules exclude upstreams from the call. Clients do not learn which upstreams these are."""
    rules = [rule for rule in call.policy.rules if not rule.dry_run and (not rule.keys or key_of(call) in rule.keys)]
    members = state.group.members if rules else ()
    return [why for member in members for why in exclusions(rules, member, state.tip).values()]


def first_available(state: NetworkState, call: Call) -> int:
    """If no upstream has the block that the call reads: the oldest block that one of them has. Otherwise negative."""
    if call.oldest < 0:
        return -1
    oldest = state.oldest_block(call.policy.data)
    return oldest if oldest > call.oldest else -1


def too_old(call: Call, network: str, oldest: int) -> bytes:
    kind = call.policy.data_kind
    reason = f"no upstream of {network} has the {kind} of block {call.oldest}: the oldest block with {kind} is {oldest}"
    return jsonrpc.error(MISSING_DATA, f"{reason}. Ask for that block or a later one", {"oldest_block": hex(oldest)})


def needs_block(flight: Flight) -> bool:
    """Whether only an upstream that has reached a block may be asked."""
    return flight.call.directives is not None and flight.call.directives.min_block > 0


def least_head_of(state: NetworkState, call: Call) -> int:
    """The head that the next upstream must have reached. A result with the head is compared with the newest block, which may
    have come after the call began."""
    return max(call.least_head, state.heads.tip) if call.reports_head else call.least_head


def of_same_operators(state: NetworkState, tried: int) -> int:
    """The upstreams of operators of which one was tried. Both are bit sets of indexes."""
    members = state.group.members
    operators = {member.operator for member in members if tried >> member.index & 1}
    return sum([1 << member.index for member in members if member.operator in operators])


def lacks_block(state: NetworkState, call: Call, upstream: Upstream) -> bool:
    """Whether an upstream is behind the block that the call needs."""
    return 0 < upstream.health.head < least_head_of(state, call)


# Late calls


def is_late(state: NetworkState, flight: Flight, now: float) -> bool:
    """Whether the newest attempt takes longer than its upstream usually does."""
    newest, age = flight.newest(now)
    if newest is None or age < HEDGE_FLOOR_S or not flight.policy.may_repeat:
        return False
    return age > state.group.hedge_after_s(newest.health)


def upstream_that_is_back(state: NetworkState, flight: Flight, now: float) -> Upstream | None:
    """An upstream that was silent after the call was sent and is back: it may have lost the call. One that is back and
    fails at once is not asked again, and tries are counted."""
    directives = flight.call.directives
    if flight.tries >= flight.most_tries + len(state.upstreams):
        return None
    if flight.tries >= flight.most_tries and directives is not None and directives.steers:
        return None
    left_out = 0 if directives is None else _left_out(state, flight.call, directives)
    sent_at = now - flight.newest(now)[1]
    # A negative bit set has all bits: such a call may be sent to one upstream only.
    may_change = flight.tried >= 0
    for upstream in state.upstreams:
        health = upstream.health
        name = flight.policy.method.name
        takes_calls = health.takes_calls(now) and health.affords(name) and health.admits(name, now)
        is_back = takes_calls and health.back_at > sent_at and health.back_at > flight.last_sent(upstream)
        is_left_out = left_out >> health.index & 1
        if is_back and not is_left_out and (may_change or flight.is_carried_by(upstream)):
            return upstream
    return None


# Errors and invalid replies


def judge_error(flight: Flight, error: bytes, upstream: Upstream, now: float, took_s: float) -> UpstreamError:
    """Classify the error, and count it for or against the upstream."""
    policy, health = flight.policy, upstream.health
    verdict = upstream_errors.classify(error, policy.family.error_rules)
    flight.note(upstream, flight.last_began, now, f"error: {verdict.kind}")
    flight.billed_as(upstream, outcome_of_error(verdict.kind))
    if verdict.wants_rest:
        health.limited(policy.method.name, now, 1.0)
        note_capacity(upstream, verdict.message, now)
    elif verdict.blame:
        flight.suspect(upstream)
    elif verdict.kind == "unsupported":
        health.method_unsupported(policy.method.name, now, certainly=verdict.lacks_method)
    else:
        health.succeeded(took_s, policy.method.name)
        flight.blame_suspects(now)
    return verdict


def note_capacity(upstream: Upstream, words: str, now: float) -> None:
    """If an upstream that refuses our calls says that the day's or the month's capacity is used up, leave it out until then."""
    period = upstream_errors.exhausted_period(words)
    if period is None:
        return
    meter, today = upstream.health.meter, datetime.datetime.now(datetime.UTC)
    ends = period_end(today.date(), period, 1 if meter is None else meter.billing_day)
    left_s = (datetime.datetime.combine(ends, datetime.time(), datetime.UTC) - today).total_seconds()
    if now >= upstream.health.exhausted_until:
        log.warning("the capacity of an upstream is used up", extra={"upstream": upstream.label, "until": str(ends)})
    upstream.health.capacity_exceeded(now, now + left_s)


def failure_in(headers: ReplyHeaders, body: bytes, id_: bytes) -> str:
    """How the call failed, as price lists name it (`CreditTable.errors`); empty if it did not."""
    if headers.wants_rest:
        return str(headers.status)
    try:
        error = bytes(jsonrpc.read_reply(body, id_).error)
    except ValueError:
        return str(headers.status) if headers.status >= 400 else ""
    return outcome_of_error(upstream_errors.classify(error).kind) if error else ""


def count_invalid_reply(
    flight: Flight, connection: UpstreamConnection, headers: ReplyHeaders, now: float, *, is_foreign: bool
) -> None:
    """Count a reply that is not a JSON-RPC reply to our call against the upstream. `is_foreign`: it has another id."""
    upstream = connection.upstream
    if headers.status < 400:
        # Only a foreign id means that replies are out of step. The next call on the connection may be another client's: it
        # must not fail because of a reply that this one provoked.
        if is_foreign or not connection.sinks:
            connection.fail(OUT_OF_STEP)
        upstream.health.failed(now, by_call=True)
    else:  # A gateway before the upstream sent an HTTP error: the next reply still belongs to the next call.
        flight.suspect(upstream)
        if not flight.policy.may_repeat:
            upstream.health.write_failed(now)


def error_for_caller(flight: Flight, reply: UpstreamReply, verdict: UpstreamError, upstream: Upstream) -> bytes:
    return upstream_errors.translate(
        bytes(reply.error),
        verdict,
        in_our_codes=flight.policy.normalises,
        private=upstream.private_words,
        is_named=bytes(reply.id) == flight.id,
        members=flight.policy.family.error_members,
    )


# Results that may lack the newest blocks


def doubt_of(state: NetworkState, flight: Flight, upstream: Upstream, result: msgspec.Raw) -> str:
    """Why another upstream may have a better result: the result is empty and its upstream may not have the block yet, or the
    upstream was found on another branch while the call was under way."""
    policy, health = flight.policy, upstream.health
    if health.standing == "forked":
        return "the upstream is on another branch"
    if policy.method.empty and health.head < state.heads.tip and policy.family.is_empty(policy.method, bytes(result)):
        return "empty, and the upstream is behind"
    return ""


def may_lack_blocks(
    state: NetworkState, flight: Flight, upstream: Upstream, now: float, result: bytes | msgspec.Raw = b""
) -> bool:
    """Whether a range ends beyond the head of the upstream that sent its logs, while another one may have more. A range that
    ends far beyond any head means all blocks up to the latest. Without a `result`, only the range decides."""
    if state.only is not None or flight.call.is_piece or flight.handed_over:
        return False
    last = flight.policy.last_block(flight.params, state.heads.tip)
    if last <= upstream.health.head or not state.heads.is_plausible(last, now):
        return False
    newest = state.head_reader.newest_block(bytes(result))
    return newest is None or newest < last


# Large results, passed on in pieces as they arrive


def start_of_stream(flight: Flight, headers: ReplyHeaders, beginning: Piece) -> int:
    """The offset of the result, if its only waiter can take it in pieces and it starts like a reply to our call; else 0."""
    waiters = flight.waiters
    if len(waiters) != 1 or not waiters[0].streams or flight.call.reports_head or flight.handed_over:
        return 0
    return result_at(flight.policy, flight.id, headers, beginning)
