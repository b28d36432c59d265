"""Params that are recognised as those of a call at the latest block, without reading them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.chains.evm.methods import LATEST
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.telemetry import Tally
from tests.shipped_tables import TABLES

EVM = TABLES.chains.families["evm"]
ADDRESS = "0x52908400098527886e0f7030069857d2e4169ee7"
POLICIES = [
    MethodPolicy(method, EVM, Tally("ethereum/mainnet", method.name))
    for method in TABLES.methods["evm"].values()
    if method.block_at is not None
]
tags = st.sampled_from(["latest", "pending", "earliest", "0x10", 'x,"latest"]', "latest]", "", ADDRESS])
items = st.one_of(tags, st.none(), st.booleans(), st.dictionaries(tags, tags, max_size=2), st.lists(tags, max_size=2))


@given(st.sampled_from(POLICIES), st.lists(items, max_size=4), st.sampled_from([(",", ":"), (", ", ": ")]))
def test_only_calls_at_the_latest_block_are_recognised(
    policy: MethodPolicy, params: list[Any], separators: tuple[str, str]
) -> None:
    text = json.dumps(params, separators=separators).encode()
    if policy.names_latest(text):
        assert EVM.block_ref(policy.method, text) == LATEST


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("eth_getBalance", [ADDRESS, "latest"]),
        ("eth_call", [{"to": ADDRESS, "data": "0x"}, "latest"]),
    ],
)
def test_usual_calls_are_recognised(method: str, params: list[Any]) -> None:
    policy = next(each for each in POLICIES if each.method.name == method)
    text = json.dumps(params, separators=(",", ":")).encode()
    assert policy.names_latest(text)
