"""Splits the bytes of a client connection on the hot path into requests.

A request is served once it is complete, one at a time. Its headers are recognised by their exact bytes or parsed by the strict
reader of `request_headers.py`; its body is collected and not looked at before it is whole. Bytes behind a request that is
still being served wait in `ahead`, where a cursor moves over them: serving one of many requests copies that request only.
"""

from __future__ import annotations

from io import BytesIO
from typing import Final, final

from proxy.web.front.request_headers import HeaderTemplate, RequestHeaderReader, RequestHeaders
from proxy.wire.http_connection import NEVER

# Copying a body from this size on takes longer than the short path saves.
LARGE_BODY: Final = 16_384
# How often a connection's header blocks are compared to find a template: some clients' have none, so the search is given up.
TEMPLATE_ATTEMPTS: Final = 4
_END: Final = b"\r\n\r\n"


class RequestMessage:
    """A complete request: its headers, and its body from `start` on. Without headers, `data` is for aiohttp to parse."""

    __slots__ = ("data", "headers", "start")

    def __init__(self, headers: RequestHeaders | None, data: bytes, start: int) -> None:
        self.headers = headers
        self.data = data
        self.start = start

    def __repr__(self) -> str:
        return f"<RequestMessage {self.headers!r}, {len(self.data)} bytes>"


@final
class RequestReader:
    """The unserved bytes of one connection."""

    __slots__ = (
        "_at",
        "_body",
        "_header_reader",
        "_max_header_bytes",
        "_raw",
        "_template",
        "_templates_left",
        "ahead",
        "known",
        "known_bytes",
    )

    def __init__(self, header_reader: RequestHeaderReader, max_header_bytes: int) -> None:
        self._header_reader = header_reader
        self._max_header_bytes = max_header_bytes
        # Bytes of incomplete headers, or of requests that wait for the current one, from `_at` on.
        self.ahead = b""
        self._at = 0
        # The last headers and their bytes; NEVER while a message must not be recognised by them.
        self.known_bytes = NEVER
        self.known: RequestHeaders | None = None
        # A body that is still arriving; `known` are its headers and `_raw` their bytes.
        self._body: BytesIO | None = None
        self._raw = b""
        # Set for clients whose requests differ in one header that does not matter here.
        self._template: HeaderTemplate | None = None
        self._templates_left = TEMPLATE_ATTEMPTS

    def __repr__(self) -> str:
        return f"<RequestReader {self.bytes_ahead} bytes ahead{', in a body' if self._body is not None else ''}>"

    @property
    def bytes_ahead(self) -> int:
        return len(self.ahead) - self._at

    @property
    def is_in_body(self) -> bool:
        return self._body is not None

    @property
    def is_empty(self) -> bool:
        return not self.ahead and self._body is None

    def forget_known(self) -> None:
        """Parse the next headers, even if they repeat the last ones."""
        self.known_bytes = NEVER

    def drop_ahead(self) -> None:
        """Serve nothing more."""
        self.ahead = b""
        self._at = 0

    def take_rest(self) -> bytes:
        """All bytes that wait."""
        rest = self.ahead[self._at :]
        self.drop_ahead()
        return rest

    def take_ahead(self) -> RequestMessage | None:
        """The next complete request among the bytes that wait."""
        return self._take_first(self.ahead, self._at)

    def take(self, data: bytes, *, is_free: bool) -> RequestMessage | None:
        """The next complete request, if there is one and the connection is free to serve it."""
        if self._body is not None:
            return self._continue_body(self._body, data, is_free=is_free)
        template = self._template
        if is_free and template is not None and not self.ahead:
            headers = template.headers
            if len(data) == headers.total and template.fits(data):
                return RequestMessage(headers, data, headers.size)
        if self.ahead:
            data = self.ahead[self._at :] + data
        if not is_free:
            self.ahead, self._at = data, 0
            return None
        return self._take_first(data, 0)

    def _take_first(self, data: bytes, at: int) -> RequestMessage | None:
        """The request that begins at `at`. Later bytes stay in `ahead`, and the cursor moves to the end of the request."""
        body_at = data.find(_END, at) + 4
        if body_at == 3:
            # RFC 9112, 2.2: a line ends in CRLF. A client that sends LF alone would wait for its reply forever.
            if len(data) - at > self._max_header_bytes or data.count(b"\n", at) != data.count(b"\r\n", at):
                self.drop_ahead()
                return RequestMessage(None, data[at:], 0)
            self.ahead, self._at = data, at
            return None
        raw = data[at:body_at]
        headers = self._header_reader.read(raw)
        if headers is None:
            self.drop_ahead()
            return RequestMessage(None, data[at:], 0)
        end = at + headers.total
        if len(data) < end:
            self.drop_ahead()
            self._start_body(headers, raw, memoryview(data)[body_at:])
            return None
        self._remember(headers, raw)
        if len(data) > end:
            self.ahead, self._at = data, end
            return RequestMessage(headers, data[body_at:end], 0)
        self.drop_ahead()
        return RequestMessage(headers, data, body_at)

    def _remember(self, headers: RequestHeaders, raw: bytes) -> None:
        if headers is self.known and self._templates_left:
            self._templates_left -= 1
            self._template = self._header_reader.template(self.known_bytes, raw, headers)
        # A large message must not be recognised by its bytes: that path copies the body.
        self.known_bytes, self.known = raw if headers.length < LARGE_BODY else NEVER, headers

    def _start_body(self, headers: RequestHeaders, raw: bytes, beginning: memoryview) -> None:
        self._body = BytesIO()
        self._body.write(beginning)
        self._raw = raw
        self.known_bytes, self.known = NEVER, headers

    def _continue_body(self, body: BytesIO, data: bytes, *, is_free: bool) -> RequestMessage | None:
        headers = self.known
        assert headers is not None
        body.write(data)
        size = body.tell()
        if size < headers.length:
            return None
        self._body = None
        whole = body.getvalue()
        if not is_free:
            self.ahead = self._raw + whole
            return None
        if not headers.key.alive:
            return RequestMessage(None, self._raw + whole, 0)
        if size == headers.length:
            return RequestMessage(headers, whole, 0)
        self.ahead = whole[headers.length :]
        return RequestMessage(headers, whole[: headers.length], 0)
