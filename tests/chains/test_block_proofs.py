"""Blocks, transactions and receipts in a form that hashes like the truth, but reads differently."""

from __future__ import annotations

from typing import Any

import pytest
import rlp
from eth_account import Account

from proxy.chains.evm import block_proofs
from proxy.chains.evm.block_proofs import RpcObject

KEY = "0x" + "11" * 32
OTHER = "0x" + "ab" * 20
BLOOM = "0x" + "00" * 256
# Errors that a proof reports as a reply without the usual form.
REFUSED = (block_proofs.NotProven, ArithmeticError, LookupError, TypeError, ValueError)


def hash_of(data: bytes) -> str:
    return "0x" + block_proofs.keccak(data).hex()


def transfer() -> dict[str, Any]:
    numbers, to = {"nonce": 16, "gasPrice": 7, "gas": 21_000, "value": 5}, "0x" + "22" * 20
    signed = Account.sign_transaction({**numbers, "to": to, "data": "0xabcd", "chainId": 1}, KEY)
    written = {name: hex(number) for name, number in numbers.items()}
    signature = {"v": hex(signed.v), "r": hex(signed.r), "s": hex(signed.s)}
    sender = Account.from_key(KEY).address.lower()
    return {**written, **signature, "type": "0x0", "to": to, "input": "0xabcd", "from": sender}


def deposit() -> dict[str, Any]:
    parties = {"from": OTHER, "to": "0x" + "22" * 20, "sourceHash": "0x" + "33" * 32}
    return {**parties, "type": "0x7e", "mint": "0x5", "value": "0x5", "gas": "0x5208", "input": "0x"}


def log_of(position: dict[str, Any]) -> dict[str, Any]:
    return {**position, "address": OTHER, "topics": ["0x" + "44" * 32], "data": "0xabcd", "logIndex": "0x0"}


def mined(transaction: dict[str, Any], **header: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A block with this transaction, and its receipt."""
    encoded = block_proofs.encode_transaction(transaction)
    position = {"blockNumber": "0x10", "transactionIndex": "0x0"}
    own = {**position, "transactionHash": hash_of(encoded), "blockHash": ""}
    outcome = {"status": "0x1", "cumulativeGasUsed": "0x5208", "gasUsed": "0x5208", "logsBloom": BLOOM}
    receipt = {**own, **outcome, "type": transaction["type"], "from": transaction["from"], "to": transaction["to"]}
    receipt |= {"logs": [log_of(own)], "contractAddress": None}
    block: dict[str, Any] = {
        **dict.fromkeys(("parentHash", "sha3Uncles", "stateRoot", "mixHash"), "0x" + "55" * 32),
        **dict.fromkeys(("difficulty", "gasLimit", "gasUsed", "timestamp"), "0x1"),
        "number": "0x10",
        "miner": OTHER,
        "logsBloom": BLOOM,
        "extraData": "0x",
        "nonce": "0x" + "00" * 8,
        **header,
        "transactionsRoot": "0x" + block_proofs.root_of([encoded]).hex(),
        "receiptsRoot": "0x" + block_proofs.root_of([block_proofs.encode_receipt(receipt)]).hex(),
    }
    block["hash"] = hash_of(rlp.encode([block_proofs._field(block, name) for name in block_proofs._header_of(block)]))
    block["transactions"] = [{**transaction, **position, "blockHash": block["hash"], "hash": hash_of(encoded)}]
    for each in (receipt, *receipt["logs"]):
        each["blockHash"] = block["hash"]
    return block, receipt


def check_unchanged(found: RpcObject, honest: RpcObject, lie: RpcObject) -> None:
    """A member may be left out, or have its true value."""
    assert {name: found.get(name) for name in lie if name in found} == {
        name: honest.get(name) for name in lie if name in found
    }


@pytest.mark.parametrize(
    "lie",
    [
        # A status under the name of the state root hashes the same.
        {"root": "0x01", "status": "0x0"},
        {"root": "0x", "status": "0x0"},
        {"root": "0x" + "11" * 32, "status": "0x1"},
        {"status": "0x0"},
        {"status": None},
        {"status": 1},
        {"depositNonce": "0x5"},
        {"depositNonce": "0x5", "depositReceiptVersion": "0x1"},
        {"gasUsed": "0x5_208"},
        {"gasUsed": " 0x5208"},
        {"gasUsed": 21_000},
        {"transactionIndex": None},
        {"blockNumber": "16"},
        {"to": "0x"},
        {"contractAddress": OTHER},
        {"contractAddress": "0x"},
        {"logsBloom": BLOOM[:20] + " " + BLOOM[20:]},
        {"effectiveGasPrice": "0x8"},
    ],
    ids=str,
)
def test_disguised_receipt_is_not_proven(lie: dict[str, Any]) -> None:
    block, receipt = mined(transfer())
    (honest,) = block_proofs.check_receipts(block, [receipt])
    try:
        (found,) = block_proofs.check_receipts(block, [{**receipt, **lie}])
    except REFUSED:
        return
    check_unchanged(found, honest, lie)


@pytest.mark.parametrize(
    "lie", [{"data": "0xab cd"}, {"data": "abcd"}, {"logIndex": None}, {"removed": True}, {"removed": "yes"}], ids=str
)
def test_disguised_log_is_not_proven(lie: dict[str, Any]) -> None:
    block, receipt = mined(transfer())
    with pytest.raises(REFUSED):
        block_proofs.check_receipts(block, [{**receipt, "logs": [{**receipt["logs"][0], **lie}]}])


@pytest.mark.parametrize(
    "lie",
    [
        {"value": "0x0_5"},
        {"value": "-0x5"},
        {"value": 5},
        {"nonce": None},
        {"input": "0xab cd"},
        {"r": "0x1" + "0" * 64},
        {"chainId": "0x2"},
        {"yParity": "0x7"},
        {"maxFeePerGas": "0x1"},
        {"accessList": []},
        {"transactionIndex": None},
        {"from": OTHER},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [transfer, deposit])
def test_disguised_transaction_is_not_proven(kind: Any, lie: dict[str, Any]) -> None:
    block, _ = mined(kind())
    (honest,) = block_proofs.check_transactions(block)
    try:
        (found,) = block_proofs.check_transactions({**block, "transactions": [{**block["transactions"][0], **lie}]})
    except REFUSED:
        return
    check_unchanged(found, honest, lie)


@pytest.mark.parametrize("lie", [{"gasPrice": "0x5"}, {"chainId": "0x5"}, {"v": "0x1"}], ids=str)
def test_deposit_has_no_members_that_nothing_proves(lie: dict[str, Any]) -> None:
    block, receipt = mined(deposit())
    (found,) = block_proofs.check_transactions({**block, "transactions": [{**block["transactions"][0], **lie}]})
    assert not lie.keys() & found.keys()
    (proven,) = block_proofs.check_receipts(block, [{**receipt, "contractAddress": OTHER, "depositNonce": "0x9"}])
    assert not {"contractAddress", "depositNonce"} & proven.keys()


def test_members_of_later_forks_are_not_proven_by_an_older_header() -> None:
    block, _ = mined(transfer(), baseFeePerGas="0x7")
    lie = {**block, "blobGasUsed": "0x20000", "requestsHash": "0x" + "66" * 32}
    assert block_proofs.check_header(lie) == block_proofs.raw(block["hash"])
    proven = block_proofs.only_proven(lie, [])
    assert proven["baseFeePerGas"] == "0x7"
    assert not {"blobGasUsed", "requestsHash"} & proven.keys()
