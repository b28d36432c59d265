"""JSON from a client, read in short steps and within bounds that hold before anything is parsed.

A parser builds an object for each value, so a few megabytes of `[]` or `0` take seconds and hundreds of megabytes. Clients
need few values, except in long lists of text: addresses, topics, ids. The reader splits a text into these two parts:

- A *run* is a sequence of strings without escapes, as in a list of addresses. Runs may be as long as the text.
- The *outline* is all the rest, with a mark in place of each run. Its size, its arrays and objects and its values are bounded,
  and it is parsed once.

A step reads about STEP_BYTES. Between two steps the caller serves other clients. A text may be read while it arrives: what was
read is dropped, so a large one is never in memory as a whole. Some valid JSON is refused, because the rest of the program
cannot handle it: repeated names, numbers of many digits, and U+0000, which Postgres cannot store.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import orjson

# A step of this size takes 0.2 ms in a list of strings, and 2 ms if it consists of escapes.
STEP_BYTES = 16_384
# Strings outside of runs are read one by one, so a step may have only this many of them.
STEP_STRINGS = 512
# The bounds of the outline. No operation needs a tenth of them, and parsing and validating as much takes about 1 ms.
MOST_CONTAINERS = 200
MOST_VALUES = 2_000
# Strings in all runs. The longest lists are 100,000 addresses to add to a webhook, and as many to remove.
MOST_STRINGS = 250_000
# A list with more items stays text: see LongText. No other operation than those of webhooks takes as many.
MOST_LISTED = 10_000
MOST_OUTLINE_BYTES = 262_144
# Strings that are longer than a step, such as call data, have a separate bound.
MOST_LONG_BYTES = 1_048_576
# The largest text that `parse_bounded` reads, because it does so in one step.
MOST_AT_ONCE = 524_288
MOST_VALUES_AT_ONCE = 5_000
# 2^256 has 78 digits.
MOST_DIGITS = 100
# A shorter run is not worth a mark.
_LEAST_RUN = 16

_SPACE = rb"[ \t\r\n]*+"
# Groups are not possessive: Python before 3.11.5 does not backtrack correctly when a possessive group fails half-way.
_RUN = re.compile(rb'(?:%b"[^"\\\x00-\x1f]*+"%b,){%d,}' % (_SPACE, _SPACE, _LEAST_RUN))
_OUTSIDE = re.compile(rb'[^"]*+')
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*"', re.DOTALL)
_LONG_NUMBER = re.compile(rb"[0-9.eE+-]{%d}" % (MOST_DIGITS + 1))
_NOT_STRUCTURE = bytes(byte for byte in range(256) if byte not in b"[{,:")
_NUL, _NUL_ESCAPE = "\0", b"\\u0000"
# Stands for a string with U+0000 until its path is known.
_NUL_MARK = b'"\\u0000"'

TOO_MANY = (
    f"has more than {MOST_CONTAINERS} arrays and objects, or more than {MOST_VALUES} values besides lists of text"
)
TOO_LONG = f"has lists with more than {MOST_STRINGS} strings"
TOO_LARGE = f"has more than {MOST_OUTLINE_BYTES} bytes besides lists of text"
MIXED = "has a list of text with arrays or objects in it"
HAS_NUL = "has the character U+0000, which cannot be stored"
# How much of the client's names a message repeats.
MAX_ECHO = 100
REPEATS = "has a name more than once in one object"
LONG_NUMBER = f"has a number of more than {MOST_DIGITS} digits"
LONG_TEXT = f"has long strings of more than {MOST_LONG_BYTES} bytes"
LONG_ESCAPES = f"has a string of more than {STEP_BYTES} bytes with escapes"


class RefusedJson(ValueError):
    """The text is not JSON, or exceeds a bound. The message continues "the body"."""


class LongText(Sequence[Any]):
    """A long list of text, as the JSON of its parts. A part is parsed when it is read.

    A list of as many strings would take twice the memory, and the garbage collector would visit each of them again and again.
    """

    __slots__ = ("_count", "_firsts", "_parsed", "_parsed_part", "_parts")

    def __init__(self) -> None:
        self._count = 0
        self._parts: list[bytes] = []
        # The place of each part's first item in the list.
        self._firsts: list[int] = []
        # The part that was read last, and its items.
        self._parsed_part = -1
        self._parsed: list[Any] = []

    def __repr__(self) -> str:
        return f"<LongText {self._count} items>"

    def __len__(self) -> int:
        return self._count

    def __eq__(self, other: object) -> bool:
        return self[:] == (other[:] if isinstance(other, LongText) else other)

    __hash__ = None  # type: ignore[assignment]

    def append_part(self, text: bytes) -> None:
        """`text`: a JSON array. Raises RefusedJson."""
        count = len(_parsed(text))
        self._parts.append(text)
        self._firsts.append(self._count)
        self._count += count

    def extend(self, other: LongText) -> None:
        for part, first in zip(other._parts, other._firsts, strict=True):
            self._parts.append(part)
            self._firsts.append(self._count + first)
        self._count += len(other)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, int):
            at = range(self._count)[index]
            return self[at : at + 1][0]
        first, end, _ = index.indices(self._count)
        elements: list[Any] = []
        while first < end:
            part = bisect_right(self._firsts, first) - 1
            if part != self._parsed_part:
                self._parsed_part, self._parsed = part, _parsed(self._parts[part])
            items = self._parsed[first - self._firsts[part] : end - self._firsts[part]]
            elements += items
            first += len(items)
        return elements


@dataclass(slots=True)
class LongList:
    """A list that a run is part of: its path, the container that holds it and its place there."""

    path: tuple[str | int, ...]
    holder: Any
    place: Any
    items: LongText

    def show(self, first: int, end: int) -> None:
        """Replace the list in the value by this slice of it."""
        self.holder[self.place] = self.items[first:end]

    def restore(self) -> None:
        self.holder[self.place] = self.items if len(self.items) > MOST_LISTED else self.items[:]


class JsonReader:
    """Reads a whole text, or, if it is None, one that is added in parts."""

    __slots__ = (
        "_at",
        "_containers",
        "_has_nul",
        "_is_whole",
        "_long_bytes",
        "_names",
        "_outline",
        "_outline_bytes",
        "_run",
        "_runs",
        "_searched",
        "_strings",
        "_text",
        "_values",
        "long_lists",
    )

    def __init__(self, text: bytes | bytearray | None = None) -> None:
        self._text = bytearray() if text is None else text
        self._is_whole = text is not None
        self._at = 0
        # Up to where the end of a long string was searched; 0 if none is being read.
        self._searched = 0
        self._outline: list[bytes | bytearray] = []
        self._outline_bytes = self._long_bytes = 0
        self._runs: list[LongText] = []
        # The run that the next strings continue.
        self._run: LongText | None = None
        self._containers = self._values = self._names = self._strings = 0
        self._has_nul = False
        # The lists with a run in them, once `value` was called.
        self.long_lists: list[LongList] = []

    def __repr__(self) -> str:
        return f"<JsonReader at {self._at} of {len(self._text)} bytes, {len(self._runs)} runs>"

    @property
    def has_long_strings(self) -> bool:
        """Whether a string outside of runs is longer than a step."""
        return self._long_bytes > 0

    def add(self, part: bytes) -> None:
        """Add what has arrived."""
        assert isinstance(self._text, bytearray)
        if self._at:
            del self._text[: self._at]
            self._searched -= min(self._at, self._searched)
            self._at = 0
        self._text += part

    def end(self) -> None:
        """Everything has arrived."""
        self._is_whole = True

    def step(self) -> bool:
        """Read on. Returns whether everything was read, or more has to arrive first. Raises RefusedJson."""
        # A string that begins within a step is looked at for as many bytes again.
        if not self._is_whole and len(self._text) - self._at < 2 * STEP_BYTES:
            return True
        end = min(self._at + STEP_BYTES, len(self._text))
        for _ in range(STEP_STRINGS):
            if self._at >= end:
                break
            if self._searched:
                if not self._read_long_string():
                    return True
            elif self._read_run(end):
                if end < len(self._text):  # the run may go on in the next step
                    break
            elif not self._read_outside(end) and not self._read_string():
                return True
        return self._at >= len(self._text)

    def value(self) -> Any:
        """The value, once everything was read. Raises RefusedJson."""
        root = [_parsed(b"".join(self._outline))]
        if self._has_nul:
            raise RefusedJson(f"{HAS_NUL}, in {_path_of_nul(root[0])[:MAX_ECHO]}")
        if self._put_runs(root) != self._names:
            raise RefusedJson(REPEATS)
        return root[0]

    def _read_run(self, end: int) -> bool:
        run = _RUN.match(self._text, self._at, end)
        if run is None:
            return False
        self._at = run.end()
        if self._run is None:
            # The mark is a string with U+0000, so no string of the client is equal to it.
            self._outline.append(b'"\\u0000%d",' % len(self._runs))
            self._run = LongText()
            self._runs.append(self._run)
        before = len(self._run)
        self._run.append_part(b"[%b]" % run[0][:-1])
        self._strings += len(self._run) - before
        if self._strings > MOST_STRINGS:
            raise RefusedJson(TOO_LONG)
        return True

    def _read_outside(self, end: int) -> bool:
        """Read up to the next string. Returns whether there is anything before it."""
        match = _OUTSIDE.match(self._text, self._at, end)
        assert match is not None
        part = match[0]
        if not part:
            return False
        self._at = match.end()
        self._run = None
        structure = part.translate(None, _NOT_STRUCTURE)
        names = structure.count(b":")
        self._names += names
        self._containers += len(structure) - names - structure.count(b",")
        self._values += len(structure)
        if self._containers > MOST_CONTAINERS or self._values > MOST_VALUES:
            raise RefusedJson(TOO_MANY)
        if _LONG_NUMBER.search(part):
            raise RefusedJson(LONG_NUMBER)
        self._add(part)
        return True

    def _read_string(self) -> bool:
        """Returns whether its end has arrived."""
        self._run = None
        match = _STRING.match(self._text, self._at, self._at + STEP_BYTES)
        if match is None:
            self._searched = self._at + 1
            return self._read_long_string()
        string = match[0]
        if _NUL_ESCAPE in string and _NUL in _parsed(string):
            self._has_nul = True
            string = _NUL_MARK
        self._at = match.end()
        self._add(string)
        return True

    def _read_long_string(self) -> bool:
        """A string that does not end within a step. It is only searched for its end, so it must not have escapes.

        Returns whether its end has arrived.
        """
        end = self._text.find(b'"', self._searched) + 1
        if self._text.find(b"\\", self._searched, end or len(self._text)) >= 0:
            raise RefusedJson(LONG_ESCAPES)
        if self._long_bytes + (end or len(self._text)) - self._at > MOST_LONG_BYTES:
            raise RefusedJson(LONG_TEXT)
        if not end and self._is_whole:
            raise RefusedJson("is not valid JSON: a string does not end")
        if not end:
            self._searched = len(self._text)
            return False
        self._searched = 0
        self._long_bytes += end - self._at
        self._outline.append(self._text[self._at : end])
        self._at = end
        return True

    def _add(self, part: bytes | bytearray) -> None:
        self._outline.append(part)
        self._outline_bytes += len(part)
        if self._outline_bytes > MOST_OUTLINE_BYTES:
            raise RefusedJson(TOO_LARGE)

    def _put_runs(self, root: list[Any]) -> int:
        """Replace the marks with their runs. Returns the number of names in all objects."""
        names = 0
        left: list[tuple[Any, tuple[str | int, ...]]] = [(root, ())]
        while left:
            holder, path = left.pop()
            names += len(holder) if isinstance(holder, dict) else 0
            for place, each in holder.items() if isinstance(holder, dict) else enumerate(holder):
                if not isinstance(each, (list, dict)):
                    continue
                below = path if holder is root else (*path, place)
                if not self._runs or not isinstance(each, list) or not any(map(_is_mark, each)):
                    left.append((each, below))
                    continue
                if any(isinstance(part, (list, dict)) for part in each):
                    raise RefusedJson(MIXED)
                self.long_lists.append(LongList(below, holder, place, self._joined(each)))
        for each in self.long_lists:
            each.restore()
        return names

    def _joined(self, parts: list[Any]) -> LongText:
        """The list with its runs."""
        items = LongText()
        for part in parts:
            if _is_mark(part):
                items.extend(self._runs[int(part[1:])])
            else:
                items.append_part(orjson.dumps([part]))
        return items


def parse_bounded(text: bytes) -> Any:
    """The value of a text that is small and has few values, parsed in one step. Raises RefusedJson."""
    if len(text) > MOST_AT_ONCE:
        raise RefusedJson(f"has more than {MOST_AT_ONCE} bytes")
    if len(text) - len(text.translate(None, b"[{,:")) > MOST_VALUES_AT_ONCE:
        raise RefusedJson(f"has more than {MOST_VALUES_AT_ONCE} values")
    return _parsed(text)


def _parsed(text: bytes | bytearray) -> Any:
    if not text:
        raise RefusedJson("is empty: send JSON")
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as exc:
        raise RefusedJson(f"is not valid JSON: {exc}") from None


def _path_of_nul(value: Any) -> str:
    """The position of the first string with U+0000."""
    left: list[tuple[Any, str]] = [(value, "")]
    for node, path in left:
        if node == _NUL:
            return path or "its text"
        if isinstance(node, dict) and _NUL in node:
            return f"a name in {path}" if path else "a name"
        if isinstance(node, (list, dict)):
            pairs = node.items() if isinstance(node, dict) else enumerate(node)
            left += [(each, f"{path}.{place}"[:MAX_ECHO] if path else str(place)) for place, each in pairs]
    raise AssertionError("there is no such string")


def _is_mark(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(_NUL)
