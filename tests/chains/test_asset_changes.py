"""Asset changes of simulated transactions, from logs made by hand."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import orjson
import pytest
from eth_abi.abi import encode
from hypothesis import given
from hypothesis import strategies as st
from web3 import Web3

from proxy.chains.evm import asset_changes
from proxy.chains.evm.asset_changes import (
    COINS,
    MOST_LOGS,
    MOST_RESULT,
    CallResult,
    HeldAsset,
    SimulatedTransaction,
    TokenApproval,
    TooManyChanges,
    balance_changes,
    block_of,
    params_of,
    read_result,
    transaction_of,
    transaction_result,
)
from proxy.core.transfer_history import ERC20, ERC721, ERC1155, NATIVE

ALICE, BOB, TOKEN = b"\xaa" * 20, b"\xbb" * 20, b"\xcc" * 20
ZERO = bytes(20)


def topic(signature: str) -> str:
    return Web3.keccak(text=signature).to_0x_hex()


def word(value: bytes | int) -> str:
    return f"0x{value:064x}" if isinstance(value, int) else "0x" + value.hex().rjust(64, "0")


def log(signature: str, *topics: bytes | int, data: bytes = b"", contract: bytes = TOKEN, index: int = 0) -> Any:
    return {
        "address": "0x" + contract.hex(),
        "topics": [topic(signature), *map(word, topics)],
        "data": "0x" + data.hex(),
        "blockNumber": "0x6",
        "blockHash": word(6),
        "transactionHash": word(7),
        "transactionIndex": "0x0",
        "logIndex": hex(index),
        "removed": False,
    }


TRANSFER = "Transfer(address,address,uint256)"
APPROVAL = "Approval(address,address,uint256)"
FOR_ALL = "ApprovalForAll(address,address,bool)"


def result(logs: list[Any], **members: Any) -> bytes:
    call = {"status": "0x1", "gasUsed": "0x5208", "returnData": "0x", "logs": logs, **members}
    return orjson.dumps([{"number": "0x6", "hash": word(6), "gasUsed": "0x5208", "calls": [call]}])


def done(*logs: Any, **members: Any) -> SimulatedTransaction:
    block, calls = read_result(result(list(logs), **members), 1)
    assert block == 5
    return transaction_result(calls[0])


def moved(found: SimulatedTransaction) -> list[tuple[Any, ...]]:
    return [(t.standard, t.contract, t.sender, t.recipient, t.token_id, t.amount) for t in found.transfers]


@pytest.mark.parametrize(
    ("logs", "expected"),
    [
        ([log(TRANSFER, ALICE, BOB, data=encode(["uint256"], [5]))], [(ERC20, TOKEN, ALICE, BOB, 0, 5)]),
        ([log(TRANSFER, ALICE, BOB, 2**255)], [(ERC721, TOKEN, ALICE, BOB, 2**255, 1)]),
        (
            [log(TRANSFER, ALICE, BOB, data=encode(["uint256"], [7]), contract=COINS)],
            [(NATIVE, b"", ALICE, BOB, 0, 7)],
        ),
        (
            [
                log(
                    "TransferSingle(address,address,address,uint256,uint256)",
                    *(ALICE, ALICE, BOB),
                    data=encode(["uint256", "uint256"], [3, 9]),
                )
            ],
            [(ERC1155, TOKEN, ALICE, BOB, 3, 9)],
        ),
        (
            [
                log(
                    "TransferBatch(address,address,address,uint256[],uint256[])",
                    *(ALICE, ZERO, BOB),
                    data=encode(["uint256[]", "uint256[]"], [[1, 2], [10, 20]]),
                )
            ],
            [(ERC1155, TOKEN, ZERO, BOB, 1, 10), (ERC1155, TOKEN, ZERO, BOB, 2, 20)],
        ),
        # Wrapping: the coins go to the contract, and the tokens come from nowhere.
        (
            [
                log(TRANSFER, ALICE, TOKEN, data=encode(["uint256"], [4]), contract=COINS),
                log("Deposit(address,uint256)", ALICE, data=encode(["uint256"], [4]), index=1),
            ],
            [(NATIVE, b"", ALICE, TOKEN, 0, 4), (ERC20, TOKEN, ZERO, ALICE, 0, 4)],
        ),
        (
            [
                log("Withdrawal(address,uint256)", ALICE, data=encode(["uint256"], [4])),
                log(TRANSFER, TOKEN, ALICE, data=encode(["uint256"], [4]), contract=COINS, index=1),
            ],
            [(ERC20, TOKEN, ALICE, ZERO, 0, 4), (NATIVE, b"", TOKEN, ALICE, 0, 4)],
        ),
        # A wrapped coin that emits both events moves once.
        (
            [
                log("Deposit(address,uint256)", ALICE, data=encode(["uint256"], [4])),
                log(TRANSFER, ZERO, ALICE, data=encode(["uint256"], [4]), index=1),
            ],
            [(ERC20, TOKEN, ZERO, ALICE, 0, 4)],
        ),
        ([log(TRANSFER, ALICE, BOB)], []),
        ([log("Swap(address,uint256)", ALICE, 5)], []),
    ],
)
def test_transfers_of_every_standard_are_read(logs: list[Any], expected: list[Any]) -> None:
    assert moved(done(*logs)) == expected


@pytest.mark.parametrize(
    ("given_log", "expected"),
    [
        (
            log(APPROVAL, ALICE, BOB, data=encode(["uint256"], [2**256 - 1])),
            TokenApproval(ERC20, TOKEN, ALICE, BOB, 2**256 - 1, None, 0),
        ),
        (log(APPROVAL, ALICE, BOB, data=encode(["uint256"], [0])), TokenApproval(ERC20, TOKEN, ALICE, BOB, 0, None, 0)),
        (log(APPROVAL, ALICE, BOB, 42, index=3), TokenApproval(ERC721, TOKEN, ALICE, BOB, 1, 42, 3)),
        (log(APPROVAL, ALICE, ZERO, 42), TokenApproval(ERC721, TOKEN, ALICE, ZERO, 0, 42, 0)),
        (
            log(FOR_ALL, ALICE, BOB, data=encode(["bool"], [True])),
            TokenApproval(None, TOKEN, ALICE, BOB, 1, None, 0),
        ),
        (
            log(FOR_ALL, ALICE, BOB, data=encode(["bool"], [False])),
            TokenApproval(None, TOKEN, ALICE, BOB, 0, None, 0),
        ),
    ],
)
def test_approvals_are_read(given_log: Any, expected: TokenApproval) -> None:
    found = done(given_log)
    assert (found.approvals, found.transfers) == ([expected], [])


@pytest.mark.parametrize(
    "odd",
    [
        log(APPROVAL, ALICE, BOB),
        log(APPROVAL, ALICE, BOB, data=b"\x01" * 31),
        log(APPROVAL, ALICE),
        log(APPROVAL, 2**255, BOB, data=encode(["uint256"], [1])),
        log(FOR_ALL, ALICE, BOB, data=encode(["uint256"], [2])),
        log(FOR_ALL, ALICE, BOB, 1),
        {**log(APPROVAL, ALICE, BOB), "data": "0x0"},
        {**log(APPROVAL, ALICE, BOB), "topics": [topic(APPROVAL), "0x", "0x1"]},
    ],
)
def test_approval_of_another_shape_is_none(odd: Any) -> None:
    assert done(odd).approvals == []


def test_logs_of_coins_are_not_among_the_logs_of_the_chain() -> None:
    found = done(log(TRANSFER, ALICE, BOB, data=encode(["uint256"], [7]), contract=COINS), log("Other()", index=1))
    assert [each.address for each in found.logs] == ["0x" + TOKEN.hex()]


def test_changes_of_balances_are_sums_without_mints_and_what_cancels_out() -> None:
    found = done(
        log(TRANSFER, ZERO, ALICE, data=encode(["uint256"], [5])),
        log(TRANSFER, ALICE, BOB, data=encode(["uint256"], [3]), index=1),
        log(TRANSFER, ALICE, ALICE, data=encode(["uint256"], [1]), index=2),
        log(TRANSFER, ALICE, BOB, 42, index=3),
        log(TRANSFER, BOB, ALICE, 42, index=4),
        log(TRANSFER, ALICE, ZERO, data=encode(["uint256"], [9]), contract=COINS, index=5),
    )
    assert balance_changes(found.transfers) == {
        HeldAsset(ALICE, ERC20, TOKEN, 0): 2,
        HeldAsset(BOB, ERC20, TOKEN, 0): 3,
        HeldAsset(ALICE, NATIVE, b"", 0): -9,
        # The zero address has coins, although it has no tokens.
        HeldAsset(ZERO, NATIVE, b"", 0): 9,
    }


NOPE = "0x08c379a0" + encode(["string"], ["nope"]).hex()


@pytest.mark.parametrize(
    ("members", "text", "reason"),
    [
        (
            {"error": {"code": 3, "message": "execution reverted: nope", "data": NOPE}},
            "execution reverted: nope",
            "nope",
        ),
        ({"error": {"code": 3, "message": "execution reverted", "data": NOPE}}, "execution reverted: nope", "nope"),
        ({"error": {"message": "execution reverted"}, "returnData": NOPE}, "execution reverted: nope", "nope"),
        ({"error": {"code": -32015, "message": "out of gas"}}, "out of gas", ""),
        ({}, "execution reverted", ""),
        ({"error": {"message": "a\x00b\u202e" + "x" * 5000}}, "ab" + "x" * 998, ""),
    ],
)
def test_errors_are_decoded(members: dict[str, Any], text: str, reason: str) -> None:
    error = done(status="0x0", **members).error
    assert error is not None
    assert (error.text, error.reason) == (text, reason)


def test_a_transaction_that_succeeds_has_no_error() -> None:
    found = done(returnData="0x01")
    assert (found.error, found.gas_used, found.returned) == (None, 21000, "0x01")


def test_results_that_are_too_large_are_refused() -> None:
    with pytest.raises(TooManyChanges, match="KiB"):
        read_result(b" " * (MOST_RESULT + 1), 1)
    many = [msgspec.Raw(b"{}")] * (MOST_LOGS + 1)
    with pytest.raises(TooManyChanges, match="logs"):
        transaction_result(CallResult("0x1", "0x0", logs=many))
    ids = [*range(MOST_LOGS + 1)]
    batch = log(
        "TransferBatch(address,address,address,uint256[],uint256[])",
        *(ALICE, ALICE, BOB),
        data=encode(["uint256[]", "uint256[]"], [ids, ids]),
    )
    with pytest.raises(TooManyChanges, match="transfers"):
        done(batch)


@pytest.mark.parametrize(
    "text", [b"null", b"[]", b"{}", b"[{}]", b"[1]", b'[{"number":"0x6","calls":[]}]', b'[{"number":"x","calls":[]}]']
)
def test_other_results_are_errors(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_result(text, 1)


@given(
    st.lists(st.binary(max_size=40), max_size=5),
    st.binary(max_size=200),
    st.sampled_from([APPROVAL, FOR_ALL, TRANSFER]),
)
def test_nothing_that_a_contract_emits_raises(topics: list[bytes], data: bytes, signature: str) -> None:
    each = log(signature, data=data)
    done({**each, "topics": [each["topics"][0], *("0x" + word.hex() for word in topics)]})


# Requests


def test_transaction_has_only_the_members_that_are_simulated() -> None:
    given_ = {
        "from": "0x" + ALICE.hex(),
        "to": "0x" + BOB.hex(),
        "value": "0x5",
        "input": "0x01",
        "gas": "0x5208",
        "gasPrice": "0x1",
        "nonce": None,
        "type": "0x2",
    }
    found = transaction_of(given_, "params[0]")
    assert found == {
        "from": "0x" + ALICE.hex(),
        "to": "0x" + BOB.hex(),
        "value": "0x5",
        "data": "0x01",
        "gas": "0x5208",
    }
    asked, block = params_of([found], "0x5")
    assert (asked["blockStateCalls"], asked["traceTransfers"], block) == ([{"calls": [found]}], True, "0x5")


@pytest.mark.parametrize(
    ("given_", "member"),
    [
        ([], "params[0]:"),
        ({"to": "0x1"}, "params[0].to:"),
        ({"to": "0x" + "aa" * 20 + "\n"}, "params[0].to:"),
        ({"value": 5}, "params[0].value:"),
        ({"value": "5"}, "params[0].value:"),
        ({"data": "0x1"}, "params[0].data:"),
        ({"data": "0x", "input": "0x01"}, "params[0].data:"),
        ({"To": "0x" + "aa" * 20}, "params[0].To:"),
        ({"stateOverrides": {}}, "params[0].stateOverrides:"),
    ],
)
def test_wrong_member_of_a_transaction_is_named(given_: Any, member: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(member)}"):
        transaction_of(given_, "params[0]")


@pytest.mark.parametrize("text", ["latest", "finalized", "0x10"])
def test_block_is_a_tag_or_a_number(text: str) -> None:
    assert block_of(text, "block") == text


@pytest.mark.parametrize("wrong", [5, "5", "newest", "0x", None, {"blockHash": word(1)}])
def test_other_blocks_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="block"):
        block_of(wrong, "block")


def test_method_is_that_of_the_nodes() -> None:
    assert asset_changes.METHOD == "eth_simulateV1"
