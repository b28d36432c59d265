"""Transactions and the calls inside them, as upstreams tell of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from proxy.chains.evm import activity
from proxy.chains.evm.facts import Header, read_header
from proxy.chains.evm.matching import InternalTransfer

A, B, C = ("0x" + digit * 40 for digit in "abc")
HASH = "0x" + "11" * 32


def raw(address: str) -> bytes:
    return bytes.fromhex(address[2:])


def header(transactions: bytes) -> Header:
    found = read_header(
        b'{"number":"0x1","hash":"%b","parentHash":"%b","timestamp":"0x4","transactions":%b}'
        % (HASH.encode(), HASH.encode(), transactions)
    )
    assert found is not None
    return found


def test_transactions_of_a_whole_block_are_read() -> None:
    whole = msgspec.json.encode(
        [
            {"hash": HASH, "from": A, "to": B, "value": "0x10", "nonce": "0x2", "input": "0xa9059cbb00", "gas": "0x0"},
            {"hash": HASH, "from": A, "to": None, "value": "0x0", "nonce": "0x3", "transactionIndex": "0x1"},
        ]
    )
    assert activity.is_whole(header(whole))
    first, second = activity.transactions_of(header(whole))
    assert (first.sender, first.recipient, first.value, first.nonce) == (raw(A), raw(B), 16, 2)
    assert first.selector == bytes.fromhex("a9059cbb")
    assert (second.recipient, second.index, second.selector) == (None, 1, b"")


def test_block_with_hashes_alone_is_not_whole_and_an_empty_one_is() -> None:
    assert not activity.is_whole(header(b' [ "0x12" ]'))
    assert activity.is_whole(header(b"[ ]"))
    with pytest.raises(ValueError, match="object"):
        activity.transactions_of(header(b'["0x12"]'))


TREE: dict[str, Any] = {
    "type": "CALL",
    "from": A,
    "to": B,
    "value": "0x64",
    "calls": [
        {"type": "CALL", "from": B, "to": C, "value": "0x5"},
        {"type": "STATICCALL", "from": B, "to": C},
        {"type": "DELEGATECALL", "from": B, "to": C, "value": "0x64", "calls": [
            {"type": "CALL", "from": B, "to": A, "value": "0x6"},
        ]},
        {"type": "CALL", "from": B, "to": C, "value": "0x7", "error": "execution reverted", "calls": [
            {"type": "CALL", "from": C, "to": A, "value": "0x8"},
        ]},
        {"type": "CREATE", "from": B, "to": C, "value": "0x9"},
        {"type": "SELFDESTRUCT", "from": C, "to": A, "value": "0xa"},
        {"type": "CALL", "from": B, "to": C, "value": "0x0"},
    ],
}  # fmt: skip
EXPECTED = [
    InternalTransfer(HASH, (0,), "call", raw(B), raw(C), 5),
    InternalTransfer(HASH, (2, 0), "call", raw(B), raw(A), 6),
    InternalTransfer(HASH, (4,), "create", raw(B), raw(C), 9),
    InternalTransfer(HASH, (5,), "selfdestruct", raw(C), raw(A), 10),
]


def tree(given: dict[str, Any]) -> activity.TracedCall:
    return activity.read_traced_call(msgspec.json.encode(given))


def test_calls_of_a_tree_are_those_below_it_that_moved_coins_and_were_not_undone() -> None:
    assert activity.calls_of_tree(HASH, tree(TREE)) == EXPECTED


def test_failed_transaction_has_no_calls() -> None:
    assert activity.calls_of_tree(HASH, tree({**TREE, "error": "out of gas"})) == []


def test_calls_may_be_as_deep_as_gas_allows() -> None:
    deep: dict[str, Any] = {"type": "CALL", "from": A, "to": B, "value": "0x1"}
    for _ in range(400):
        deep = {"type": "CALL", "from": A, "to": B, "value": "0x0", "calls": [deep]}
    (found,) = activity.calls_of_tree(HASH, tree(deep))
    assert found.path == (0,) * 400


def trace(kind: str, path: list[int], action: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": kind, "traceAddress": path, "action": action, "transactionHash": HASH, **more}


def test_list_of_traces_yields_the_same_calls_as_the_tree() -> None:
    call = {"callType": "call", "from": B, "to": C}
    found = activity.calls_of_list(
        [
            trace("call", [], {"callType": "call", "from": A, "to": B, "value": "0x64"}),
            trace("call", [0], {**call, "value": "0x5"}),
            trace("call", [1], {**call, "callType": "staticcall", "value": "0x0"}),
            trace("call", [2], {**call, "callType": "delegatecall", "value": "0x64"}),
            trace("call", [2, 0], {**call, "to": A, "value": "0x6"}),
            trace("call", [3], {**call, "value": "0x7"}, error="Reverted"),
            trace("call", [3, 0], {**call, "value": "0x8"}),
            trace("create", [4], {"from": B, "value": "0x9"}, result={"address": C}),
            trace("suicide", [5], {"address": C, "refundAddress": A, "balance": "0xa"}),
            {"type": "reward", "traceAddress": [], "action": {"author": A, "value": "0x1"}, "transactionHash": None},
        ]
    )
    assert [(c.path, c.sender, c.recipient, c.value) for c in found] == [
        (c.path, c.sender, c.recipient, c.value) for c in EXPECTED
    ]


@pytest.mark.parametrize("value", ["0x1" + "0" * 64, "0x" + "f" * 10_000, "-0x1"])
def test_value_that_no_chain_has_is_refused(value: str) -> None:
    transaction = {"hash": "0x1", "from": "0x" + "11" * 20, "value": value, "nonce": "0x0"}
    with pytest.raises(ValueError, match="256"):
        activity.decoded_transactions([msgspec.Raw(msgspec.json.encode(transaction))])
    call = {"type": "CALL", "from": "0x" + "11" * 20, "to": "0x" + "22" * 20, "value": value}
    with pytest.raises(ValueError, match="256"):
        activity.calls_of_tree("0x1", tree({"calls": [call]}))
