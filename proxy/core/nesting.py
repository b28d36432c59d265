"""Nesting depth and number of values of JSON, measured without parsing: parsers only stop at the interpreter's own recursion
limit, and take milliseconds for a megabyte of small values.

Almost every step is one pass in C over bytes that become fewer: a loop over the brackets of a large body would take
milliseconds.
"""

from __future__ import annotations

import re
from itertools import accumulate

# An unterminated string extends to the end.
_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_QUOTES = b'"\\'
_OTHERS = bytes(byte for byte in range(256) if byte not in _STEPS)
_NEITHER = bytes(byte for byte in _OTHERS if byte not in _QUOTES)
# No call has more arrays and objects, or more values: a megabyte of 32-byte words has 15,000.
_MOST_OPENERS = 10_000
_MOST_VALUES = 25_000
# A smaller text cannot have enough values to matter. A larger one is counted only if it has more than _FEW of a kind.
_SMALL = 32_768
_FEW = 64
# Each value but the first in its array or object follows one of these, and each escape begins with a backslash.
_COUNTED = (b",[{", b"\\")
# How often innermost pairs are removed at most. If this many brackets or fewer are then left, they are counted one by one.
_PASSES = 16
_MOST_COUNTED = 20_000


def is_deeper(data: bytes, most: int) -> bool:
    """Whether brackets outside of strings are nested deeper than this, or are too many to find out in time."""
    if len(data) <= most or _openers(data, b"[", most) + _openers(data, b"{", most) <= most:
        return False
    if len(data) - len(data.translate(None, b"[{")) > _MOST_OPENERS:
        return True
    brackets = _brackets(data)
    left = _without_pairs(brackets, most)
    if left is None:
        return False
    if len(brackets) <= _MOST_COUNTED:
        return _depth(brackets) > most
    return len(left) > _MOST_COUNTED or _depth(left) + 2 * _PASSES > most


def has_too_many_values(data: bytes) -> bool:
    """Whether a text has more values than any call, or as many escapes, which take as long to parse. Commas and brackets in
    strings are counted too, which makes no difference in practice."""
    return len(data) > _SMALL and any(_are_many(data, counted) for counted in _COUNTED)


def _are_many(data: bytes, counted: bytes) -> bool:
    if all(_openers(data, counted[at : at + 1], _FEW) <= _FEW for at in range(len(counted))):
        return False
    return len(data) - len(data.translate(None, counted)) > _MOST_VALUES


def _brackets(data: bytes) -> bytes:
    """The brackets outside of strings."""
    if b"\\" not in data:
        # Most strings have no brackets, so only their two quotes are left, which are removed. This may also join the quotes
        # of two neighbouring strings, but never removes a bracket.
        data = data.translate(None, _NEITHER).replace(b'""', b"")
    return _STRINGS.sub(b"", data).translate(None, _OTHERS) if b'"' in data else data


def _without_pairs(brackets: bytes, most: int) -> bytes | None:
    """The brackets that are left after some passes; None once they are too few to be too deep. A pass removes two levels at
    most."""
    for passed in range(_PASSES):
        if len(brackets) + 2 * passed <= most:
            return None
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    return brackets


def _depth(brackets: bytes) -> int:
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)


def _openers(data: bytes, bracket: bytes, most: int) -> int:
    """The number of occurrences, counted up to one more than `most`. `find` is faster than `count` if there are few."""
    count, at = 0, data.find(bracket)
    while at >= 0 and count <= most:
        count += 1
        at = data.find(bracket, at + 1)
    return count
