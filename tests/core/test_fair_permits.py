"""Permits that clients share: however many take as many as they can, the next one finds some."""

from __future__ import annotations

import sys

import pytest

from proxy.core.fair_permits import FairPermits


def fill(permits: FairPermits, client: str) -> int:
    """Take as many permits as the client may have. Returns how many."""
    before = permits.held_by(client)
    while permits.take(client):
        pass
    return permits.held_by(client) - before


@pytest.mark.parametrize(("most", "share"), [(1, 1), (2, 1), (4, 2), (5, 3), (100, 50)])
def test_client_alone_gets_half_of_the_permits(most: int, share: int) -> None:
    assert fill(FairPermits(most, per_client=sys.maxsize), "one") == share


def test_clients_that_take_as_many_as_they_can_leave_some_to_the_next() -> None:
    permits = FairPermits(64, per_client=sys.maxsize)
    assert [fill(permits, f"client {number}") for number in range(6)] == [32, 16, 8, 4, 2, 1]
    assert permits.free == 1


def test_client_gets_no_more_than_its_own_bound() -> None:
    permits = FairPermits(64, per_client=3)
    assert fill(permits, "one") == 3
    permits.give_back("one")
    assert permits.take("one")
    assert not permits.take("one")


def test_permits_that_are_given_back_are_free_again() -> None:
    permits = FairPermits(8, per_client=8)
    for client in ("one", "two"):
        for _ in range(fill(permits, client)):
            permits.give_back(client)
    assert repr(permits) == "<FairPermits 8 free, 0 held by 0 clients>"
    assert not permits.clients()
