"""ENS names: which texts are one, what they hash to, and what is asked of the registry and of a resolver.

Only names of plain ASCII are understood. Which others there are, and which look like another, takes tables of many thousand
characters (ENSIP-15): a name that is not plainly itself is refused, because to resolve the wrong one costs somebody money.
"""

from __future__ import annotations

import re

import sha3

from proxy.chains.evm import abi

LONGEST = 255
# ENSIP-15 on ASCII: letters, digits, hyphens, dollar signs, underscores in front only; and no hyphens in the third and fourth
# place, where another encoding begins.
_LABEL = re.compile(r"(?!..--)_*[a-z0-9$-]+|_+", re.ASCII)


class BadName(ValueError):
    """The text is no name that is understood. The message goes behind the parameter's name."""


def normalised(text: str) -> str:
    """The name in its one form."""
    if not text.isascii():
        raise BadName(
            "names with other characters than letters, digits and hyphens are not understood: give the address"
        )
    name = text.lower()
    if len(name) > LONGEST or "." not in name or not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise BadName("is neither an address nor a name such as example.eth")
    return name


def namehash(name: str) -> bytes:
    """EIP-137: "namehash([label, …]) = keccak256(namehash(…) + keccak256(label))", and 32 zeros for the empty name."""
    node = bytes(32)
    for label in reversed(name.split(".")) if name else ():
        node = sha3.keccak_256(node + sha3.keccak_256(label.encode()).digest()).digest()
    return node


def ask_registry(node: bytes) -> bytes:
    return abi.call("resolver(bytes32)", node)


def ask_resolver(node: bytes) -> bytes:
    return abi.call("addr(bytes32)", node)
