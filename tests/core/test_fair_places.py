"""Places that clients share: however many take as many as they can, the next one finds some."""

from __future__ import annotations

import sys

import pytest

from proxy.core.fair_places import FairPlaces


def fill(places: FairPlaces, client: str) -> int:
    """Take as many places as the client may have. Returns how many."""
    before = places.held_by(client)
    while places.take(client):
        pass
    return places.held_by(client) - before


@pytest.mark.parametrize(("most", "share"), [(1, 1), (2, 1), (4, 2), (5, 3), (100, 50)])
def test_client_alone_gets_half_of_the_places(most: int, share: int) -> None:
    assert fill(FairPlaces(most, per_client=sys.maxsize), "one") == share


def test_clients_that_take_as_many_as_they_can_leave_some_to_the_next() -> None:
    places = FairPlaces(64, per_client=sys.maxsize)
    assert [fill(places, f"client {number}") for number in range(6)] == [32, 16, 8, 4, 2, 1]
    assert places.free == 1


def test_client_gets_no_more_than_its_own_bound() -> None:
    places = FairPlaces(64, per_client=3)
    assert fill(places, "one") == 3
    places.give_back("one")
    assert places.take("one")
    assert not places.take("one")


def test_places_that_are_given_back_are_free_again() -> None:
    places = FairPlaces(8, per_client=8)
    for client in ("one", "two"):
        for _ in range(fill(places, client)):
            places.give_back(client)
    assert repr(places) == "<FairPlaces 8 free, 0 held by 0 clients>"
    assert not places.clients()
