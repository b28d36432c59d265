"""Nesting depth of JSON, measured without parsing: parsers only stop at the interpreter's own recursion limit.

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
# No call has more arrays and objects.
_MOST_OPENERS = 50_000
# Innermost pairs are removed so often at most, and then the brackets that are left are counted one by one.
_PASSES = 16
_MOST_COUNTED = 20_000


def is_deeper(data: bytes, most: int) -> bool:
    """Whether brackets outside of strings are nested deeper than this, or are too many to find out in time."""
    if len(data) <= most or _openers(data, b"[", most) + _openers(data, b"{", most) <= most:
        return False
    if data.count(b"[") + data.count(b"{") > _MOST_OPENERS:
        return True
    brackets = _brackets(data)
    left = _without_pairs(brackets, most)
    if left is None:
        return False
    if len(brackets) <= _MOST_COUNTED:
        return _depth(brackets) > most
    return len(left) > _MOST_COUNTED or _depth(left) + 2 * _PASSES > most


def _brackets(data: bytes) -> bytes:
    """The brackets outside of strings."""
    if b"\\" not in data:
        # Without brackets in them, strings are pairs of quotes. Two that are merged here have no bracket between them.
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
    """The number of occurrences, up to the limit that matters. `find` skips what `count` looks at byte by byte."""
    found, at = 0, data.find(bracket)
    while at >= 0 and found <= most:
        found += 1
        at = data.find(bracket, at + 1)
    return found
