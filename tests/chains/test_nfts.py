"""NFT contracts: what their answers about one token mean."""

from __future__ import annotations

import pytest

from proxy.chains.evm import nfts
from proxy.chains.evm.nfts import NftContractFacts

OWNER = bytes(range(1, 21))
ID = 42


def word(number: int) -> bytes:
    return number.to_bytes(32, "big")


def text(value: str) -> bytes:
    raw = value.encode()
    return word(32) + word(len(raw)) + raw.ljust(-(-len(raw) // 32) * 32, b"\0")


YES, NO = word(1), word(0)
NAMES = (
    *("erc165", "invalid", "erc721", "erc1155"),
    *("owner", "token_uri", "uri", "exists", "supply", "balance"),
)


def answered(**given: bytes) -> NftContractFacts | None:
    assert set(given) <= set(NAMES)
    return nfts.answered([given.get(name) for name in NAMES])


SPEAKS_721 = {"erc165": YES, "invalid": NO, "erc721": YES, "erc1155": NO}
SPEAKS_1155 = {"erc165": YES, "invalid": NO, "erc721": NO, "erc1155": YES}


def test_questions_are_the_selectors_of_the_standards() -> None:
    asked = nfts.questions(ID)
    assert len(asked) == len(NAMES)
    assert [data[:4].hex() for data in asked] == [
        *("01ffc9a7",) * 4,
        *("6352211e", "c87b56dd", "0e89341c", "4f558e79", "bd85b039", "00fdd58e"),
    ]
    assert [data[4:8].hex() for data in asked[:4]] == ["01ffc9a7", "ffffffff", "80ac58cd", "d9b67a26"]
    assert {data[-32:] for data in asked[4:]} == {word(ID)}


def test_erc721_has_an_owner_and_a_uri() -> None:
    found = answered(**SPEAKS_721, owner=word(int.from_bytes(OWNER, "big")), token_uri=text("ipfs://x"))
    assert found == NftContractFacts(721, OWNER, "ipfs://x", exists=True, supply=None)


@pytest.mark.parametrize("owner", [{}, {"owner": NO}, {"owner": b"\xff" * 32}, {"owner": b""}])
def test_erc721_token_without_an_owner_does_not_exist(owner: dict[str, bytes]) -> None:
    assert answered(**SPEAKS_721, **owner, token_uri=text("x")) == NftContractFacts(
        721, None, "x", exists=False, supply=None
    )


@pytest.mark.parametrize(
    ("replies", "exists", "supply"),
    [
        ({}, None, None),
        ({"exists": YES}, True, None),
        ({"exists": NO}, False, None),
        ({"supply": word(5)}, True, 5),
        ({"supply": NO}, False, 0),
        ({"supply": word(5), "exists": NO}, True, 5),
        ({"exists": word(7)}, None, None),
    ],
)
def test_erc1155_token_exists_as_far_as_its_contract_says(
    replies: dict[str, bytes], exists: bool | None, supply: int | None
) -> None:
    assert answered(**SPEAKS_1155, uri=text("x/{id}"), **replies) == NftContractFacts(
        1155, None, "x/{id}", exists, supply
    )


def test_contract_from_before_erc165_is_what_it_does() -> None:
    assert answered(owner=word(int.from_bytes(OWNER, "big"))) == NftContractFacts(
        721, OWNER, None, exists=True, supply=None
    )
    assert answered(owner=NO) == NftContractFacts(721, None, None, exists=False, supply=None)
    assert answered(balance=NO, uri=text("x")) == NftContractFacts(1155, None, "x", exists=None, supply=None)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"balance": NO},
        {"uri": text("x")},
        {"erc165": YES, "invalid": NO, "erc721": NO, "erc1155": NO},
        {"token_uri": text("x")},
        dict.fromkeys(NAMES, b"\xff" * 32),
        dict.fromkeys(NAMES, b"\xff" * 64),
        dict.fromkeys(NAMES, b""),
    ],
)
def test_contract_of_neither_standard_is_no_nft(given: dict[str, bytes]) -> None:
    found = answered(**given)
    assert found is None or found.exists is not True


def test_contract_that_says_yes_to_everything_does_not_speak_erc165() -> None:
    assert nfts.by_erc165([YES, YES, YES, YES]) is None
    assert nfts.by_erc165([YES, NO, YES, YES]) == 721
    assert nfts.by_erc165([YES, NO, NO, YES]) == 1155
    assert nfts.by_erc165([YES, None, YES, NO]) is None
