"""Clients take turns, whatever each of them has waiting."""

from __future__ import annotations

from proxy.core.round_robin import RoundRobin


def filled(items: str) -> RoundRobin[str]:
    queue: RoundRobin[str] = RoundRobin()
    for item in items.split():
        queue.add(item[0], item)
    return queue


def test_clients_take_turns_and_keep_the_order_of_their_items() -> None:
    queue = filled("a1 a2 a3 b1 c1 c2")
    assert (len(queue), [*queue]) == (6, ["a", "b", "c"])
    assert [queue.pop_next() for _ in range(6)] == ["a1", "b1", "c1", "a2", "c2", "a3"]
    assert not queue


def test_client_that_is_served_out_of_turn_comes_last() -> None:
    queue = filled("a1 b1 b2 c1")
    assert queue.pop("b") == "b1"
    assert [*queue] == ["a", "c", "b"]
    assert queue.first_of("a") == "a1"


def test_item_is_discarded_once() -> None:
    queue = filled("a1 b1 b2")
    queue.discard("a", "a1")
    queue.discard("a", "a1")
    queue.discard("b", "b1")
    assert (queue.count_of("a"), queue.count_of("b")) == (0, 1)
    assert (queue.first_of("a"), queue.first_of("b")) == (None, "b2")
    assert [*queue] == ["b"]
