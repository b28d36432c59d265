"""Every address that is written in a file carries its EIP-55 checksum: a mistyped one does not get past review."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sha3

from proxy.settings import CONFIG, SCHEMAS

ADDRESS = re.compile(r"0x[0-9a-fA-F]{40}(?![0-9a-fA-F])")
FILES = sorted([*(CONFIG / "chains").glob("*.toml"), SCHEMAS / "openapi.json", *(SCHEMAS / "http").glob("*.json")])


def checksummed(address: str) -> str:
    """EIP-55: "if the ith digit is a letter, print it in uppercase if the 4*ith bit of the hash of the lowercase hexadecimal
    address is 1"."""
    digits = address[2:].lower()
    nibbles = sha3.keccak_256(digits.encode()).hexdigest()
    return "0x" + "".join(d.upper() if int(n, 16) >= 8 else d for d, n in zip(digits, nibbles, strict=False))


@pytest.mark.parametrize(
    "address",
    [
        "0x52908400098527886E0F7030069857D2E4169EE7",
        "0xde709f2102306220921060314715629080e2fb77",
        "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed",
        "0xfB6916095ca1df60bB79Ce92cE3Ea74c37c5d359",
        "0xdbF03B407c01E7cD3CBea99509d93f8DDDC8C6FB",
        "0xD1220A0cf47c7B9Be7A2E6BA89F429762e7b9aDb",
    ],
)
def test_vectors_of_the_proposal_hold(address: str) -> None:
    assert checksummed(address.lower()) == address


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_addresses_in_the_file_carry_their_checksums(path: Path) -> None:
    found = ADDRESS.findall(path.read_text("utf-8"))
    assert found == [checksummed(address) for address in found]


def test_chain_files_do_have_addresses() -> None:
    assert len(ADDRESS.findall((CONFIG / "chains" / "ethereum.toml").read_text("utf-8"))) >= 5
