"""The arguments that deploy the development chain's contracts, against eth-abi."""

from __future__ import annotations

from typing import Any

import pytest
from eth_abi import encode

from proxy.dev.encoding import arguments, call, name_hash

ALICE = "0x70997970C51812dc3A010C7d01b50e0d17dc79C8"


@pytest.mark.parametrize(
    ("types", "values"),
    [
        ([], []),
        (["uint256"], [2**256 - 1]),
        (["int256"], [-5]),
        (["address", "bool"], [ALICE, True]),
        (["bytes32"], [b"\x01" * 32]),
        (["string"], [""]),
        (["string", "uint8", "string"], ["a name", 6, "é" * 40]),
        (["address", "uint256[]", "uint256[]", "bytes"], [ALICE, [1, 2, 3], [], b"\xff" * 33]),
        (["string[]"], [["one", "another that does not fit into a single word"]]),
    ],
)
def test_arguments_are_encoded_as_eth_abi_does(types: list[str], values: list[Any]) -> None:
    assert arguments(types, values) == encode(types, values)


def test_call_begins_with_its_selector() -> None:
    assert call("transfer(address,uint256)", ALICE, 1)[:4].hex() == "a9059cbb"
    assert call("deposit()").hex() == "d0e30db0"


def test_name_hash_matches_eip_137() -> None:
    assert name_hash("eth").hex() == "93cdeb708b7545dc668eb9280176169d1c33cfd8ed6f04690a0bcc88a93fc4ae"
    assert name_hash("foo.eth").hex() == "de9b09fd7c5f901e23a3f19fecc54828e9c848539801e86591bd9801b019f84f"
