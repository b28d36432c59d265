"""Every address that is written in a file carries its EIP-55 checksum: a mistyped one does not get past review."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from proxy.chains.evm import address as evm
from proxy.chains.evm.address import checksum
from proxy.settings import CONFIG, SCHEMAS

ADDRESS = re.compile(r"0x[0-9a-fA-F]{40}(?![0-9a-fA-F])")
FILES = sorted(
    [
        *(CONFIG / "chains").glob("*.toml"),
        *(CONFIG / "tokens").glob("*.json"),
        *SCHEMAS.rglob("*.json"),
    ]
)


def checksummed(address: str) -> str:
    return checksum(bytes.fromhex(address[2:]))


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


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_addresses_in_the_file_carry_their_checksums(path: Path) -> None:
    found = ADDRESS.findall(path.read_text("utf-8"))
    assert found == [checksummed(address) for address in found]


def test_chain_files_do_have_addresses() -> None:
    assert len(ADDRESS.findall((CONFIG / "chains" / "ethereum.toml").read_text("utf-8"))) >= 5


@pytest.mark.parametrize(
    "text", ["0xDBF03B407C01E7CD3CBEA99509D93F8DDDC8C6FB", "0XdbF03B407c01E7cD3CBea99509d93f8DDDC8C6FB"]
)
def test_address_is_taken_in_any_case(text: str) -> None:
    assert evm.parse(text) == evm.parse(text.lower()) == bytes.fromhex("dbf03b407c01e7cd3cbea99509d93f8dddc8c6fb")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0x",
        "dbf03b407c01e7cd3cbea99509d93f8dddc8c6fb",
        "0x" + "g" * 40,
        "0x" + "a" * 39,
        "0x" + "a" * 40 + "\n",
        "0x" + "١" * 40,
    ],
)
def test_malformed_address_is_none(text: str) -> None:
    assert evm.parse(text) is None


def test_mixed_case_that_is_not_the_checksum_is_a_typing_error() -> None:
    right = "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed"
    assert not any(map(evm.is_mistyped, (right, right.lower(), "0x" + right[2:].upper())))
    assert evm.is_mistyped(right.replace("Ef1B", "eF1B"))
