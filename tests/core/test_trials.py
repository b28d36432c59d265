"""Comparing a candidate's replies, and the verdict."""

from __future__ import annotations

import pytest

from proxy.core.trials import (
    ENOUGH_READS,
    WHOLE_RESULT,
    Trial,
    TrialOutcome,
    TrialRead,
    differing_members,
    is_same_error,
    trials_of,
)


@pytest.mark.parametrize(
    ("ours", "theirs", "members"),
    [
        (b'{"a": 1, "b": "0xAB"}', b'{"b":"0xab","a":1}', ()),
        (b'{"a": 1, "b": null}', b'{"a": 1}', ()),
        (b'{"a": 1, "size": 3}', b'{"a": 1}', ("size",)),
        (b'{"logs": [{"data": "0x1"}]}', b'{"logs": [{"data": "0x2"}]}', ("logs[].data",)),
        (b'{"logs": [{"data": "0x1"}]}', b'{"logs": []}', ("logs",)),
        (b'{"hash": "0x1", "a": {"b": [1, 2]}}', b'{"hash": "0x2", "a": {"b": [1, 3]}}', ("a.b[]", "hash")),
        (b'"0x1"', b'"0x2"', (WHOLE_RESULT,)),
        (b"null", b'{"a": 1}', (WHOLE_RESULT,)),
        (b'[{"a": 1}]', b'[{"c": 1}]', ("[].a", "[].c")),
        (b'"text"', b'"TEXT"', (WHOLE_RESULT,)),
    ],
)
def test_replies_differ_in_what_matters_only(ours: bytes, theirs: bytes, members: tuple[str, ...]) -> None:
    assert differing_members(ours, theirs) == members
    assert bool(differing_members(theirs, ours)) == bool(members)


def test_volatile_members_are_left_out() -> None:
    assert differing_members(b'{"a": 1, "l1Fee": "0x1"}', b'{"a": 1, "l1Fee": "0x2"}', frozenset(["l1Fee"])) == ()


def test_errors_are_compared_by_code_and_data() -> None:
    assert is_same_error(b'{"code":3,"message":"a","data":"0xAB"}', b'{"code":3,"message":"b","data":"0xab"}')
    assert not is_same_error(b'{"code":3,"message":"a","data":"0x01"}', b'{"code":3,"message":"a","data":"0x02"}')
    assert not is_same_error(b'{"code":3}', b"null")


def trial(*, their_s: float = 0.01, **outcomes: int) -> Trial:
    found = Trial("ethereum/mainnet#new")
    names: tuple[TrialOutcome, ...] = ("same", "different", "behind", "error", "missing")
    for name in names:
        for _ in range(outcomes.get(name, 0)):
            members = ("gasUsed",) if name == "different" else ()
            found.read("eth_call", TrialRead(name, 0.1, their_s, members, our_cost=100, their_cost=130))
    return found


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ({}, "no reads yet"),
        ({"same": 5}, "too few reads to tell: 5 of 1,000"),
        ({"same": ENOUGH_READS}, "safe to promote: 1,000 reads, 0 different, 90 % faster, 30 % dearer"),
        ({"same": 5000, "different": 1}, "do not promote: 1 of 5,001 reads differ, most of eth_call (gasUsed)"),
        ({"same": 5000, "missing": 1}, "not ready: it lacks eth_call"),
        ({"same": 1000, "behind": 100}, "not ready: it was behind in 100 of 1,100 reads"),
        ({"same": 1000, "error": 10}, "not ready: 10 of 1,010 reads failed"),
        ({"same": 5000, "behind": 10, "error": 1}, "safe to promote: 5,011 reads"),
    ],
)
def test_verdict_says_why(outcomes: dict[str, int], verdict: str) -> None:
    found = trial(**outcomes)
    assert found.verdict.startswith(verdict)
    assert found.is_ready == verdict.startswith("safe")


def test_trials_of_all_workers_are_one_report() -> None:
    views = [
        {"networks": [{"trials": [trial(same=3).as_data]}, {}]},
        {"networks": [{"trials": [trial(same=4).as_data]}]},
    ]
    (found,) = trials_of(views)
    assert found.total.outcomes["same"] == 7
    assert [row["method"] for row in found.rows] == ["eth_call", "all"]
    assert found.rows[0]["usd"] == "0.000001"


def test_rate_is_that_of_the_busiest_second() -> None:
    found = trial(same=1)
    assert found.rate == ""
    for at_s in (1.0, 1.1, 1.2, 2.0, 3.0):
        found.replied(at_s, limited=at_s == 3.0)
    assert found.rate == "up to 3 reads a second, 1 refused (429)"
    found.add(found.as_data)
    assert found.rate == "up to 6 reads a second, 2 refused (429)"
    found.rate_found("takes 40 calls a second")
    assert found.rate == "takes 40 calls a second"
