"""Encoding and decoding for the subset of the contract ABI that is used: static arguments, words, text, bytes, and Multicall3.

Return data is untrusted. Nothing here raises for it: unreadable data is None, and no offset or length that a contract
claims is followed beyond the bytes that are there.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

import sha3

WORD = 32
Argument = int | bytes | bool


@lru_cache(1024)
def selector(signature: str) -> bytes:
    """The first four bytes of the hash of `name(type,...)`."""
    return bytes(sha3.keccak_256(signature.encode()).digest()[:4])


def call(signature: str, *arguments: Argument) -> bytes:
    """Calldata for static arguments: numbers, truth values, addresses (20 bytes), and bytesN as bytes."""
    return selector(signature) + b"".join([word_of(argument) for argument in arguments])


def word_of(value: Argument) -> bytes:
    """Numbers and addresses are right-aligned in their word, bytesN left-aligned."""
    if isinstance(value, bytes):
        return value.rjust(WORD, b"\0") if len(value) == 20 else value.ljust(WORD, b"\0")
    return (value % (1 << 256)).to_bytes(WORD, "big")


# Reading


def unhex(text: object) -> bytes | None:
    """The bytes of a result that an upstream returned as 0x text."""
    if not isinstance(text, str) or not text.startswith("0x"):
        return None
    try:
        return bytes.fromhex(text[2:])
    except ValueError:
        return None


def uint(data: bytes | None, at: int = 0) -> int | None:
    """The word at this place, as a number. More bytes may follow; some contracts send too many."""
    if data is None or len(data) < (at + 1) * WORD:
        return None
    return int.from_bytes(data[at * WORD : (at + 1) * WORD], "big")


def signed(data: bytes | None, at: int = 0) -> int | None:
    value = uint(data, at)
    return value - (1 << 256) if value is not None and value >> 255 else value


def truth(data: bytes | None) -> bool | None:
    """Strictly 0 or 1: a proxy that returns some word for every call does not count as true."""
    value = uint(data)
    return bool(value) if value in (0, 1) else None


def address(data: bytes | None, at: int = 0) -> bytes | None:
    value = uint(data, at)
    return value.to_bytes(20, "big") if value is not None and value < 1 << 160 else None


def dynamic(data: bytes | None, at: int = 0) -> bytes | None:
    """The bytes or string whose offset is at this place."""
    if data is None:
        return None
    # A word that is not there reads as 0, whose length is the offset itself: the bounds refuse it all the same.
    offset = int.from_bytes(data[at * WORD : (at + 1) * WORD], "big")
    start = offset + WORD
    end = start + int.from_bytes(data[offset:start], "big")
    return data[start:end] if len(data) >= (at + 1) * WORD and start <= end <= len(data) else None


def text(data: bytes | None) -> str | None:
    """A string; or, as in the first tokens, text in one word padded with zeros. Bytes that are not UTF-8 are marked."""
    if data is None:
        return None
    raw = data.rstrip(b"\0") if len(data) == WORD else dynamic(data)
    return None if raw is None else raw.decode("utf-8", "replace")


# Multicall3: aggregate3((address target, bool allowFailure, bytes callData)[]) returns ((bool success, bytes returnData)[])

_AGGREGATE = selector("aggregate3((address,bool,bytes)[])") + (WORD).to_bytes(WORD, "big")
_TRUE = (1).to_bytes(WORD, "big")
# The offset of a tuple's bytes behind its three words.
_BEHIND = (3 * WORD).to_bytes(WORD, "big")
_PAD = b"\0" * WORD
# The last eight bytes of a word: no valid offset or length needs more.
_SHORT = "24xQ"
# A result: whether it succeeded, its offset, its length.
_RESULT = struct.Struct(f">31xB{_SHORT}{_SHORT}").unpack_from


def aggregate(calls: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Calldata that makes many calls (target, calldata) in one; each may fail alone."""
    offset = len(calls) * WORD
    offsets: list[int] = []
    bodies: list[bytes] = []
    # Most calls send the same data to another contract.
    tails: dict[bytes, bytes] = {}
    for target, data in calls:
        tail = tails.get(data)
        if tail is None:
            size = len(data)
            tail = tails[data] = b"".join((_TRUE, _BEHIND, size.to_bytes(WORD, "big"), data, _PAD[: -size % WORD]))
        offsets.append(offset)
        bodies += (_PAD[:12], target, tail)
        offset += WORD + len(tail)
    places = struct.pack(f">{_SHORT * len(calls)}", *offsets)
    return b"".join((_AGGREGATE, len(calls).to_bytes(WORD, "big"), places, *bodies))


# A call that failed without return data, perhaps for lack of gas.
SILENT = None
# A call that failed with a reason: that is its reply.
REVERTED = b""


def aggregated(data: bytes | None, count: int) -> list[bytes | None] | None:
    """The result of each call: `SILENT` if it failed without data, `REVERTED` if it failed with data.

    None if this is not such a reply, for example from an address without that contract.
    """
    start = 2 * WORD
    if data is None or uint(data) != WORD or uint(data, 1) != count or len(data) < start + count * WORD:
        return None
    results: list[bytes | None] = []
    whole = left = len(data)  # results do not overlap, so no more bytes than these are copied
    for offset in struct.unpack_from(f">{_SHORT * count}", data, start):
        end = start + offset + 3 * WORD
        if end > whole:
            return None
        is_good, _, size = _RESULT(data, end - 3 * WORD)
        left -= size
        if left < 0 or end + size > whole:
            return None
        if is_good:
            results.append(data[end : end + size])
        else:
            results.append(REVERTED if size else SILENT)
    return results
