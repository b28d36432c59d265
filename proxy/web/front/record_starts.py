"""The beginnings of replies to requests for REST routes: status and headers from the record of a reply (`core/rest_routes.py`).

A record begins with its status and headers, and ends with its body. Upstreams repeat their headers, so beginnings are kept
in the form in which clients get them, by their bytes. The body is cut out of the record without being read.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final, final

from proxy.core.bounded import make_room
from proxy.core.rest_routes import RECORD_BODY, RestRecord, read_beginning, read_record
from proxy.web.rest_replies import body_of

MOST_KNOWN: Final = 1024
# Longer beginnings are parsed each time.
LONGEST_KNOWN: Final = 512
# A larger body is not copied out of its record.
COPIED_BELOW: Final = 8192
_NO_CONTENT: Final = 204
_BODY: Final = RECORD_BODY
_BODY_SIZE: Final = len(RECORD_BODY)


@final
class RecordStart:
    """The status, and the lines of a reply that come first, without the end of the last one."""

    __slots__ = ("lines", "lines_of_any", "status")

    def __init__(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        # RFC 9110, 5.5: no line ends in values.
        good = {name: value for name, value in headers.items() if not {"\r", "\n", "\0"} & {*value}}
        lines = [f"HTTP/1.1 {status} {_phrase(status)}", *(f"{name}: {value}" for name, value in good.items())]
        self.lines = "\r\n".join(lines).encode()
        # RFC 9110, 8.3: those of a body whose type is not known.
        is_typed = any(name.lower() == "content-type" for name in good)
        self.lines_of_any = self.lines if is_typed else self.lines + b"\r\nContent-Type: application/octet-stream"

    def __repr__(self) -> str:
        return f"<RecordStart {self.status}>"

    @property
    def has_no_content(self) -> bool:
        """RFC 9110, 8.6: such a reply has no length either."""
        return self.status == _NO_CONTENT


@final
class RecordSplitter:
    """Splits records into their beginning and their body."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[bytes, RecordStart] = {}

    def __repr__(self) -> str:
        return f"<RecordSplitter {len(self._known)} remembered>"

    def split(self, record: bytes) -> tuple[RecordStart, bytes | memoryview]:
        at = record.find(_BODY)
        start = None if at < 0 else self.start(record[:at])
        if start is None:
            return _read_whole(record)
        at += _BODY_SIZE
        if len(record) - at > COPIED_BELOW:
            return start, memoryview(record)[at:-1]
        body = record[at:-1]
        return start, b"" if body == b"null" else body

    def start(self, beginning: bytes) -> RecordStart | None:
        """`beginning`: the bytes of a record before its body. None if it is not as our upstreams write it."""
        start = self._known.get(beginning)
        if start is None:
            start = _read(beginning)
            if start is not None and len(beginning) <= LONGEST_KNOWN:
                make_room(self._known, MOST_KNOWN)
                self._known[beginning] = start
        return start


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


def _read(beginning: bytes) -> RecordStart | None:
    record = read_beginning(beginning)
    return None if record is None else RecordStart(record.status, record.headers)


def _read_whole(record: bytes) -> tuple[RecordStart, bytes | memoryview]:
    decoded: RestRecord = read_record(record)
    return RecordStart(decoded.status, decoded.headers), body_of(decoded)
