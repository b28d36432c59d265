"""Reasons of reverts as people read them."""

from __future__ import annotations

import orjson
import pytest
from eth_abi.abi import encode
from hypothesis import given
from hypothesis import strategies as st
from web3 import Web3

from proxy.chains.evm.revert_reasons import message_of, reason_of

HOLDER = "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed"


def reverted(signature: str, *values: object) -> bytes:
    types = signature.partition("(")[2].rstrip(")")
    return Web3.keccak(text=signature)[:4] + encode(types.split(",") if types else [], values)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (reverted("Error(string)", "not enough"), "not enough"),
        (reverted("Panic(uint256)", 0x11), "Panic 0x11: arithmetic overflow or underflow"),
        (reverted("Panic(uint256)", 0xFF), "Panic 0xff: unknown code"),
        (
            reverted("ERC20InsufficientBalance(address,uint256,uint256)", HOLDER, 5, 7),
            f"ERC20InsufficientBalance({HOLDER}, 5, 7)",
        ),
        (reverted("EnforcedPause()"), "EnforcedPause()"),
        (reverted("FailedOp(uint256,string)", 0, "AA21"), "FailedOp(0, 'AA21')"),
        (bytes.fromhex("deadbeef"), "custom error 0xdeadbeef"),
        (b"", ""),
        (b"\x08\xc3", ""),
    ],
)
def test_data_of_a_revert_is_decoded(data: bytes, reason: str) -> None:
    assert reason_of(data) == reason


def test_error_is_shown_without_json() -> None:
    error = {"code": 3, "message": "execution reverted", "data": "0x" + reverted("Error(string)", "too late").hex()}
    assert message_of(orjson.dumps(error).decode()) == "execution reverted: too late"
    error["message"] = "execution reverted: too late"
    assert message_of(orjson.dumps(error).decode()) == "execution reverted: too late"
    assert message_of('{"code":-32000,"message":"a \\"b\\""}') == 'a "b"'
    # Hardhat's errors have an object with the data.
    nested = {"code": -32603, "message": "VM", "data": {"data": "0x" + reverted("EnforcedPause()").hex()}}
    assert message_of(orjson.dumps(nested).decode()) == "VM: EnforcedPause()"
    nested["message"] = f"custom error (return data: 0x{reverted('EnforcedPause()').hex()})"
    assert message_of(orjson.dumps(nested).decode()) == "custom error: EnforcedPause()"
    assert message_of("rate limit exceeded") == "rate limit exceeded"


@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_data_and_any_beginning_of_an_error_is_read(data: bytes, size: int) -> None:
    reason_of(data)
    reason_of(reverted("ERC20InsufficientBalance(address,uint256,uint256)", HOLDER, 5, 7)[: len(data)])
    message_of(orjson.dumps({"message": "reverted", "data": "0x" + data.hex()}).decode()[:size])
