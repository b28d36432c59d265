"""The dispatcher's decisions: which upstream gets a call, and when it is retried, hedged or refused.

The events are passed to the dispatcher directly, in one turn of the loop: no reply of the upstreams interferes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from proxy.core.directives import Directives
from proxy.errors import DeadlinePassed, Fault, InternalError, Unavailable, UpstreamTimeout
from proxy.services.rpc.dispatcher import Dispatcher
from proxy.services.rpc.flights import MAX_TRIES, Call, Flight
from proxy.services.rpc.networks import Route
from proxy.services.rpc.waiters import WholeResultWaiter
from proxy.wire.http1 import ReplyHeaders
from proxy.wire.upstream import CROWDED, STALE, Upstream, UpstreamConnection
from tests.rpc_harness import rpc_harness
from tests.web.worker import on_uvloop

READ, WRITE = "eth_getBalance", "eth_sendRawTransaction"
LOST = "connection lost"
PARAMS = b'["0x%b","latest"]' % (b"11" * 20)


class Outcome(WholeResultWaiter):
    """The waiter of a flight."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    def on_result(self, result: Any) -> None:
        self.received.append(bytes(result))

    def on_error(self, error: bytes) -> None:
        self.received.append(error)

    def on_fault(self, fault: Fault) -> None:
        self.received.append(type(fault))


@asynccontextmanager
async def dispatching(upstreams: int = 2) -> AsyncIterator[tuple[Route, Dispatcher]]:
    async with rpc_harness(upstreams) as harness:
        yield harness.route, harness.route.dispatcher
        assert [each.health.inflight for each in harness.route.upstreams] == [0] * upstreams, "an attempt is left"


def new_flight(route: Route, method: str = READ, **of_call: Any) -> tuple[Flight, Outcome]:
    outcome = Outcome()
    call = Call(route.policies[method], PARAMS, client="ann", **of_call)
    return route.dispatcher.new_flight(call, outcome, time.monotonic()), outcome


def launched(route: Route, method: str = READ, **of_call: Any) -> tuple[Flight, Outcome]:
    flight, outcome = new_flight(route, method, **of_call)
    route.dispatcher.launch(flight, flight.began)
    return flight, outcome


def carrier(flight: Flight) -> Upstream:
    """The upstream of the only attempt under way."""
    (found,) = flight.under_way()
    return found


def fails(flight: Flight, reason: str = LOST, *, sent: bool = True) -> Upstream:
    """The only attempt fails. Returns its upstream."""
    upstream = carrier(flight)
    upstream.leave(flight)
    flight.on_fail(upstream, reason, sent=sent)
    return upstream


def replies(flight: Flight, rest: bytes, *, status: int = 200, upstream: Upstream | None = None) -> Upstream:
    """The upstream of the only attempt, or this one, replies. `rest`: the reply after its id."""
    upstream = upstream or carrier(flight)
    upstream.leave(flight)
    body = b'{"jsonrpc":"2.0","id":%b,%b}' % (flight.id, rest)
    head = ReplyHeaders(status, len(body), close=False, plain=True)
    flight.on_reply(UpstreamConnection(upstream), head, body)
    return upstream


def end(flight: Flight) -> None:
    if not flight.done:
        flight.handler.on_abandoned(flight)


def spend_all(dispatcher: Dispatcher) -> None:
    """Spend all retries, and those that the client has for itself."""
    while dispatcher.budget.spend(time.monotonic() + 60.0, "ann"):
        pass


# The choice


@on_uvloop
async def test_only_upstream_is_chosen_unless_it_was_tried_or_takes_no_calls() -> None:
    async with dispatching(1) as (route, dispatcher):
        (only,), now = route.upstreams, time.monotonic()
        call = Call(route.policies[READ], b"[]")
        assert dispatcher.choose(call, now, 0) is only
        assert dispatcher.choose(call, now, 1) is None
        only.health.cordon(cordoned=True, now=now)
        assert dispatcher.choose(call, now, 0) is None


@on_uvloop
async def test_directives_name_the_upstream_and_the_block_that_it_needs() -> None:
    async with dispatching(3) as (route, dispatcher):
        now, (one, two, three) = time.monotonic(), route.upstreams
        three.health.saw_head(two.health.head + 1, now)
        for directives, expected in (
            (Directives(upstream=two.label), two),
            (Directives(min_block=three.health.head), three),
            (Directives(upstream=one.label, min_block=three.health.head), None),
        ):
            call = Call(route.policies[READ], b"[]", directives=directives)
            assert {dispatcher.choose(call, now, 0) for _ in range(20)} == {expected}


@on_uvloop
async def test_upstream_that_has_the_block_is_preferred() -> None:
    async with dispatching(2) as (route, dispatcher):
        now, (one, two) = time.monotonic(), route.upstreams
        two.health.saw_head(one.health.head + 1, now)
        call = Call(route.policies[READ], b"[]", least_head=two.health.head)
        assert {dispatcher.choose(call, now, 0) for _ in range(20)} == {two}
        assert dispatcher.choose(call, now, 0b10) is one, "one that is behind is better than none"


@on_uvloop
async def test_write_avoids_an_upstream_whose_writes_fail() -> None:
    async with dispatching(2) as (route, dispatcher):
        now, (one, two) = time.monotonic(), route.upstreams
        for _ in range(3):
            one.health.write_failed(now)
        write, read = Call(route.policies[WRITE], b"[]"), Call(route.policies[READ], b"[]")
        assert {dispatcher.choose(write, now, 0) for _ in range(20)} == {two}
        assert {dispatcher.choose(read, now, 0) for _ in range(20)} == {one, two}
        assert dispatcher.choose(write, now, 0b10) is one, "one that is doubtful is better than none"


# Refusals


@on_uvloop
async def test_call_is_refused_if_no_upstream_takes_calls() -> None:
    async with dispatching() as (route, _):
        for upstream in route.upstreams:
            upstream.health.cordon(cordoned=True, now=time.monotonic())
        flight, outcome = launched(route)
        assert (outcome.received, flight.done, flight.tries) == ([Unavailable], True, 0)


@on_uvloop
async def test_call_that_waited_too_long_goes_to_another_upstream_or_is_refused() -> None:
    async with dispatching() as (route, dispatcher):
        spend_all(dispatcher)
        flight, outcome = launched(route)
        first = fails(flight, CROWDED, sent=False)
        assert carrier(flight) is not first, "a refused call puts no load on an upstream, so it needs no budget"
        fails(flight, CROWDED, sent=False)
        assert (outcome.received, flight.done) == ([Unavailable], True)
        assert [each.health.bad for each in route.upstreams] == [0, 0]


# Retries


@on_uvloop
async def test_failed_read_is_sent_to_another_upstream() -> None:
    async with dispatching() as (route, _):
        flight, outcome = launched(route)
        failed = fails(flight)
        assert carrier(flight) is not failed
        assert failed.health.bad == 1
        answered = replies(flight, b'"result":"0x1"')
        assert (outcome.received, flight.answered_by, flight.tries) == ([b'"0x1"'], answered, 2)


@on_uvloop
async def test_read_that_fails_everywhere_ends_after_the_most_attempts() -> None:
    async with dispatching(MAX_TRIES + 1) as (route, _):
        flight, outcome = launched(route)
        tried = [fails(flight) for _ in range(MAX_TRIES)]
        assert len(set(tried)) == MAX_TRIES, "each upstream was tried once"
        assert (outcome.received, flight.done) == ([InternalError], True)


@on_uvloop
async def test_only_upstream_is_tried_again_on_another_connection() -> None:
    async with dispatching(1) as (route, _):
        flight, _ = launched(route)
        fails(flight)
        assert (carrier(flight), flight.tries) == (route.only, 2)
        end(flight)


@on_uvloop
async def test_stale_connection_is_replaced_without_a_retry_elsewhere() -> None:
    async with dispatching() as (route, dispatcher):
        spend_all(dispatcher)
        flight, _ = launched(route)
        stale = fails(flight, STALE)
        assert carrier(flight) is stale
        assert stale.health.bad == 0
        end(flight)


@on_uvloop
async def test_write_is_retried_only_if_it_was_not_sent() -> None:
    async with dispatching() as (route, _):
        flight, outcome = launched(route, WRITE)
        first = fails(flight, "connection refused", sent=False)
        assert carrier(flight) is not first
        fails(flight, LOST, sent=True)
        assert (outcome.received, flight.tries) == ([InternalError], 2)


@on_uvloop
async def test_directive_forbids_retries() -> None:
    async with dispatching() as (route, _):
        flight, outcome = launched(route, directives=Directives(retry=0))
        fails(flight)
        assert (outcome.received, flight.tries) == ([InternalError], 1)


@on_uvloop
async def test_retry_of_a_call_that_was_sent_needs_budget() -> None:
    async with dispatching() as (route, dispatcher):
        spend_all(dispatcher)
        sent, outcome = launched(route)
        fails(sent)
        assert (outcome.received, sent.tries) == ([InternalError], 1)
        unsent, _ = launched(route)
        fails(unsent, "connection refused", sent=False)
        assert unsent.tries == 2
        end(unsent)


@on_uvloop
async def test_rate_limited_call_goes_elsewhere_even_if_it_is_a_write() -> None:
    async with dispatching() as (route, _):
        flight, outcome = launched(route, WRITE)
        limited = replies(flight, b'"result":"0x1"', status=429)
        assert carrier(flight) is not limited
        assert (limited.health.bad, limited.health.free) == (0, False), "it rests, and has not failed"
        replies(flight, b'"result":"0x2"')
        assert outcome.received == [b'"0x2"']


@on_uvloop
async def test_invalid_reply_is_retried_and_counted() -> None:
    async with dispatching() as (route, _):
        flight, outcome = launched(route)
        invalid = replies(flight, b'"result":')
        assert (carrier(flight) is not invalid, invalid.health.bad) == (True, 1)
        replies(flight, b'"result":"0x1"')
        assert outcome.received == [b'"0x1"']


@on_uvloop
async def test_error_about_the_call_is_delivered_and_one_about_the_upstream_is_not() -> None:
    async with dispatching() as (route, _):
        flight, outcome = launched(route)
        lacking = replies(flight, b'"error":{"code":-32601,"message":"the method does not exist"}')
        assert carrier(flight) is not lacking
        replies(flight, b'"error":{"code":-32602,"message":"invalid argument 0"}')
        (error,) = outcome.received
        assert b"invalid argument 0" in error
        assert flight.done


@on_uvloop
async def test_write_that_an_upstream_failed_to_execute_is_not_sent_to_another() -> None:
    async with dispatching() as (route, _):
        flight, outcome = launched(route, WRITE)
        replies(flight, b'"error":{"code":-32603,"message":"internal error"}')
        assert (len(outcome.received), flight.done, flight.tries) == (1, True, 1)


# Hedges and deadlines


@on_uvloop
async def test_late_read_is_sent_to_a_second_upstream_and_the_first_reply_counts() -> None:
    async with dispatching() as (route, dispatcher):
        flight, outcome = launched(route)
        first = carrier(flight)
        late = flight.began + route.state.group.hedge_after_s(first.health) + 0.01
        flight.on_tick(None, late - 0.02)
        assert flight.under_way() == [first], "it is not late yet"
        flight.on_tick(None, late)
        (second,) = (each for each in flight.under_way() if each is not first)
        replies(flight, b'"result":"0x1"', upstream=second)
        assert (outcome.received, flight.under_way(), flight.answered_by) == ([b'"0x1"'], [], second)
        assert dispatcher.state.flights == {}


@on_uvloop
async def test_third_attempt_of_a_late_read_replaces_the_oldest() -> None:
    async with dispatching(3) as (route, _):
        flight, _ = launched(route)
        seen = flight.under_way()
        flight.on_tick(None, flight.began + 3.0)
        seen += [each for each in flight.under_way() if each not in seen]
        flight.on_tick(None, flight.began + 6.0)
        assert (flight.tries, len(flight.under_way())) == (3, 2)
        assert seen[0] not in flight.under_way()
        end(flight)


@on_uvloop
async def test_late_call_is_not_hedged_if_it_is_a_write_or_the_budget_is_spent() -> None:
    async with dispatching() as (route, dispatcher):
        write, _ = launched(route, WRITE)
        write.on_tick(None, write.began + 3.0)
        assert write.tries == 1
        spend_all(dispatcher)
        read, _ = launched(route)
        read.on_tick(None, read.began + 3.0)
        assert read.tries == 1
        for flight in (read, write):
            end(flight)


@on_uvloop
async def test_read_but_no_write_is_repeated_at_an_upstream_that_was_silent_and_is_back() -> None:
    async with dispatching(1) as (route, _):
        (only,) = route.upstreams
        for method, tries in ((READ, 2), (WRITE, 1)):
            flight, _ = launched(route, method)
            only.health.head_poll_failed(flight.began)
            only.health.head_reported(0.01, flight.began + 1.0)
            flight.on_tick(None, flight.began + 3.0)
            assert (flight.tries, flight.under_way()) == (tries, [only])
            end(flight)


@on_uvloop
async def test_call_for_a_block_is_not_repeated_at_an_upstream_that_is_back_without_the_block() -> None:
    async with dispatching(2) as (route, dispatcher):
        least = route.heads.tip
        flight, _ = new_flight(route, directives=Directives(min_block=least))
        dispatcher.launch(flight, flight.began)
        asked = carrier(flight)
        (other,) = [each for each in route.upstreams if each is not asked]
        other.health.saw_head(least - 1, flight.began)
        other.health.head_poll_failed(flight.began)
        other.health.head_reported(0.01, flight.began + 1.0)
        flight.on_tick(None, flight.began + 3.0)
        assert flight.under_way() == [asked]
        other.health.saw_head(least, flight.began)
        flight.on_tick(None, flight.began + 3.0)
        assert other in flight.under_way()
        end(flight)


@on_uvloop
async def test_call_ends_at_its_deadline() -> None:
    async with dispatching() as (route, dispatcher):
        flight, outcome = launched(route)
        flight.on_tick(None, flight.began + dispatcher.call_timeout_s + 1.0)
        assert (outcome.received, flight.done) == ([UpstreamTimeout], True)
        own, outcome = new_flight(route, directives=Directives(timeout_ms=50))
        dispatcher.launch(own, own.began)
        dispatcher._expire(own)
        assert (outcome.received, own.done) == ([DeadlinePassed], True)


# Results


@on_uvloop
async def test_head_never_goes_back() -> None:
    async with dispatching() as (route, _):
        tip = route.heads.tip
        flight, outcome = launched(route, "eth_blockNumber", reports_head=True)
        replies(flight, b'"result":"%b"' % hex(tip - 1).encode())
        assert outcome.received == [b'"%b"' % hex(tip).encode()]


@on_uvloop
async def test_reply_from_before_the_newest_block_is_asked_again_of_the_upstream_that_has_it() -> None:
    async with dispatching(3) as (route, _):
        flight, outcome = launched(route, "eth_getBlockByNumber", reports_head=True)
        holder, tip = carrier(flight), route.heads.tip + 1
        # The block is announced while the call is under way. The reply was read before it.
        route.state.compare_number(tip, holder.health, time.monotonic())
        replies(flight, b'"result":{"number":"%b"}' % hex(tip - 1).encode())
        assert carrier(flight) is holder, "the others do not have the block"
        replies(flight, b'"result":{"number":"%b"}' % hex(tip).encode())
        assert outcome.received == [b'{"number":"%b"}' % hex(tip).encode()]


@on_uvloop
async def test_impossible_block_of_two_upstreams_of_one_operator_leaves_an_attempt_for_another_operator() -> None:
    async with dispatching(4) as (route, _):
        one, two, three, four = route.upstreams
        for upstream, operator in ((one, "a"), (two, "b"), (three, "a"), (four, "c")):
            upstream.health.operator = operator
        impossible = b'"result":{"number":"%b"}' % hex(route.heads.tip + 1_000_000).encode()
        for _ in range(20):
            flight, outcome = launched(route, "eth_getBlockByNumber", reports_head=True, holder=one)
            asked = [replies(flight, impossible) for _ in range(2)]
            asked.append(replies(flight, b'"result":{"number":"%b"}' % hex(route.heads.tip).encode()))
            assert {each.health.operator for each in asked} == {"a", "b", "c"}
            assert flight.done
            assert outcome.received
            for upstream in route.upstreams:
                upstream.health.succeeded(0.01, READ)


@on_uvloop
async def test_result_of_an_upstream_that_is_found_on_another_branch_is_a_last_resort() -> None:
    for is_another_left in (True, False):
        async with dispatching(2) as (route, _):
            flight, outcome = launched(route)
            forked = carrier(flight)
            forked.health.set_standing("forked", time.monotonic())
            if not is_another_left:
                spend_all(route.dispatcher)
            replies(flight, b'"result":"0x1"')
            if is_another_left:
                assert (outcome.received, carrier(flight) is not forked) == ([], True)
                replies(flight, b'"result":"0x2"')
            assert outcome.received == [b'"0x2"' if is_another_left else b'"0x1"']


@on_uvloop
async def test_empty_result_of_an_upstream_that_is_behind_is_kept_until_another_has_replied() -> None:
    method = "eth_getTransactionReceipt"
    async with dispatching() as (route, _):
        flight, outcome = launched(route, method)
        behind = carrier(flight)
        behind.health.saw_head(route.heads.tip - 1, time.monotonic())
        replies(flight, b'"result":null')
        assert (outcome.received, carrier(flight) is not behind) == ([], True)
        fails(flight)
        assert carrier(flight) is behind, "no other upstream is left, so a failed call may go to the same one again"
        fails(flight)
        assert outcome.received == [b"null"]
