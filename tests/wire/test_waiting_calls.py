"""The queue of calls that wait for a connection: turns of clients, and its bounds."""

from __future__ import annotations

import time

import pytest

from proxy.wire.waiting_calls import OWN_PATIENCE_S, PATIENCE_S, WaitingCall, WaitingCalls, patience_s
from tests.wire.recorded_calls import RecordedCall


def queue_of(*clients: str, since: float = 0.0) -> WaitingCalls:
    waiting = WaitingCalls()
    for number, client in enumerate(clients):
        waiting.push(WaitingCall(RecordedCall(client=client), (b"%d" % number,), client, since, False, False))
    return waiting


def order_of(waiting: WaitingCalls, held: dict[str, int]) -> list[bytes]:
    """All calls in the order in which they are served, if none ends meanwhile."""
    served = []
    while waiting:
        client = waiting.next_client(held)
        held[client] = held.get(client, 0) + 1
        served.append(waiting.pop(client).request[0])
    return served


@pytest.mark.parametrize(
    ("clients", "held", "order"),
    [
        ("aaa", {}, b"012"),
        ("aaabb", {}, b"03142"),
        ("aab", {"a": 3}, b"201"),
        ("abc", {"a": 1, "b": 1}, b"201"),
        ("aabb", {"a": 1, "b": 2}, b"0213"),
    ],
)
def test_client_with_the_fewest_calls_in_flight_comes_first(clients: str, held: dict[str, int], order: bytes) -> None:
    assert b"".join(order_of(queue_of(*clients), held)) == order


def test_places_are_shared_among_the_clients_that_wait() -> None:
    waiting = queue_of("a", "a", "a")
    assert not waiting.exceeds_share("a", 4)
    assert waiting.exceeds_share("a", 3)
    assert not waiting.exceeds_share("b", 3)
    assert queue_of("a", "a", "b").exceeds_share("a", 4)
    assert queue_of("a", "b").exceeds_share("a", 1)


def test_old_calls_are_removed_but_our_own_wait_longer() -> None:
    waiting = queue_of("a", "", since=1.0)
    assert not waiting.take_old(0.9 + PATIENCE_S, PATIENCE_S)
    (old,) = waiting.take_old(1.1 + PATIENCE_S, PATIENCE_S)
    assert (old.client, len(waiting)) == ("a", 1)
    assert len(waiting.take_old(1.1 + OWN_PATIENCE_S, PATIENCE_S)) == 1
    assert not waiting


def test_call_that_is_removed_leaves_its_place() -> None:
    waiting = queue_of("a", "a", "b")
    for call in waiting.all():
        waiting.remove(call.sink)
        waiting.remove(call.sink)
    assert (len(waiting), waiting.all()) == (0, [])


@pytest.mark.parametrize(
    ("crowded_s", "latency_s", "expected"),
    [(0.0, 0.1, PATIENCE_S), (9.0, 0.0, PATIENCE_S), (9.0, 0.1, 0.15), (9.0, 0.001, 0.02), (9.0, 1.0, PATIENCE_S)],
)
def test_patience_ends_with_a_burst(crowded_s: float, latency_s: float, expected: float) -> None:
    assert patience_s(crowded_s, latency_s) == pytest.approx(expected)


def seconds_to_leave(count: int) -> float:
    """The processor time in which the calls of one client leave, the newest first."""
    waiting = queue_of(*("a" * count))
    sinks = [call.sink for call in reversed(waiting.all())]
    began = time.thread_time()
    for sink in sinks:
        waiting.remove(sink)
    took = time.thread_time() - began
    assert (len(waiting), waiting.all()) == (0, [])
    return took


def test_time_in_which_calls_leave_does_not_depend_on_how_many_wait() -> None:
    """16 times as many calls: 16 times the work if each leaves in constant time, 256 times if each looks at the others."""
    few, many = (min(seconds_to_leave(count) for _ in range(5)) for count in (500, 8_000))
    assert many < 64 * few


def test_sink_that_takes_over_a_call_keeps_its_place_and_can_leave() -> None:
    waiting = queue_of("a", "a")
    first, second = waiting.all()
    successor = RecordedCall(client="a")
    waiting.replace(first.sink, successor)
    assert [call.sink for call in waiting.all()] == [successor, second.sink]
    waiting.remove(successor)
    assert waiting.all() == [second]
