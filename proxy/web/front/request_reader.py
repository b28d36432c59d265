"""Splits the bytes of a client connection on the hot path into requests.

A request is served once it is complete, one at a time. Its head is recognised by its exact bytes or parsed by the strict
reader of `request_heads.py`; its body is collected and not looked at before it is whole. Bytes behind a request that is
still being served wait in `ahead`, where a cursor moves over them: serving one of many requests copies that request only.
"""

from __future__ import annotations

from io import BytesIO
from typing import Final, final

from proxy.web.front.request_heads import HeadTemplate, RequestHead, RequestHeadReader
from proxy.wire.http_connection import NEVER

# Copying a body from this size on takes longer than the short path saves.
LARGE_BODY: Final = 16_384
# How often a connection's heads are compared to find a template: some clients' heads have none, so the search is given up.
TEMPLATE_ATTEMPTS: Final = 4
_END: Final = b"\r\n\r\n"


class RequestMessage:
    """A complete request: its head, and its body from `start` on. Without a head, `data` is for aiohttp to parse."""

    __slots__ = ("data", "head", "start")

    def __init__(self, head: RequestHead | None, data: bytes, start: int) -> None:
        self.head = head
        self.data = data
        self.start = start

    def __repr__(self) -> str:
        return f"<RequestMessage {self.head!r}, {len(self.data)} bytes>"


@final
class RequestReader:
    """The unserved bytes of one connection."""

    __slots__ = (
        "_at",
        "_body",
        "_heads",
        "_max_head",
        "_raw",
        "_template",
        "_templates_left",
        "ahead",
        "known",
        "known_bytes",
    )

    def __init__(self, heads: RequestHeadReader, max_head: int) -> None:
        self._heads = heads
        self._max_head = max_head
        # Bytes of an incomplete head, or of requests that wait for the current one, from `_at` on.
        self.ahead = b""
        self._at = 0
        # The last head and its bytes; NEVER while a message must not be recognised by them.
        self.known_bytes = NEVER
        self.known: RequestHead | None = None
        # A body that is still arriving; `known` is its head and `_raw` that head's bytes.
        self._body: BytesIO | None = None
        self._raw = b""
        # Set for clients whose heads differ in one header that does not matter here.
        self._template: HeadTemplate | None = None
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
        """Parse the next head, even if it repeats the last one."""
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
            head = template.head
            if len(data) == head.total and template.fits(data):
                return RequestMessage(head, data, head.size)
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
            if len(data) - at > self._max_head or data.count(b"\n", at) != data.count(b"\r\n", at):
                self.drop_ahead()
                return RequestMessage(None, data[at:], 0)
            self.ahead, self._at = data, at
            return None
        raw = data[at:body_at]
        head = self._heads.read(raw)
        if head is None:
            self.drop_ahead()
            return RequestMessage(None, data[at:], 0)
        end = at + head.total
        if len(data) < end:
            self.drop_ahead()
            self._start_body(head, raw, memoryview(data)[body_at:])
            return None
        self._remember(head, raw)
        if len(data) > end:
            self.ahead, self._at = data, end
            return RequestMessage(head, data[body_at:end], 0)
        self.drop_ahead()
        return RequestMessage(head, data, body_at)

    def _remember(self, head: RequestHead, raw: bytes) -> None:
        if head is self.known and self._templates_left:
            self._templates_left -= 1
            self._template = self._heads.template(self.known_bytes, raw, head)
        # A large message must not be recognised by its bytes: that path copies the body.
        self.known_bytes, self.known = raw if head.length < LARGE_BODY else NEVER, head

    def _start_body(self, head: RequestHead, raw: bytes, beginning: memoryview) -> None:
        self._body = BytesIO()
        self._body.write(beginning)
        self._raw = raw
        self.known_bytes, self.known = NEVER, head

    def _continue_body(self, body: BytesIO, data: bytes, *, is_free: bool) -> RequestMessage | None:
        head = self.known
        assert head is not None
        body.write(data)
        size = body.tell()
        if size < head.length:
            return None
        self._body = None
        whole = body.getvalue()
        if not is_free:
            self.ahead = self._raw + whole
            return None
        if not head.key.alive:
            return RequestMessage(None, self._raw + whole, 0)
        if size == head.length:
            return RequestMessage(head, whole, 0)
        self.ahead = whole[head.length :]
        return RequestMessage(head, whole[: head.length], 0)
