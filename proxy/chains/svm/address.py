"""Addresses: 32 bytes inside, base 58 outside; and those that a program derives, which no key can sign for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256

from proxy.chains.family import AddressFormat

SIZE = 32
# Network ids in token lists; the chain itself has none.
LIST_IDS = {"mainnet": 101, "testnet": 102, "devnet": 103}
_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_VALUES = {digit: value for value, digit in enumerate(_ALPHABET)}
# 32 bytes take 32 (all zero) to 44 digits.
_SHORTEST, _LONGEST = 32, 44
_DERIVED = b"ProgramDerivedAddress"
# Ed25519: the field, and the curve's constant d = -121665/121666 in it.
_P = 2**255 - 19
_D = -121665 * pow(121666, -1, _P) % _P
_REMEMBERED = 65_536


def parse(text: str) -> bytes | None:
    """The address in a text; None if it is not one."""
    return decoded(text, SIZE) if _SHORTEST <= len(text) <= _LONGEST else None


def decoded(text: str, size: int) -> bytes | None:
    """The bytes of a text in base 58, if it has exactly this many. Longer texts than such bytes can have are not read."""
    if len(text) > size * 11 // 8 + 1:
        return None
    number = 0
    for digit in text:
        value = _VALUES.get(digit)
        if value is None:
            return None
        number = number * 58 + value
    zeros = len(text) - len(text.lstrip("1"))
    if number >> size * 8 or zeros + (number.bit_length() + 7) // 8 != size:
        return None
    return number.to_bytes(size, "big")


@lru_cache(_REMEMBERED)
def show(address: bytes) -> str:
    number, digits = int.from_bytes(address, "big"), ""
    while number:
        number, value = divmod(number, 58)
        digits = _ALPHABET[value] + digits
    return "1" * (len(address) - len(address.lstrip(b"\0"))) + digits


FORMAT = AddressFormat(parse, show, "32 bytes in base 58")


def derived(seeds: Sequence[bytes], program: bytes) -> bytes:
    """The address that a program derives from these seeds: the first, from bump 255 down, that is not on the curve."""
    for bump in range(255, -1, -1):
        address = sha256(b"".join((*seeds, bytes([bump]), program, _DERIVED))).digest()
        if not is_on_curve(address):
            return address
    raise ValueError("these seeds lead to no address")


def is_on_curve(point: bytes) -> bool:
    """Whether 32 bytes are a compressed point of Ed25519: whether x² = (y² - 1) / (d y² + 1) has a solution."""
    y = int.from_bytes(point, "little") & ((1 << 255) - 1)
    u, v = (y * y - 1) % _P, (_D * y * y + 1) % _P
    # The division without its inverse: u/v is a square exactly when u·v is.
    square = u * v % _P
    return square == 0 or pow(square, (_P - 1) // 2, _P) == 1
