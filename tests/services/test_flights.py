"""Flights: every event in every state, the attempts, and the waiters."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, get_args

import pytest

from proxy.core.directives import Directives
from proxy.errors import Fault, Unavailable
from proxy.services.rpc.flights import (
    MAX_TRIES,
    TRANSITIONS,
    Call,
    Flight,
    FlightEvent,
    FlightState,
    all_but,
)
from proxy.services.rpc.networks import Route
from proxy.services.rpc.waiters import ABSENT_WAITER, WholeResultWaiter
from proxy.wire.upstream import Piece, UpstreamConnection
from tests.keys import key_of
from tests.rpc_harness import rpc_harness
from tests.web.worker import on_uvloop


class RecordingWaiter(WholeResultWaiter):
    def __init__(self) -> None:
        self.received: list[Any] = []

    def on_result(self, result: Any) -> None:
        self.received.append(result)

    def on_error(self, error: bytes) -> None:
        self.received.append(error)

    def on_fault(self, fault: Fault) -> None:
        self.received.append(fault)


class BrokenWaiter(RecordingWaiter):
    def on_result(self, result: Any) -> None:
        raise RuntimeError("broken")

    def on_error(self, error: bytes) -> None:
        raise RuntimeError("broken")

    def on_fault(self, fault: Fault) -> None:
        raise RuntimeError("broken")


class StreamWaiter(RecordingWaiter):
    streams = True

    def on_stream(self, beginning: memoryview, left: int | None, connection: UpstreamConnection) -> None:
        self.received.append(("beginning", bytes(beginning), left))

    def on_stream_piece(self, piece: Piece) -> None:
        self.received.append(bytes(piece))

    def on_stream_end(self) -> None:
        self.received.append("end")

    def on_stream_broken(self) -> None:
        self.received.append("broken")


@asynccontextmanager
async def route_to(upstreams: int = 2) -> AsyncIterator[Route]:
    async with rpc_harness(upstreams) as harness:
        yield harness.route


def flight_of(route: Route, waiter: Any = None, method: str = "eth_getBalance", **of_call: Any) -> Flight:
    call = Call(route.policies[method], b"[]", **of_call)
    return Flight(route.dispatcher, call, waiter or StreamWaiter(), 10.0, tip=route.state.tip)


def connection_to(route: Route) -> UpstreamConnection:
    return UpstreamConnection(route.upstreams[0])


def raises_event(flight: Flight, event: FlightEvent, route: Route) -> None:
    match event:
        case "hand_over":
            flight.hand_over()
        case "stream":
            flight.begin_stream(connection_to(route), memoryview(b"1"), None)
        case "end":
            flight.end()


# The events that lead to each state.
PATHS: dict[FlightState, list[FlightEvent]] = {
    "open": [],
    "handed_over": ["hand_over"],
    "streaming": ["stream"],
    "done": ["end"],
}


def test_table_has_every_state_and_known_events_only() -> None:
    assert set(TRANSITIONS) == set(get_args(FlightState)) == set(PATHS)
    assert {event for events in TRANSITIONS.values() for event in events} == set(get_args(FlightEvent))
    assert not TRANSITIONS["done"], "nothing happens to a flight that is done"
    assert all("end" in TRANSITIONS[state] for state in TRANSITIONS if state != "done"), "every flight can end"


@pytest.mark.parametrize("event", get_args(FlightEvent))
@pytest.mark.parametrize("state", get_args(FlightState))
@on_uvloop
async def test_event_follows_the_table(state: FlightState, event: FlightEvent) -> None:
    async with route_to() as route:
        flight = flight_of(route)
        for earlier in PATHS[state]:
            raises_event(flight, earlier, route)
        assert flight.state == state
        following = TRANSITIONS[state].get(event)
        if following is None:
            with pytest.raises(KeyError):
                raises_event(flight, event, route)
            following = state
        else:
            raises_event(flight, event, route)
        assert flight.state == following
        assert (flight.done, flight.streaming, flight.handed_over) == (
            following == "done",
            following == "streaming",
            following == "handed_over",
        )


@on_uvloop
async def test_attempts_are_counted_and_listed() -> None:
    async with route_to() as route:
        flight, (one, two) = flight_of(route), route.upstreams
        flight.begin(one, 11.0)
        flight.begin(two, 12.0)
        assert (flight.tries, flight.tried, flight.under_way()) == (2, 0b11, [one, two])
        assert [each.health.inflight for each in (one, two)] == [1, 1]
        assert flight.newest(13.0) == (two, 1.0)
        assert flight.ended(one) == 11.0
        assert (flight.is_carried_by(one), flight.is_carried_by(two), flight.is_under_way()) == (False, True, True)
        flight.ended(two)
        assert not flight.is_under_way()
        assert [each.health.inflight for each in (one, two)] == [0, 0]


@on_uvloop
async def test_third_attempt_takes_the_place_of_the_older_one() -> None:
    async with route_to() as route:
        flight, (one, two) = flight_of(route), route.upstreams
        flight.begin(one, 11.0)
        flight.leave_older(11.5)
        assert flight.under_way() == [one], "one attempt leaves room for another"
        flight.begin(two, 12.0)
        flight.leave_older(13.0)
        assert flight.under_way() == [two]
        assert flight.attempts(13.0)[0][3] == "given up: too slow"
        flight.ended(two)


@on_uvloop
async def test_answered_flight_gives_up_the_other_attempt() -> None:
    async with route_to() as route:
        flight, (one, two) = flight_of(route), route.upstreams
        flight.begin(one, 11.0)
        flight.begin(two, 12.0)
        flight.ended(two)
        flight.reply_arrived(two)
        flight.end()
        flight.leave_attempts(13.0)
        assert flight.answered_label == two.label
        assert [outcome for *_, outcome in flight.attempts(13.0)] == [
            "answered",
            "given up: another upstream was faster",
        ]
        assert [each.health.inflight for each in (one, two)] == [0, 0]


@on_uvloop
async def test_stream_leaves_the_other_attempt_and_ends_once() -> None:
    async with route_to() as route:
        for end, last in ((Flight.end_stream, "end"), (Flight.break_stream, "broken")):
            waiter = StreamWaiter()
            flight, (one, two) = flight_of(route, waiter), route.upstreams
            flight.begin(one, 11.0)
            flight.begin(two, 12.0)
            flight.begin_stream(connection_to(route), memoryview(b"[1"), 9)
            assert flight.under_way() == [one]
            flight.on_piece(connection_to(route), b",2]")
            flight.ended(one)
            end(flight)
            assert waiter.received == [("beginning", b"[1", 9), b",2]", last]
            assert flight.done


@on_uvloop
async def test_call_for_one_upstream_excludes_the_others() -> None:
    async with route_to(3) as route:
        middle = route.upstreams[1]
        flight = flight_of(route, excluded=all_but(middle))
        choose = route.dispatcher.choose
        assert choose(flight.call, 11.0, flight.tried) is middle
        flight.begin(middle, 11.0)
        assert choose(flight.call, 11.0, flight.tried) is None
        assert choose(flight.call, 11.0, flight.call.excluded) is middle
        flight.ended(middle)
        flight.start_over()
        assert (flight.tried, flight.tries) == (flight.call.excluded, 0)


@on_uvloop
async def test_directives_bound_the_attempts_and_the_block() -> None:
    async with route_to() as route:
        assert flight_of(route).most_tries == MAX_TRIES
        flight, one = flight_of(route, directives=Directives(retry=0, min_block=1 << 40)), route.upstreams[0]
        flight.begin(one, 11.0)
        assert (flight.most_tries, flight.block) == (1, 1 << 40)
        flight.ended(one)


@on_uvloop
async def test_most_useful_error_and_the_fallback_are_kept() -> None:
    async with route_to() as route:
        flight = flight_of(route)
        for error, weight in ((b"weak", 1), (b"strong", 3), (b"middle", 2)):
            flight.note_error(error, weight)
        flight.keep_fallback(b"[]")
        assert (flight.fallback_error, flight.fallback_weight, flight.fallback_result) == (b"strong", 3, b"[]")


@on_uvloop
async def test_suspects_are_blamed_once_another_upstream_replies() -> None:
    async with route_to() as route:
        flight, (one, two) = flight_of(route), route.upstreams
        before = one.health.failures_in_a_row
        flight.suspect(one)
        assert one.health.failures_in_a_row == before
        flight.blame_suspects(11.0)
        flight.blame_suspects(12.0)
        assert one.health.failures_in_a_row == before + 1
        assert not two.health.failures_in_a_row


# Waiters


@on_uvloop
async def test_read_is_abandoned_when_the_last_waiter_leaves() -> None:
    async with route_to() as route:
        first: Any = RecordingWaiter()
        second: Any = RecordingWaiter()
        flight = flight_of(route, first, client="one")
        flight.join(second, "two", None)
        flight.leave(RecordingWaiter())
        flight.leave(first)
        assert flight.state == "open"
        assert flight.waiters == [ABSENT_WAITER, second]
        flight.leave(second)
        assert flight.done


@pytest.mark.parametrize(("method", "ends"), [("eth_getBalance", True), ("eth_sendRawTransaction", False)])
@on_uvloop
async def test_write_is_completed_without_its_waiter(method: str, ends: bool) -> None:
    async with route_to() as route:
        waiter = RecordingWaiter()
        flight = flight_of(route, waiter, method)
        flight.leave(waiter)
        assert flight.done == ends


@on_uvloop
async def test_call_passes_to_the_next_account_that_joined() -> None:
    async with route_to() as route:
        flight = flight_of(route, client="one")
        for client in ("one", "two", "two", "three"):
            flight.join(RecordingWaiter(), client, None)  # type: ignore[arg-type]
        assert (flight.client, flight.joined_by) == ("one", ("two", "three"))
        flight.pass_on()
        assert (flight.client, flight.joined_by, flight.call.client) == ("two", ("three",), "one")


@on_uvloop
async def test_joined_callers_that_left_are_not_taken_along() -> None:
    async with route_to() as route:
        stays: Any = RecordingWaiter()
        leaves: Any = RecordingWaiter()
        flight = flight_of(route, client="one")
        payer = key_of()
        flight.join(stays, "two", payer)
        flight.join(leaves, "three", None)
        flight.leave(leaves)
        ((caller, alone),) = flight.take_joined()
        assert caller is stays
        assert (len(flight.waiters), flight.joined, flight.joined_by) == (1, None, ())
        assert (alone.policy, alone.params, alone.client, alone.cache_key) == (flight.policy, b"[]", "two", None)
        assert alone.payer is payer


@on_uvloop
async def test_charge_finds_its_payer() -> None:
    """The fault that is about to be delivered, the first caller that counts, or the usage of the key."""
    key = key_of()
    async with route_to() as route:
        fault, flight = Unavailable("down"), flight_of(route)
        flight.charge(key, 0, None)
        flight.charge(key, 5, fault)
        assert fault.take_kept() == (5, False)
        flight.charge(key, 7, None)
        assert key.tallies[flight.policy.tally].units == 7


@on_uvloop
async def test_broken_waiter_does_not_affect_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async with route_to(1) as route:
        flight, other = flight_of(route, BrokenWaiter()), RecordingWaiter()
        flight.waiters.append(other)
        fault = Unavailable("down")
        flight.deliver(b"1")
        flight.deliver_error(b"{}")
        flight.deliver_fault(fault)
        assert other.received == [b"1", b"{}", fault]
    assert [each.message for each in caplog.records].count("a reply was not delivered") == 3
