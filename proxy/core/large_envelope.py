"""Large calls, parsed by their outline: most of their bytes are one string of hex digits.

A parser looks at every byte of such a string. Here it is found by its quotes and re-encoded by orjson, which is fast on
text that needs no escapes. If the result is longer than the original, the string has an escape or ends elsewhere, and
the body is parsed in full instead. The outline that remains is a small call like any other and is parsed as strictly.
"""

from __future__ import annotations

import orjson

from proxy.core.jsonrpc import MalformedCall, RawCall, parse

# Maximum size of the outline: a body with more than this besides its longest string has another shape.
MOST_AROUND = 4096
# Replaces the removed string in the outline. Everything else in it is ASCII.
_MARK = '"…"'.encode()


def read_call(data: bytes, start: int = 0) -> RawCall | None:
    """The call that begins there, if it is valid and has this shape. None does not mean that it is invalid."""
    middle = (start + len(data)) // 2
    opens, closes = data.rfind(b'"', start, middle), data.find(b'"', middle)
    if opens < 0 or closes < 0:
        return None
    before, after = data[start:opens], data[closes + 1 :]
    if data.find(b"\\", opens, closes) >= 0 or not _is_around_a_string(before, after):
        return None
    string = _plain(memoryview(data)[opens + 1 : closes])
    if string is None:
        return None
    try:
        method, params, id_ = parse(b"".join((before, _MARK, after)))
    except MalformedCall:
        return None
    first, mark, second = params.partition(_MARK)
    return (method, b"".join((first, string, second)), id_) if mark else None


def _is_around_a_string(before: bytes, after: bytes) -> bool:
    """Without a backslash no quote is escaped: after an even number of quotes, the next one opens a string."""
    around = before + after
    return len(around) < MOST_AROUND and around.isascii() and b"\\" not in around and before.count(b'"') % 2 == 0


def _plain(content: memoryview) -> bytes | None:
    """A string with its quotes, if it needs no escapes."""
    try:
        string = orjson.dumps(str(content, "ascii"))
    except UnicodeDecodeError:
        return None
    return string if len(string) == len(content) + 2 else None
