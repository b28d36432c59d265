"""The contracts that a call reaches. Every way to name another than the one that is checked must be refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from proxy.chains.evm import reached_contracts
from proxy.chains.evm.user_operation import UserOperation
from proxy.settings import load_tables
from tests.chains.test_paymaster import batch_07, execute
from tests.chains.test_transactions import rlp
from tests.flows.test_upstream_writes import DYNAMIC, LEGACY

A, B = "0x" + "aA" * 20, "0x" + "bB" * 20
LOW_A, LOW_B = A.lower(), B.lower()
METHODS = load_tables().methods["evm"]


def named(method: str, *params: Any) -> Any:
    return raw(method, json.dumps(params))


def raw(method: str, params: str) -> Any:
    found = reached_contracts.of_call(METHODS[method], params.encode())
    return None if found is None else list(found)


@pytest.mark.parametrize("method", ["eth_call", "eth_estimateGas", "eth_createAccessList"])
def test_call_reaches_the_contract_in_its_member_to(method: str) -> None:
    assert named(method, {"to": A, "data": "0x"}, "latest") == [LOW_A]
    assert named(method, {"to": A}) == [LOW_A]
    assert named(method, {"to": A}, {"blockNumber": "0x1"}, {B: {"balance": "0x1", "nonce": "0x1"}}) == [LOW_A]


@pytest.mark.parametrize(
    "params",
    [
        [],
        [None],
        [A],
        [{"data": "0x6000"}],
        [{"to": None, "data": "0x6000"}],
        [{"to": A[2:]}],
        [{"to": A + "00"}],
        [{"To": A}],
        [{"to": [A]}],
        [{"to": A, "authorizationList": [{"address": B}]}],
        [{"to": A, "AuthorizationList": [{"address": B}]}],
        [{"to": A}, "latest", {A: {"code": "0x6000"}}],
        [{"to": A}, "latest", {A: {"stateDiff": {"0x0": B}}}],
        [{"to": A}, "latest", {A: {"state": {}}}],
        [{"to": A}, "latest", {A: {"Code": "0x6000"}}],
        [{"to": A}, "latest", {A: {"movePrecompileToAddress": B}}],
        [{"to": A}, "latest", [B]],
    ],
)
def test_call_that_may_reach_other_code_reaches_any(params: list[Any]) -> None:
    assert named("eth_call", *params) is None


@pytest.mark.parametrize(
    "params",
    [
        f'[{{"to":"{A}","to":"{B}"}}]',
        f'[{{"to":"{A}","TO":"{B}"}}]',
        f'[{{"to":"{A}","\\u0074o":"{B}"}}]',
        f'[{{"to":"{A}"}},"latest",{{"{B}":{{"balance":"0x1","Balance":"0x2"}}}}]',
        f'[{{"to":"{A}"}}',
        "[" * 2000,
        f'[{{"to":"{A}","gas":{"1" * 5000}}}]',
        f'[{{"to":"{A}"}},{",".join(["{}"] * 2_000)}]',
        f'[{{"to":"{A}"}},{",".join("1" * 20_000)}]',
    ],
)
def test_call_that_parsers_read_differently_reaches_any(params: str) -> None:
    """Go keeps the last of two members whose names differ at most in case."""
    assert raw("eth_call", params) is None


def test_logs_are_of_all_contracts_in_the_filter() -> None:
    for method in ("eth_getLogs", "eth_newFilter"):
        assert named(method, {"address": A, "topics": []}) == [LOW_A]
        assert named(method, {"address": [A, B]}) == [LOW_A, LOW_B]
        unbounded: list[Any] = [{}, {"address": []}, {"address": None}, {"Address": A}, {"address": [[A]]}]
        for each in unbounded:
            assert named(method, each) is None
        # Go reads U+017F as s.
        assert raw(method, f'[{{"address":"{A}","addre\\u017f\\u017f":"{B}"}}]') is None
    assert named("eth_subscribe", "logs", {"address": A}) == [LOW_A]
    assert named("eth_subscribe", "newHeads") == []
    kinds: list[list[Any]] = [["logs"], ["logs", {}], ["alchemy_minedTransactions"], []]
    for params in kinds:
        assert named("eth_subscribe", *params) is None


def test_state_is_that_of_the_address() -> None:
    for method in ("eth_getCode", "eth_getStorageAt", "eth_getProof"):
        assert named(method, A, "0x0", "latest") == [LOW_A]
        assert named(method) is None
        assert named(method, {"address": A}) is None


@pytest.mark.parametrize(
    ("transaction", "to"), [(LEGACY[0], "0x" + "22" * 20), (DYNAMIC[0], "0x" + "33" * 20)], ids=["legacy", "1559"]
)
def test_transaction_reaches_its_recipient(transaction: str, to: str) -> None:
    for method in ("eth_sendRawTransaction", "eth_sendRawTransactionSync", "eth_sendPrivateRawTransaction"):
        assert named(method, transaction) == [to]
    assert named("eth_sendPrivateTransaction", {"tx": transaction}) == [to]


def typed(kind: int, fields: list[Any], *beside: Any) -> str:
    body = rlp([fields, *beside]) if beside else rlp(fields)
    return "0x" + (bytes([kind]) + body).hex()


def test_every_type_of_transaction_is_read() -> None:
    to, delegate = bytes.fromhex(A[2:]), bytes.fromhex(B[2:])
    n, signature = b"\x01", [b"\x01", b"r" * 32, b"s" * 32]
    assert named("eth_sendRawTransaction", typed(1, [n, n, n, n, to, b"", b"", [], *signature])) == [LOW_A]
    blob = [n, n, n, n, n, to, b"", b"", [], n, [b"h" * 32], *signature]
    assert named("eth_sendRawTransaction", typed(3, blob, [b"x" * 1000], [b"c" * 48], [b"p" * 48])) == [LOW_A]
    allowed = [n, delegate, b"", *signature]
    assert named("eth_sendRawTransaction", typed(4, [n, n, n, n, n, to, b"", b"", [], [allowed], *signature])) == [
        LOW_A,
        LOW_B,
    ]
    for other in (
        typed(2, [n, n, n, n, n, b"", b"", b"", [], *signature]),  # creates a contract
        typed(2, [n, n, n, n, n, [to], b"", b"", [], *signature]),
        typed(0x71, [n, n, n, n, to, *signature]),
        typed(4, [n, n, n, n, n, to, b"", b"", [], [allowed] * 40, *signature]),  # more than are read
        DYNAMIC[0] + "00",
        "0x",
        "0xzz",
    ):
        assert named("eth_sendRawTransaction", other) is None
    odd: list[list[Any]] = [[], [None], [{}], [7]]
    for params in odd:
        assert named("eth_sendRawTransaction", *params) is None


def test_method_that_says_nothing_about_contracts_reaches_any() -> None:
    for method in ("eth_simulateV1", "debug_traceCall", "trace_callMany", "eth_callMany", "eth_getBlockReceipts"):
        assert METHODS[method].contract == "any"
        assert named(method, {"to": A}) is None
    assert named("eth_blockNumber") == []
    assert named("eth_getTransactionCount", B, "latest") == []


def test_operation_reaches_the_targets_of_its_calls_its_factory_and_its_delegate() -> None:
    a, b = bytes.fromhex(A[2:]), bytes.fromhex(B[2:])
    plain = UserOperation("0.7", b, 0, b"", execute(a, 0, b""), 1, 1, 1, 1, 1, b"", b"")
    assert reached_contracts.of_operation(plain) == [LOW_A]
    assert reached_contracts.of_operation(replace(plain, call_data=batch_07([], (a, b""), (b, b"")))) == [LOW_A, LOW_B]
    assert reached_contracts.of_operation(replace(plain, init_code=b + b"\x01\x02")) == [LOW_A, LOW_B]
    assert reached_contracts.of_operation(replace(plain, delegate=b)) == [LOW_A, LOW_B]
    assert reached_contracts.of_operation(replace(plain, call_data=b"")) == []
    assert reached_contracts.of_operation(replace(plain, call_data=b"\x01\x02\x03\x04")) is None
    assert reached_contracts.of_operation(plain, b'{"%b":{"balance":"0x1"}}' % A.encode()) == [LOW_A]
    assert reached_contracts.of_operation(plain, b'{"%b":{"code":"0x60"}}' % A.encode()) is None
    assert reached_contracts.of_operation(plain, b"{") is None
