"""SimpleAccount factories: the address of a wallet before it exists, as the factory's `getAddress` computes it.

A factory deploys an ERC-1967 proxy with CREATE2. The address follows from the factory, the caller's salt, and the
proxy's creation code with its two arguments: the account's implementation and the call that sets the owner. The
implementation is the first contract that the factory created, in its constructor. The proxy of each factory version is
data: `config/factories`.
"""

from __future__ import annotations

from collections.abc import Mapping

import sha3

from proxy.chains.evm import abi, address
from proxy.chains.registry import Chain

_INITIALIZE = abi.selector("initialize(address)")
# The second argument begins behind the two words, and is a selector and one word.
_BEHIND, _SIZE = abi.word_of(2 * abi.WORD), abi.word_of(4 + abi.WORD)
_PADDING = bytes(abi.WORD - 4)
MOST_SALT = 2**256


class Factory:
    """One factory on one chain."""

    __slots__ = ("_begun", "address", "entry_point", "implementation", "version")

    def __init__(self, version: str, at: bytes, *, entry_point: bytes, proxy_code: bytes) -> None:
        self.version = version
        self.address = at
        self.entry_point = entry_point
        # A contract's first nonce is 1 (EIP-161).
        self.implementation = address.created(at, 1)
        # All that comes before the owner is the same for every wallet: it is hashed once, which saves ten of twelve steps.
        self._begun = sha3.keccak_256(
            proxy_code + abi.word_of(self.implementation) + _BEHIND + _SIZE + _INITIALIZE + bytes(12)
        )

    def __repr__(self) -> str:
        return f"<Factory {self.version} {address.checksum(self.address)}>"

    def wallet(self, owner: bytes, salt: int) -> bytes:
        code = self._begun.copy()
        code.update(owner + _PADDING)
        return address.create2(self.address, salt.to_bytes(32, "big"), code.digest())


def init_code(factory: bytes, owner: bytes, salt: int) -> bytes:
    """The factory, and the call that makes it deploy the owner's wallet."""
    return factory + abi.call("createAccount(address,uint256)", owner, salt)


def of_chain(chain: Chain, proxies: Mapping[str, bytes]) -> dict[str, Factory]:
    """The chain's factories by version, oldest first."""
    factories = {}
    for version in sorted(chain.factories):
        if version in proxies and version in chain.entry_points:
            factories[version] = Factory(
                version,
                bytes.fromhex(chain.factories[version][2:]),
                entry_point=bytes.fromhex(chain.entry_points[version][2:]),
                proxy_code=proxies[version],
            )
    return factories


def salt_of(text: str | None) -> int:
    """A decimal or 0x number as it is, any other text by its hash; without one 0. ValueError: a number beyond 256 bits."""
    if text is None:
        return 0
    number = _number(text)
    if number is None:
        return int.from_bytes(sha3.keccak_256(text.encode()).digest(), "big")
    if number >= MOST_SALT:
        raise ValueError("must be below 2**256")
    return number


def _number(text: str) -> int | None:
    if text.isascii() and text.isdecimal():
        return int(text)
    digits = text[2:]
    is_hex = text[:2] in ("0x", "0X") and digits.isascii() and digits.isalnum()
    try:
        return int(digits, 16) if is_hex else None
    except ValueError:
        return None
