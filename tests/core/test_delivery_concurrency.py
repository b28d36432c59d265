"""Delivery limits: no receiver and no account takes the places of another, however slow it is."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import pytest

from proxy.core.delivery_concurrency import Lanes, receiver_of


def alone(names: Iterable[str]) -> dict[str, str]:
    """Webhooks that have a receiver each, of their own name."""
    return {name: name for name in names}


def rooms(lanes: Lanes, waiting: dict[str, str]) -> dict[str, int]:
    """Every webhook has its own account."""
    return lanes.rooms(waiting, {webhook: webhook for webhook in waiting})


def run(lanes: Lanes, receiver: str, times: int, *, took_s: float = 0.01, ok: bool = True) -> None:
    """Deliveries of a webhook whose account has the receiver's name."""
    for _ in range(times):
        lanes.begin(receiver, receiver)
        lanes.end(receiver, receiver, took_s=took_s, ok=ok)


def test_lane_begins_with_one_and_success_doubles_it() -> None:
    lanes = Lanes(total=200, each=16)
    seen = []
    for _ in range(5):
        seen.append(rooms(lanes, alone("a"))["a"])
        run(lanes, "a", 1)
    assert seen == [1, 2, 4, 8, 8]


def test_failure_halves_it_down_to_one() -> None:
    lanes = Lanes(total=200, each=16)
    run(lanes, "a", 3)
    seen = []
    for _ in range(4):
        seen.append(rooms(lanes, alone("a"))["a"])
        run(lanes, "a", 1, ok=False)
    assert seen == [8, 4, 2, 1]


def test_delivery_in_flight_takes_a_place() -> None:
    lanes = Lanes(total=200, each=16)
    run(lanes, "a", 3)
    for left in range(8, 0, -1):
        assert rooms(lanes, alone("a")) == {"a": left}
        lanes.begin("a", "a")
    assert rooms(lanes, alone("a")) == {}


def fill(lanes: Lanes, names: Iterable[str]) -> None:
    for name, room in rooms(lanes, alone(names)).items():
        for _ in range(room):
            lanes.begin(name, name)


def test_worse_ones_leave_room_for_the_better_however_many_they_are() -> None:
    lanes = Lanes(total=16, each=8)
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


def test_worse_receivers_of_an_account_leave_room_for_its_better_ones() -> None:
    lanes = Lanes(total=32, each=8)
    good, slow = [f"good {n}" for n in range(20)], [f"slow {n}" for n in range(20)]
    for name in (*good, *slow):
        for _ in range(3):
            lanes.begin("one", name)
            lanes.end("one", name, took_s=0.01 if name in good else 5.0, ok=True)
    given = lanes.rooms(alone(slow), dict.fromkeys(slow, "one"))
    assert sum(given.values()) == 8
    given = lanes.rooms(alone([*slow, *good]), dict.fromkeys([*slow, *good], "one"))
    assert sum(given.values()) == 16
    assert sum(given.get(name, 0) for name in slow) <= 8


def test_one_that_answers_again_counts_as_good_with_all_it_has() -> None:
    lanes = Lanes(total=8, each=8)
    run(lanes, "a", 2, took_s=2.0)
    run(lanes, "b", 1, ok=False)
    for name in "aacd":
        lanes.lane(name, name).kind = "slow"
        lanes.begin(name, name)
    assert rooms(lanes, alone("b")) == {}
    lanes.end("a", "a", took_s=0.1, ok=True)
    assert rooms(lanes, alone("b")) == {"b": 1}


def test_free_places_are_shared() -> None:
    lanes = Lanes(total=12, each=10)
    for name in "abc":
        run(lanes, name, 4)
    # As many are free as each has.
    assert rooms(lanes, alone("abc")) == {"a": 3, "b": 3, "c": 3}


def test_scarce_places_rotate_among_receivers_and_none_starves() -> None:
    lanes = Lanes(total=4, each=4)
    served: Counter[str] = Counter()
    for _ in range(30):
        given = rooms(lanes, alone(f"{n:02}" for n in range(20)))
        served.update(given)
        for name, room in given.items():
            run(lanes, name, room)
        assert lanes.busy == 0
    assert len(served) == 20
    assert max(served.values()) - min(served.values()) <= 4


def test_busy_account_comes_after_idle_ones() -> None:
    lanes = Lanes(total=4, each=4)
    run(lanes, "a", 3)
    for _ in range(2):
        lanes.begin("a", "a")
    assert rooms(lanes, alone("abcd")) == {"b": 1, "c": 1}


def test_account_with_many_receivers_gets_no_more_than_one_with_few() -> None:
    lanes = Lanes(total=40, each=40)
    many = [f"many {n}" for n in range(30)]
    waiting, accounts = {**alone(many), "few": "few"}, {**dict.fromkeys(many, "many"), "few": "few"}
    for _ in range(5):
        lanes.begin("few", "few")
        lanes.end("few", "few", took_s=0.01, ok=True)
    given = lanes.rooms(waiting, accounts)
    of_many = sum(room for name, room in given.items() if name != "few")
    assert given["few"] >= of_many
    assert of_many >= 10


def test_webhooks_of_one_lane_share_its_places_and_take_turns() -> None:
    lanes = Lanes(total=100, each=8)
    run(lanes, "host", 4)
    webhooks = {f"wh_{n}": "host" for n in range(6)}
    accounts = dict.fromkeys(webhooks, "host")
    first = lanes.rooms(webhooks, accounts)
    assert first == {"wh_0": 1, "wh_1": 1, "wh_2": 1, "wh_3": 1}
    assert lanes.rooms(webhooks, accounts) == {"wh_4": 1, "wh_5": 1, "wh_0": 1, "wh_1": 1}
    few = {"wh_1": "host", "wh_2": "host", "wh_3": "host"}
    assert lanes.rooms(few, accounts) == {"wh_2": 2, "wh_3": 1, "wh_1": 1}
    for _ in first:
        lanes.begin("host", "host")
    assert lanes.rooms(webhooks, accounts) == {}


def test_hanging_account_leaves_the_receiver_to_others() -> None:
    """Each account that hangs had responded before, so that it has as many places as it can get."""
    lanes = Lanes(total=1000, each=64)
    left = []
    for name in ("first", "second", "third", "good"):
        for _ in range(7):
            lanes.begin(name, "host")
            lanes.end(name, "host", took_s=0.01, ok=True)
        left.append(lanes.rooms({name: "host"}, {name: name})[name])
        for _ in range(left[-1]):
            lanes.begin(name, "host")
    assert left == [32, 16, 8, 4]


def test_accounts_that_never_respond_leave_a_quarter_of_the_receiver() -> None:
    lanes = Lanes(total=1000, each=64)
    for _ in range(3):
        lanes.begin("good", "host")
        lanes.end("good", "host", took_s=0.01, ok=True)
    hostile = {f"wh_{n}": "host" for n in range(200)}
    given = lanes.rooms(hostile, {name: name for name in hostile})
    assert sum(given.values()) == 48
    for name in given:
        lanes.begin(name, "host")
    assert lanes.rooms({**hostile, "good": "host"}, {name: name for name in (*hostile, "good")}) == {"good": 8}


def test_receiver_gets_no_more_than_its_limit_from_all_accounts() -> None:
    lanes = Lanes(total=1000, each=20)
    webhooks = {f"wh_{n}": "host" for n in range(100)}
    for name in webhooks:
        for _ in range(5):
            lanes.begin(name, "host")
            lanes.end(name, "host", took_s=0.01, ok=True)
    assert sum(lanes.rooms(webhooks, {name: name for name in webhooks}).values()) == 20


def test_clearing_frees_all_places() -> None:
    lanes = Lanes(total=8, each=8)
    run(lanes, "a", 1, took_s=5.0)
    fill(lanes, "ab")
    assert lanes.busy == 3
    lanes.clear()
    assert lanes.busy == 0
    assert lanes.lane("a", "a").kind == "slow"
    assert rooms(lanes, alone("b")) == {"b": 1}


@pytest.mark.parametrize(
    ("url", "receiver"),
    [
        ("https://hooks.example.com/a?b#c", "https://hooks.example.com:443"),
        ("https://HOOKS.example.com.:443", "https://hooks.example.com:443"),
        ("https://hooks.example.com?x=//:1@y", "https://hooks.example.com:443"),
        ("https://a:b@hooks.example.com/", "https://hooks.example.com:443"),
        ("https://hooks.example.com:8443/a", "https://hooks.example.com:8443"),
        ("http://127.0.0.1/", "http://127.0.0.1:80"),
        ("http://[::1]:8080/x", "http://[::1]:8080"),
        ("https://[::1]", "https://[::1]:443"),
        ("nothing", "nothing"),
    ],
)
def test_receiver_is_the_server_that_a_url_leads_to(url: str, receiver: str) -> None:
    assert receiver_of(url) == receiver


def test_counts_come_out_even_whatever_happens() -> None:
    chance = random.Random(1)
    lanes = Lanes(total=20, each=6)
    running: list[str] = []
    for _ in range(5000):
        for name, room in rooms(lanes, alone([f"r{chance.randrange(8)}"])).items():
            for _ in range(room):
                lanes.begin(name, name)
                running.append(name)
        assert lanes.busy == len(running) <= 20
        for _ in range(chance.randrange(6)):
            if running:
                name = running.pop(chance.randrange(len(running)))
                lanes.end(name, name, took_s=chance.random() * 2, ok=chance.random() < 0.8)
    for name in running:
        lanes.end(name, name, took_s=0.0, ok=True)
    assert repr(lanes) == "<Lanes {'slow': 0, 'new': 0, 'good': 0} of 20; 8 lanes>"


def test_account_leaves_as_many_places_as_it_has() -> None:
    lanes = Lanes(total=16, each=8)
    for name in "abcdefgh":
        for account in ("many", "one"):
            for _ in range(3):
                lanes.begin(account, name)
                lanes.end(account, name, took_s=0.01, ok=True)
    waiting = alone("abcdefgh")
    accounts = dict.fromkeys("abcdefg", "many") | {"h": "one"}
    for _ in range(2):
        for name, room in lanes.rooms(alone("abcdefg"), accounts).items():
            for _ in range(room):
                lanes.begin("many", name)
    assert lanes.busy == 8
    assert lanes.rooms(waiting, accounts) == {"h": 4}
    lanes.begin("one", "h")
    assert lanes.rooms(waiting, accounts) == {"h": 3}
    for name in "aab":
        lanes.end("many", name, took_s=0.01, ok=True)
    assert sum(lanes.rooms(alone("abcdefg"), accounts).values()) == 2


def test_lanes_used_least_recently_are_forgotten_in_the_end() -> None:
    lanes = Lanes(total=20, each=6)
    lanes.begin("kept", "kept")
    run(lanes, "used", 2)
    for index in range(25_000):
        rooms(lanes, alone([str(index), "used"]))
    assert len(lanes._lanes) <= 10_002
    assert len(lanes._accounts) <= 10_002
    assert len(lanes._receivers) <= 10_002
    assert lanes.lane("kept", "kept").busy == 1
    assert lanes.lane("used", "used").window == 4
