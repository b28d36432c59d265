"""The calls that read one NFT from its contract, and how to interpret the results.

The standard comes from ERC-165 if the contract implements it properly. Otherwise it follows from behaviour: a contract that
returns an owner for a token is ERC-721, one that returns balances by token is ERC-1155.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.chains.evm import abi, address

# ERC-165: a contract that implements it returns true for its own id and false for ffffffff.
INTERFACES = tuple(
    abi.call("supportsInterface(bytes4)", bytes.fromhex(each))
    for each in ("01ffc9a7", "ffffffff", "80ac58cd", "d9b67a26")
)
# An address that should hold no tokens: only whether the call succeeds matters.
_SOMEBODY = (1).to_bytes(20, "big")


@dataclass(frozen=True, slots=True)
class NftContractFacts:
    """One token, from its contract. `exists` and `supply` are None if the contract does not report them."""

    standard: int
    owner: bytes | None
    uri: str | None
    exists: bool | None
    supply: int | None


def questions(token_id: int) -> list[bytes]:
    return [
        *INTERFACES,
        abi.call("ownerOf(uint256)", token_id),
        abi.call("tokenURI(uint256)", token_id),
        abi.call("uri(uint256)", token_id),
        abi.call("exists(uint256)", token_id),
        abi.call("totalSupply(uint256)", token_id),
        abi.call("balanceOf(address,uint256)", _SOMEBODY, token_id),
    ]


def answered(answers: Sequence[bytes | None]) -> NftContractFacts | None:
    """The token; None if this is not an NFT contract."""
    owner = abi.address(answers[4])
    owner = None if owner == address.ZERO else owner
    standard = by_erc165(answers[:4]) or _by_behaviour(owner, answers)
    if standard is None:
        return None
    if standard == 721:
        return NftContractFacts(721, owner, _text(answers[5]), exists=owner is not None, supply=None)
    supply = abi.uint(answers[8])
    exists = abi.truth(answers[7]) if supply is None else supply > 0
    return NftContractFacts(1155, None, _text(answers[6]), exists, supply)


def by_erc165(answers: Sequence[bytes | None]) -> int | None:
    """The standard by the replies to `INTERFACES`."""
    erc165, invalid, erc721, erc1155 = map(abi.truth, answers)
    if erc165 is not True or invalid is not False:
        return None
    return 721 if erc721 else 1155 if erc1155 else None


def _by_behaviour(owner: bytes | None, answers: Sequence[bytes | None]) -> int | None:
    """A contract whose fallback returns data for every call is neither: an owner must be a full address."""
    if owner is not None or (abi.address(answers[4]) is not None and len(answers[4] or b"") == abi.WORD):
        return 721
    has_balances = answers[9] is not None and len(answers[9]) == abi.WORD
    return 1155 if has_balances and _text(answers[6]) is not None else None


def _text(data: bytes | None) -> str | None:
    """The text, if the data is an ABI-encoded string; otherwise None."""
    raw = abi.dynamic(data)
    return None if raw is None else raw.decode("utf-8", "replace")
