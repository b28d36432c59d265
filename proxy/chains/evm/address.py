"""Addresses: 20 bytes inside, EIP-55 text outside.

Text is accepted in any case. If a typing error would be costly, check `is_mistyped`: mixed case is a checksum, and a wrong
checksum is a typing error.
"""

from __future__ import annotations

import re
from functools import lru_cache

import sha3

from proxy.chains.family import AddressFormat

ZERO = bytes(20)
_TEXT = re.compile(r"0[xX][0-9a-fA-F]{40}", re.ASCII)
_REMEMBERED = 65_536
# Bits of every one of 40 characters: 0x40 is set in letters and not in digits, 0x20 in small letters and not in capitals.
_EACH = int.from_bytes(b"\x01" * 40, "big")
_LETTER, _EIGHT = _EACH * 0x40, _EACH * 0x08


def parse(text: str) -> bytes | None:
    """The address in a text, in upper, lower or mixed case."""
    return bytes.fromhex(text[2:]) if _TEXT.fullmatch(text) else None


@lru_cache(_REMEMBERED)
def checksum(address: bytes) -> str:
    return fresh_checksum(address)


def fresh_checksum(address: bytes) -> str:
    """Like `checksum`, without remembering it: the longest list of an account would displace all that others use.

    EIP-55: "if the ith digit is a letter, print it in uppercase if the 4*ith bit of the hash of the lowercase hexadecimal
    address is 1".

    All characters at once, as one number: 2 µs where a loop takes 6. A digit of the hash is 8 or more if it is a letter, or
    8 or 9, whose code has the bit 0x08; either is moved to where the case of a letter is.
    """
    digits = address.hex().encode()
    text, nibbles = (
        int.from_bytes(each, "big") for each in (digits, sha3.keccak_256(digits).hexdigest()[:40].encode())
    )
    capitals = (text & _LETTER) >> 1 & ((nibbles & _LETTER) >> 1 | (nibbles & _EIGHT) << 2)
    return "0x" + (text ^ capitals).to_bytes(40, "big").decode()


def is_mistyped(text: str) -> bool:
    """Whether the text is in mixed case and the case does not match the checksum."""
    digits = text[2:]
    return digits not in (digits.lower(), digits.upper()) and text[2:] != fresh_checksum(bytes.fromhex(digits))[2:]


FORMAT = AddressFormat(parse, checksum, "0x and 40 hex digits", str.lower)


# Addresses of new contracts


def created(deployer: bytes, nonce: int) -> bytes:
    """The address of the contract that an account creates with this nonce: from the hash of the RLP list of the two. Only for
    nonces of one byte."""
    if not 0 < nonce < 0x80:
        raise ValueError("only nonces from 1 to 127 are known here")
    return bytes(sha3.keccak_256(b"\xd6\x94" + deployer + bytes([nonce])).digest()[12:])


def create2(deployer: bytes, salt: bytes, code_hash: bytes) -> bytes:
    """EIP-1014: "keccak256( 0xff ++ address ++ salt ++ keccak256(init_code))[12:]"."""
    return bytes(sha3.keccak_256(b"\xff" + deployer + salt + code_hash).digest()[12:])
