"""Room for deliveries: nobody takes another's, however slow."""

from __future__ import annotations

import random
from collections.abc import Iterable

from proxy.core.lanes import Lanes


def run(lanes: Lanes, receiver: str, times: int, *, took_s: float = 0.01, ok: bool = True) -> None:
    for _ in range(times):
        lanes.begin(receiver)
        lanes.end(receiver, took_s=took_s, ok=ok)


def test_receiver_begins_with_one_and_success_doubles_it() -> None:
    lanes = Lanes(total=100, each=8)
    seen = []
    for _ in range(5):
        seen.append(lanes.rooms(["a"])["a"])
        run(lanes, "a", 1)
    assert seen == [1, 2, 4, 8, 8]


def test_failure_halves_it_down_to_one() -> None:
    lanes = Lanes(total=100, each=8)
    run(lanes, "a", 3)
    seen = []
    for _ in range(4):
        seen.append(lanes.rooms(["a"])["a"])
        run(lanes, "a", 1, ok=False)
    assert seen == [8, 4, 2, 1]


def test_what_is_under_way_takes_its_place() -> None:
    lanes = Lanes(total=100, each=8)
    run(lanes, "a", 3)
    for left in range(8, 0, -1):
        assert lanes.rooms(["a"]) == {"a": left}
        lanes.begin("a")
    assert lanes.rooms(["a"]) == {}


def fill(lanes: Lanes, names: Iterable[str]) -> None:
    for name, room in lanes.rooms(names).items():
        for _ in range(room):
            lanes.begin(name)


def test_worse_ones_leave_room_for_the_better_however_many_they_are() -> None:
    lanes = Lanes(total=16, each=4)
    slow, good = [f"slow {n}" for n in range(30)], [f"good {n}" for n in range(30)]
    for name in slow:
        run(lanes, name, 3, took_s=5.0)
    for name in good:
        run(lanes, name, 3)
    for _ in range(5):
        fill(lanes, slow)
    assert lanes.busy == 8
    for _ in range(5):
        fill(lanes, [*slow, *(f"new {n}" for n in range(30))])
    assert lanes.busy == 12
    for _ in range(5):
        fill(lanes, [*slow, "another new", *good])
    assert lanes.busy == 16
    assert repr(lanes).startswith("<Lanes {'slow': 8, 'new': 4, 'good': 4} of 16;")


def test_one_that_answers_again_counts_as_good_with_all_it_has() -> None:
    lanes = Lanes(total=8, each=4)
    run(lanes, "a", 2, took_s=2.0)
    run(lanes, "b", 1, ok=False)
    fill(lanes, ["a"])
    assert lanes.busy == 4
    assert lanes.rooms(["b"]) == {}
    lanes.end("a", took_s=0.1, ok=True)
    assert lanes.rooms(["b"]) == {"b": 1}


def test_what_is_free_is_shared() -> None:
    lanes = Lanes(total=12, each=10)
    for name in "abc":
        run(lanes, name, 4)
    assert lanes.rooms("abc") == {"a": 4, "b": 4, "c": 4}


def test_counts_come_out_even_whatever_happens() -> None:
    chance = random.Random(1)
    lanes = Lanes(total=20, each=6)
    running: list[str] = []
    for _ in range(5000):
        for name, room in lanes.rooms([f"r{chance.randrange(8)}"]).items():
            for _ in range(room):
                lanes.begin(name)
                running.append(name)
        assert lanes.busy == len(running) <= 20
        for _ in range(chance.randrange(6)):
            if running:
                lanes.end(
                    running.pop(chance.randrange(len(running))), took_s=chance.random() * 2, ok=chance.random() < 0.8
                )
    for name in running:
        lanes.end(name, took_s=0.0, ok=True)
    assert repr(lanes) == "<Lanes {'slow': 0, 'new': 0, 'good': 0} of 20; 8 receivers>"


def test_receivers_with_nothing_under_way_are_forgotten_in_the_end() -> None:
    lanes = Lanes(total=20, each=6)
    lanes.begin("kept")
    for place in range(25_000):
        lanes.rooms([str(place)])
    assert len(lanes._lanes) <= 10_001
    assert lanes.lane("kept").busy == 1
