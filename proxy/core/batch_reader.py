"""Reads the items of a batch, a few at a time.

A batch of 1,000 calls takes several milliseconds to parse. Between two steps of a large one, other clients are served. The
reader finds where items begin and end by their brackets and commas, and each item is then parsed as strictly as a single call,
so a batch that is not JSON is noticed at the latest in its last item.
"""

from __future__ import annotations

import re

from proxy.core import jsonrpc
from proxy.core.batch_envelopes import parse_short_batch
from proxy.core.jsonrpc import MAX_DEPTH, PARSE_ERROR, STRICT, TOO_DEEP, Dialect, MalformedCall, RawCall
from proxy.errors import without_frames

# A step reads at most this many brackets per item, and ends after this many bytes unless an item is longer.
_BRACKETS_PER_ITEM = 2
_STEP_BYTES = 8192
# Bytes that are searched for the next bracket at once.
_WINDOW = 4096

# Groups are not possessive: Python before 3.11.5 does not backtrack correctly when a possessive group fails half-way. Little
# backtracking is needed, because the next byte decides between the alternatives.
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*"'
_PLAIN = rb'[^"\[\]{}]*+(?:%b[^"\[\]{}]*+)*' % _STRING


def _around(inside: bytes) -> bytes:
    """A pattern for text with pairs of brackets in it that enclose `inside`."""
    return rb"%b(?:[\[{]%b[\]}]%b)*" % (_PLAIN, inside, _PLAIN)


# A whole item with the comma behind it, if it is an object with brackets of up to three levels in it, as most are.
_USUAL = re.compile(rb"[ \t\r\n]*+(\{%b\})," % _around(_around(_around(_PLAIN))), re.DOTALL)
# Up to the next bracket, and up to the next bracket or comma.
_INSIDE = re.compile(_PLAIN, re.DOTALL)
_BETWEEN = re.compile(rb'[^"\[\]{},]*+(?:%b[^"\[\]{},]*+)*' % _STRING, re.DOTALL)
# The most escaped quotes in a string that is longer than the window. Bounds the time of a search; real calls have few.
_MOST_QUOTES = 8_000
_OPENERS = frozenset(b"[{")
_BRACKETS = frozenset(b"[]{}")
_SPACE = b" \t\r\n"
_COMMA, _END = ord(","), ord("]")


class BatchReader:
    __slots__ = ("_at", "_body", "_depth", "_dialect", "_most", "_start", "count", "is_done")

    def __init__(self, body: bytes, most: int, dialect: Dialect = STRICT) -> None:
        """The batch may have up to `most` items. Raises MalformedCall for a body that is not an array."""
        self._body = body
        self._most = most
        self._dialect = dialect
        self._at = self._start = len(body) - len(body.lstrip(_SPACE)) + 1
        if body[self._at - 1 : self._at] != b"[":
            raise _not_json()
        self._depth = 0
        self.count = 0
        self.is_done = False

    def __repr__(self) -> str:
        return f"<BatchReader {self.count} items, {'done' if self.is_done else f'{len(self._body) - self._at} bytes left'}>"

    def read(self, count: int) -> list[RawCall | MalformedCall]:
        """Up to this many more items, each as a call or as its error. Raises MalformedCall if the body is not a batch."""
        items: list[RawCall | MalformedCall] = []
        end = self._at + _STEP_BYTES
        for _ in range(count * _BRACKETS_PER_ITEM):
            if self.is_done or len(items) == count or self._at >= end:
                break
            item = self._advance()
            if item is not None:
                items.append(item)
        return items

    def _advance(self) -> RawCall | MalformedCall | None:
        """Go on to the next bracket, or past the end of the current item, which is then returned."""
        if self._at == self._start and (usual := _USUAL.match(self._body, self._at, self._at + _WINDOW)):
            self._at = usual.end()
            return self._parsed(usual[1])
        byte = self._skip(_INSIDE if self._depth else _BETWEEN)
        at = self._at
        if byte not in _BRACKETS and (self._depth or byte != _COMMA):
            return None  # The next bracket is beyond this window.
        self._at = at + 1
        if byte in _OPENERS:
            self._depth += 1
            if self._depth > MAX_DEPTH + 1:  # the call and its params
                raise MalformedCall(PARSE_ERROR, TOO_DEEP)
        elif self._depth:
            self._depth -= 1
        elif byte == _COMMA:
            return self._parsed(self._text(at))
        elif byte == _END:
            return self._last_item(at)
        else:
            raise _not_json()
        return None

    def _skip(self, run: re.Pattern[bytes]) -> int:
        """Go on to the next byte that matters, or to the end of the window. Returns the byte there."""
        body, at = self._body, self._at
        match = run.match(body, at, at + _WINDOW)
        end = -1 if match is None else match.end()
        if end == at and body[at : at + 1] == b'"':
            end = _end_of_string(body, at)  # longer than the window
        if not 0 <= end < len(body):
            raise _not_json()
        self._at = end
        return body[end]

    def _text(self, end: int) -> bytes:
        return self._body[self._start : end].strip(_SPACE)

    def _parsed(self, raw: bytes) -> RawCall | MalformedCall:
        self._start = self._at
        self.count += 1
        if self.count > self._most:
            raise MalformedCall(
                jsonrpc.INVALID_REQUEST, f"the batch has more than {self._most} items: send smaller batches"
            )
        try:
            return jsonrpc.parse(raw, None, self._dialect)
        except MalformedCall as exc:
            if exc.code == PARSE_ERROR:
                raise  # If one item is not JSON, the body is not JSON.
            return without_frames(exc)

    def _last_item(self, end: int) -> RawCall | MalformedCall:
        self.is_done = True
        if self._body[self._at :].strip(_SPACE):
            raise _not_json()
        if not self.count and not self._text(end):
            raise MalformedCall(jsonrpc.INVALID_REQUEST, "the batch is empty")
        return self._parsed(self._text(end))


def _end_of_string(body: bytes, start: int) -> int:
    """The index after a long string; -1 if it does not end. A quote after an odd number of backslashes is part of it."""
    at = start + 1
    for _ in range(_MOST_QUOTES):
        end = body.find(b'"', at)
        before = body[at:end]
        if end < 0 or (len(before) - len(before.rstrip(b"\\"))) % 2 == 0:
            return end + 1 or -1
        at = end + 1
    raise MalformedCall(PARSE_ERROR, TOO_DEEP)


def _not_json() -> MalformedCall:
    return MalformedCall(PARSE_ERROR, "parse error: the batch is not valid JSON")


def read_batch(body: bytes, most: int) -> list[RawCall | MalformedCall]:
    """All items at once. Raises MalformedCall for a body that is not a batch of up to `most` items."""
    short = parse_short_batch(body)
    if short is not None and len(short) <= most:
        return list(short)
    reader = BatchReader(body, most)
    items: list[RawCall | MalformedCall] = []
    while not reader.is_done:
        items += reader.read(most)
    return items
