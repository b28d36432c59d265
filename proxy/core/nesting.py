"""Nesting depth of JSON, measured without parsing: parsers only stop at the interpreter's own recursion limit."""

from __future__ import annotations

import re
from itertools import accumulate

# An unterminated string extends to the end.
_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_OTHERS = bytes(byte for byte in range(256) if byte not in _STEPS)


def is_deeper(data: bytes, most: int) -> bool:
    """Whether brackets outside of strings are nested deeper than this."""
    if len(data) <= most or _openers(data, b"[", most) + _openers(data, b"{", most) <= most:
        return False
    brackets = _STRINGS.sub(b"", data).translate(None, _OTHERS)
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0) > most


def _openers(data: bytes, bracket: bytes, most: int) -> int:
    """The number of occurrences, up to the limit that matters. `find` skips what `count` looks at byte by byte."""
    found, at = 0, data.find(bracket)
    while at >= 0 and found <= most:
        found += 1
        at = data.find(bracket, at + 1)
    return found
