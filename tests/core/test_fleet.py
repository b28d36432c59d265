"""The views of several workers, put together."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core.fleet import breaker_of, last_upstream_of, networks_of, seen, state_of, status_of
from proxy.core.upstream_health import FAILURES_IN_A_ROW, Standing, UpstreamHealth


def view(*healths: UpstreamHealth, tip: int = 20, network: str = "net/one", now: float = 100.0) -> dict[str, Any]:
    upstreams = [seen(health, now) for health in healths]
    return {"networks": [{"network": network, "kind": "upstream", "tip": tip, "upstreams": upstreams}]}


def health(label: str = "net/one#1", *, head: int = 20) -> UpstreamHealth:
    found = UpstreamHealth(label, upstream_id=label)
    found.saw_head(head, 100.0)
    return found


def test_state_follows_from_what_happened() -> None:
    found = health()
    assert (state_of(found, 100.0), breaker_of(found, 100.0)) == ("up", "closed")
    found.lagging = True
    assert state_of(found, 100.0) == "lagging"
    found.ahead = True
    assert state_of(found, 100.0) == "ahead"
    found.ahead = False
    found.rest(100.0, 5.0)
    assert state_of(found, 100.0) == "resting"
    assert state_of(found, 106.0) == "lagging"
    for _ in range(FAILURES_IN_A_ROW):
        found.failed(100.0)
    assert (state_of(found, 100.0), breaker_of(found, 100.0)) == ("open", "open")
    assert breaker_of(found, 1000.0) == "half_open"
    found.cordon(cordoned=True, now=100.0)
    assert state_of(found, 100.0) == "cordoned"


def test_cordoned_upstream_takes_no_calls_until_it_is_uncordoned() -> None:
    found = health()
    assert found.free
    found.cordon(cordoned=True, now=100.0)
    assert not found.free
    assert not found.takes_calls(100.0)
    found.refresh(101.0)
    assert not found.free
    found.cordon(cordoned=False, now=101.0)
    assert found.free
    assert found.takes_calls(101.0)


def test_upstream_has_its_host_tier_and_labels() -> None:
    found = UpstreamHealth("net/one#geth", upstream_id="a", tier=1, host="10.0.0.5", labels=("eu", "full"))
    older = view(found)
    for name in ("host", "tier", "labels"):  # a worker of the previous version
        del older["networks"][0]["upstreams"][0][name]
    (network,) = networks_of([older, view(found), older])
    (shown,) = network["upstreams"]
    assert (shown["host"], shown["tier"], shown["labels"]) == ("10.0.0.5", 1, ("eu", "full"))


def in_state(state: str) -> UpstreamHealth:
    found = health()
    match state:
        case "lagging":
            found.lagging = True
        case "open":
            for _ in range(FAILURES_IN_A_ROW):
                found.failed(100.0)
        case "cordoned":
            found.cordon(cordoned=True, now=100.0)
        case "wrong_chain" | "unchecked":
            found.set_standing(state, 100.0)
        case "silent and unchecked":
            found.silent = True
            found.set_standing("unchecked", 100.0)
        case _:
            assert state == "up"
    return found


@pytest.mark.parametrize(
    ("states", "status"),
    [
        (("up", "open"), "up"),
        (("lagging", "open"), "degraded"),
        (("open", "cordoned"), "down"),
        (("wrong_chain",), "down"),
        (("unchecked",), "down"),
        (("silent and unchecked",), "down"),
        ((), "down"),
    ],
)
def test_status_of_a_network_follows_from_its_best_upstream(states: tuple[str, ...], status: str) -> None:
    assert status_of([in_state(state) for state in states], 100.0) == status


def test_last_upstream_is_the_only_one_that_is_not_cordoned() -> None:
    one, other = health("net/one#1"), health("net/one#2")
    bundler = {**view(health("net/one#bundler 1"))["networks"][0], "kind": "bundler"}

    def last(mark: str) -> str | None:
        both = view(one, other)
        both["networks"].append(bundler)
        return last_upstream_of(networks_of([both]), mark)

    assert [last("net/one#1"), last("net/one#2"), last("net/one#bundler 1")] == [None, None, "net/one"]
    one.cordon(cordoned=True, now=100.0)
    assert [last("net/one#1"), last("net/one#2"), last("unknown")] == [None, "net/one", None]


def test_counts_are_added_and_averages_weighed_by_calls() -> None:
    busy, idle = health(), health(head=18)
    for _ in range(100):
        busy.succeeded(0.004)
    idle.failed(100.0)
    (network,) = networks_of([view(busy), view(idle)])
    (found,) = network["upstreams"]
    assert (found["workers"], found["answered"], found["failed"], found["head"]) == (2, 100, 1, 20)
    assert 3.9 < found["latency_ms"] < 4.5
    assert found["error_rate"] < 0.01
    assert 2.5 <= found["p50_ms"] <= 5.0
    assert found["lag_blocks"] == 0


def test_worst_state_that_any_worker_sees_is_the_state() -> None:
    good, bad = health(), health(head=11)
    bad.lagging = True
    (network,) = networks_of([view(good), view(bad, tip=25)])
    assert network["tip"] == 25
    assert network["upstreams"][0]["state"] == "lagging"
    assert network["upstreams"][0]["lag_blocks"] == 5


def test_networks_and_upstreams_are_in_order_and_bundlers_behind() -> None:
    two = view(health("net/one#2"), health("net/one#1"))
    bundler = {"network": "net/one", "kind": "bundler", "tip": 0, "upstreams": [seen(health("net/one#bundler 1"), 1.0)]}
    two["networks"].append(bundler)
    other = view(health("a/net#1"), network="a/net")
    found = networks_of([two, other])
    assert [network["network"] for network in found] == ["a/net", "net/one"]
    assert [each["label"] for each in found[1]["upstreams"]] == ["net/one#1", "net/one#2", "net/one#bundler 1"]
    assert networks_of([]) == []


@pytest.mark.parametrize("standing", ["unchecked", "wrong_chain", "forked"])
def test_upstream_of_another_chain_or_branch_is_shown_as_such(standing: Standing) -> None:
    found = health()
    found.set_standing(standing, 100.0)
    assert state_of(found, 100.0) == standing


def test_state_that_another_version_reports_is_shown() -> None:
    other = view(health())
    other["networks"][0]["upstreams"][0]["state"] = "haunted"
    (network,) = networks_of([view(health()), other])
    assert network["upstreams"][0]["state"] == "haunted"
