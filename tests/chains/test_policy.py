"""The rules of gas policies: what they may be, and which of them refuses what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.chains.evm import abi, policy
from proxy.chains.evm.policy import BadRule, PolicyOperation, Rules
from proxy.services.sponsor.policies import EVM_FORMATS

ALICE, BOB = b"\xaa" * 20, b"\xbb" * 20
TOKEN, OTHER = b"\x01" * 20, b"\x02" * 20
TRANSFER = bytes.fromhex("a9059cbb")
NOW = 1_768_469_400.0  # 2026-01-15T09:30:00Z


@dataclass
class Call:
    target: bytes
    selector: bytes


def rules(**given: Any) -> Rules:
    return policy.parse(given, EVM_FORMATS)


def asked(
    sender: bytes = ALICE,
    *,
    calls: Sequence[Call] | None = (Call(TOKEN, TRANSFER),),
    max_fee_wei: int = 10**9,
    worst: int | None = 10**12,
    now: float = NOW,
) -> PolicyOperation:
    return PolicyOperation(sender=sender, calls=calls, max_fee_wei=max_fee_wei, worst=worst, now=now)


def text(address: bytes) -> str:
    return "0x" + address.hex()


def refused_by(given: Rules, what: PolicyOperation) -> str | None:
    refusal = policy.decide(given, what)
    return None if refusal is None else refusal.rule


def test_no_rules_refuse_nothing() -> None:
    assert policy.decide(rules(), asked(calls=None)) is None


@pytest.mark.parametrize(
    ("given", "what", "rule"),
    [
        ({"starts_at": "2026-01-15T09:30:00.000001Z"}, {}, "starts_at"),
        ({"starts_at": "2026-01-15T09:30:00Z"}, {}, None),
        ({"ends_at": "2026-01-15T09:30:00Z"}, {}, "ends_at"),
        ({"ends_at": "2026-01-15T09:30:01Z"}, {}, None),
        ({"sender_allowlist": [text(BOB)]}, {}, "sender_allowlist"),
        ({"sender_allowlist": []}, {}, "sender_allowlist"),
        ({"sender_allowlist": [text(ALICE).upper().replace("X", "x")]}, {}, None),
        ({"sender_denylist": [text(ALICE)]}, {}, "sender_denylist"),
        ({"sender_allowlist": [text(ALICE)], "sender_denylist": [text(ALICE)]}, {}, "sender_denylist"),
        ({"sender_denylist": [text(BOB)]}, {}, None),
        ({"allowed_contracts": [text(TOKEN)]}, {}, None),
        ({"allowed_contracts": []}, {}, "allowed_contracts"),
        ({"allowed_contracts": [text(TOKEN)]}, {"calls": None}, "allowed_contracts"),
        ({"allowed_contracts": [text(TOKEN)]}, {"calls": [Call(TOKEN, b""), Call(OTHER, b"")]}, "allowed_contracts"),
        ({"allowed_contracts": [text(TOKEN)]}, {"calls": []}, None),
        ({"allowed_methods": ["transfer(address,uint256)"]}, {}, None),
        ({"allowed_methods": ["0xA9059CBB"]}, {}, None),
        ({"allowed_methods": ["approve(address,uint256)"]}, {}, "allowed_methods"),
        ({"allowed_methods": ["0xa9059cbb"]}, {"calls": None}, "allowed_methods"),
        ({"allowed_methods": ["0xa9059cbb"]}, {"calls": [Call(TOKEN, TRANSFER), Call(TOKEN, b"")]}, "allowed_methods"),
        ({"max_gas_price_gwei": "1"}, {}, None),
        ({"max_gas_price_gwei": "0.999999999"}, {}, "max_gas_price_gwei"),
        ({"max_gas_usd": "1"}, {}, None),
        ({"max_gas_usd": "0.999999999999"}, {}, "max_gas_usd"),
        ({"max_gas_usd": "0"}, {"worst": 0}, None),
        ({"max_gas_usd": "0"}, {"worst": None}, None),
    ],
)
def test_each_rule_refuses_what_it_should(given: dict[str, Any], what: dict[str, Any], rule: str | None) -> None:
    assert refused_by(rules(**given), asked(**what)) == rule


def test_refusal_says_what_is_left() -> None:
    refusal = policy.decide(rules(max_gas_usd="0.50"), asked())
    assert refusal is not None
    assert (refusal.rule, refusal.left) == ("max_gas_usd", "0.5")
    assert "1 USD" in refusal.message


@pytest.mark.parametrize(
    ("expected", "limit", "refused"),
    [(15, 100, False), (14, 100, True), (0, 0, False), (0, 1, True), (None, 100, True), (10**30, 1, False)],
)
def test_efficiency_is_the_share_of_the_limit_that_is_expected_to_be_used(
    expected: int | None, limit: int, refused: bool
) -> None:
    found = policy.too_wasteful(rules(min_gas_efficiency="0.15"), expected_gas=expected, call_gas=limit)
    assert (found is not None) is refused
    assert policy.too_wasteful(rules(), expected_gas=expected, call_gas=limit) is None


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"allowed_contracts": ["0xA0b86991c6218b36c1d19D4a2e9Eb0cE3606eB49"]}, "rules.allowed_contracts.0"),
        ({"sender_allowlist": [text(ALICE), "0xa0B86991c6218b36c1d19D4a2e9Eb0cE3606eB48"]}, "rules.sender_allowlist.1"),
        ({"starts_at": "2026-02-30T00:00:00Z"}, "rules.starts_at"),
        ({"starts_at": "2026-02-01T00:00:00Z", "ends_at": "2026-02-01T00:00:00Z"}, "rules.ends_at"),
        ({"max_total_usd": "1" + "0" * 24}, "rules.max_total_usd"),
        ({"min_gas_efficiency": "0." + "1" * 40}, "rules.min_gas_efficiency"),
    ],
)
def test_mistake_that_no_schema_catches_is_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(BadRule, match=named.replace(".", r"\.")):
        rules(**given)


def test_life_of_a_sponsorship_is_bounded() -> None:
    assert rules().expiry_seconds == 300
    assert rules(expiry_seconds=20).expiry_seconds == 20


@given(st.integers(0, 10**36))
def test_dollars_are_exact_both_ways(amount: int) -> None:
    assert policy.pico(policy.usd(amount)) == amount


def test_less_than_a_pico_dollar_is_cut_off() -> None:
    assert policy.pico("0.0000000000019") == 1


@given(wei=st.integers(0, 2**200), price=st.integers(1, 10**18), more=st.integers(0, 2**100))
def test_cost_rounds_up_and_a_part_never_costs_more_than_the_whole(wei: int, price: int, more: int) -> None:
    part = policy.cost(wei, price=price, decimals=18)
    assert 0 <= part * 10**18 - wei * price < 10**18
    assert part <= policy.cost(wei + more, price=price, decimals=18)


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ("transfer(address,uint)", "transfer(address,uint256)"),
        ("f(int,(uint,uint8)[],int[2])", "f(int256,(uint256,uint8)[],int256[2])"),
        ("uint(uint256)", "uint(uint256)"),
        ("f(uintx,myint)", "f(uintx,myint)"),
    ],
)
def test_short_names_of_types_are_the_methods_own(short: str, full: str) -> None:
    assert rules(allowed_methods=[short]).allowed_methods == frozenset({abi.selector(full)})


@pytest.mark.parametrize(("fee", "is_refused"), [(0, False), (200, False), (201, True)])
def test_twice_what_a_hurried_transaction_offers_is_the_most(fee: int, is_refused: bool) -> None:
    refusal = policy.overpriced(fee, fast_wei=100)
    assert (refusal is not None) is is_refused
    if refusal is not None:
        assert (refusal.rule, refusal.left) == ("max_gas_price_gwei", "0.0000002")
