"""Fault plans: what can be written, what is refused, and that the API spec documents the table."""

from __future__ import annotations

import json

import pytest

from proxy.core.fault_plans import (
    FAULTS,
    FaultPlan,
    affects,
    aged,
    error_replies,
    faulty,
    faulty_result,
    parts_of,
    plan_for,
    plan_of,
    text_of,
)
from proxy.data_files import SCHEMAS


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("latency=800ms", FaultPlan(latency_ms=800)),
        ("latency=2s, status=503,p=0.2", FaultPlan(latency_ms=2000, status=503, p=0.2)),
        ("error=-32005", FaultPlan(error=-32005)),
        ("empty,stale=5", FaultPlan(empty=True, stale=5)),
        ("reset", FaultPlan(reset=True)),
        ("truncate, slow-body=1KB/s", FaultPlan(truncate=True, slow_body=1000)),
        ("drop=3,reorg=2, delay=2s", FaultPlan(drop=3, reorg=2, delay_ms=2000)),
        ("duplicate=1,correction,p=0", FaultPlan(duplicate=1, correction=True, p=0.0)),
    ],
)
def test_plan_is_read_and_written(text: str, plan: FaultPlan) -> None:
    assert plan_of(text) == plan
    assert plan_of(text_of(plan)) == plan


def test_parts_apply_to_their_surfaces() -> None:
    plan = plan_of("status=503,delay=1s,correction,p=0.000001")
    assert parts_of(plan, "webhooks") == FaultPlan(delay_ms=1000, correction=True, p=0.000001)
    assert parts_of(plan_of("status=503,p=0.5"), "webhooks") is None
    assert plan_for("delay=1s,p=0", "webhooks") == FaultPlan(delay_ms=1000, p=0.0)
    with pytest.raises(ValueError, match="status"):
        plan_for("delay=1s,status=503", "webhooks")


def test_share_of_events_is_affected_and_each_always_or_never() -> None:
    half = plan_of("correction,p=0.5")
    found = [affects(half, f"evt_{number}") for number in range(200)]
    assert {*found} == {True, False}
    assert found == [affects(half, f"evt_{number}") for number in range(200)]
    assert not any(affects(plan_of("correction,p=0"), f"evt_{number}") for number in range(200))
    assert all(affects(plan_of("correction"), f"evt_{number}") for number in range(200))


@pytest.mark.parametrize(
    "text",
    ["", "p=0.5", "latency", "latency=800", "latency=31s", "latency=0ms", "status=200", "status=999", "error=0", "error=x",
     "empty=1", "reset=", "stale=0", "stale=-1", "stale=99999", "slow-body=1", "slow-body=1B/s", "p=2,empty", "p=-1,empty",
     "p=nan,empty", "empty,empty", "explode", "latency=1ms;empty", "é", "empty," * 100, "latency=١ms", "stale=٥",
     "drop=0", "drop", "drop=1001", "delay=61s", "delay=5", "reorg=65", "reorg=-1", "duplicate=6", "correction=1"],
)  # fmt: skip
def test_plan_that_is_not_valid_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        plan_of(text)


def test_latest_is_replaced_by_an_older_block() -> None:
    assert aged(b'{"params":["0x1","latest"]}', 100, 5) == b'{"params":["0x1","0x5f"]}'
    assert aged(b'["latest"]', 3, 5) == b'["0x0"]'


# orjson reads 1024 levels and writes 254.
_DEEP = b"[" * 600 + b"]" * 600


@pytest.mark.parametrize("result", [_DEEP, b"1e999", b'"0xzz"', b"[" * 2000 + b"]" * 2000])
def test_result_that_cannot_be_changed_is_passed_on(result: bytes) -> None:
    stale, empty = FaultPlan(stale=5), FaultPlan(empty=True)
    assert faulty_result(stale, result, is_head=True) in (result, b"null")
    assert faulty_result(empty, result, is_head=True) in (b"null", b"[]")
    call, reply = b'{"id":1,"method":"eth_blockNumber"}', b'{"id":1,"result":%b}' % result
    assert faulty(stale, call, reply, ["eth_blockNumber"]) in (reply, b'{"id":1,"result":null}')
    assert error_replies(b'{"id":%b,"method":"m"}' % _DEEP, b"{}") is None


def test_api_spec_documents_the_table() -> None:
    text = json.loads((SCHEMAS / "openapi.json").read_bytes())["info"]["description"]
    for part in FAULTS:
        assert f"| `{part.form}` | {', '.join(part.surfaces)} | {part.about} |" in text
        assert part.name == "p" or plan_of(part.form) != FaultPlan()
