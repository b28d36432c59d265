"""ENS names: normalisation, hashes, and the calls to the registry and to a resolver.

Names are normalised by ENSIP-15, which decides which texts are names, and rejects those that mix scripts or look like
another name. Its tables take 90 MB of memory and 0.2 s to load, so `ens_normalize` is imported when the first name needs
it. On plain ASCII the rules are few, and most names need only those: see `is_plain`.
"""

from __future__ import annotations

import re

import sha3

from proxy.chains.evm import abi

LONGEST = 255
# ENSIP-15 on ASCII: letters, digits, hyphens, dollar signs, and underscores at the start only. Hyphens in the third and
# fourth place are reserved for other encodings (`xn--`).
_LABEL = re.compile(r"(?!..--)_*[a-z0-9$-]+|_+", re.ASCII)
# The one other ASCII character that ENSIP-15 accepts: it maps to U+2019.
_APOSTROPHE = "'"
_NOT_A_NAME = "is neither an address nor a name such as example.eth"


class BadName(ValueError):
    """The text is not a valid name. The message follows the name of the parameter."""


def is_plain(text: str) -> bool:
    """Whether the ASCII rules are enough to normalise or reject the text."""
    return text.isascii() and _APOSTROPHE not in text


def normalised(text: str) -> str:
    """The normalised name, or BadName. Slow for the first text that is not plain."""
    if len(text) > LONGEST or "." not in text:
        raise BadName(_NOT_A_NAME)
    return _plain_name(text) if is_plain(text) else _full_name(text)


def _plain_name(text: str) -> str:
    name = text.lower()
    if not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise BadName(_NOT_A_NAME)
    return name


def _full_name(text: str) -> str:
    from ens_normalize import DisallowedSequence, ens_normalize  # type: ignore[import-untyped]

    try:
        return str(ens_normalize(text))
    except DisallowedSequence:
        raise BadName("is not a valid ENS name (ENSIP-15): give the address instead") from None


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
