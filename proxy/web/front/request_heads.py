"""Request heads: a strict reader for the common case, and a memory of what it found.

The reader accepts a narrow subset of HTTP/1.1: a POST with a length, on a hot path, with one key that is known, and nothing
that changes the framing or the connection. Whatever else a head says, or however it says it, is aiohttp's to judge: None
means *hand over*, never *refuse*. What is accepted must mean the same to aiohttp; a differential fuzz test holds it to that.

A client mostly repeats its heads, so what was found is remembered by the exact bytes: from the second sighting on, so that
heads which never come again (a trace id in each) do not fill the memory, and only while the key behind it lives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from proxy.core.access import Key
from proxy.services.rpc.networks import Route
from proxy.telemetry import REQUEST_ID

MOST_REMEMBERED = 8192
# A longer head is read anew each time: so many remembered ones cannot take more than 16 MB.
LONGEST_REMEMBERED = 2048
LONGEST_LINE_REMEMBERED = 256
MAX_HOT_HEAD = 8190
MAX_HEADERS = 64

# Every byte that may stand in a head, but for the line ends.
_PLAIN = bytes(byte for byte in range(256) if byte == 9 or (byte >= 32 and byte != 127))
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_REQUEST_ID = re.compile(REQUEST_ID.encode())
_DIGITS = re.compile(rb"[0-9]{1,7}")
# What a head means that does not say.
_JSON_TYPE, _KEPT = b"application/json", b"keep-alive"
_JSON = re.compile(rb"application/json(?:[ \t]*;[ \t]*charset=(?:utf-8|UTF-8))?", re.IGNORECASE)

# What a header means here. PASS: nothing. LEAVE: not for us. ONCE: aiohttp refuses it twice.
PASS, LEAVE, LENGTH, KEY, BEARER, HOST, TYPE, CACHE, ID, CONNECTION, ONCE = range(11)
_KINDS = {
    b"content-length": LENGTH,
    b"x-api-key": KEY,
    b"authorization": BEARER,
    b"host": HOST,
    b"content-type": TYPE,
    b"cache-control": CACHE,
    b"x-request-id": ID,
    b"connection": CONNECTION,
    b"user-agent": ONCE,
    **dict.fromkeys(
        (
            b"transfer-encoding", b"expect", b"upgrade", b"content-encoding", b"proxy-connection", b"te", b"trailer",
            b"http2-settings", b"keep-alive", b"etag", b"server", b"content-location", b"content-range",
            b"max-forwards", b"sec-websocket-key1",
        ),
        LEAVE,
    ),
}  # fmt: skip


class RequestHead:
    """What a head decides: whose request it is, where it goes, and how many bytes of body follow."""

    __slots__ = ("fresh", "key", "length", "policies", "request_id", "route", "size", "total")

    def __init__(self, size: int, length: int, key: Key, route: Route, *, fresh: bool, request_id: bytes) -> None:
        self.size = size
        self.length = length
        self.total = size + length
        self.key = key
        self.route = route
        self.fresh = fresh
        self.request_id = request_id
        # The methods that may take the short way under this key; a key that changes is another key, and so is its head.
        self.policies = {} if fresh else route.short_policies(key)

    def __repr__(self) -> str:
        return f"<RequestHead {self.route.network.id} {self.length} bytes, {self.key!r}>"


class HeadTemplate:
    """Heads that differ in one value which decides nothing, such as a trace id: what stands around it, and what they mean.

    A client with such a header never repeats a head. To compare two parts and look at a value takes 1 µs instead of 7.
    """

    __slots__ = ("after", "after_at", "before", "before_at", "head")

    def __init__(self, before: bytes, after: bytes, head: RequestHead) -> None:
        self.before = before
        self.before_at = len(before)
        self.after = after
        self.after_at = head.size - len(after)
        self.head = head

    def __repr__(self) -> str:
        return f"<HeadTemplate {self.head!r}>"

    def fits(self, data: bytes) -> bool:
        """Whether a message begins with such a head whose key lives. Only plain bytes are in the value: no line ends there."""
        return (
            self.head.key.alive
            and data.startswith(self.before)
            and data.startswith(self.after, self.after_at)
            and not data[self.before_at : self.after_at].translate(None, _PLAIN)
        )


class RequestHeadReader:
    def __init__(
        self, routes: Mapping[str, Route], find: Callable[[str], Key | None], *, max_head: int, max_body: int
    ) -> None:
        """`routes` by path; `find` looks a key up by its text."""
        self._lines = {f"POST {path} HTTP/1.1".encode("ascii"): route for path, route in routes.items()}
        self._find = find
        self._max_head = min(max_head, MAX_HOT_HEAD)
        self._max_body = max_body
        self._known: dict[bytes, RequestHead] = {}
        # Hashes: two heads that share one are only remembered a sighting too early.
        self._seen_once: set[int] = set()
        # Header names as they were sent, in whatever case, and what they mean.
        self._names: dict[bytes, int] = {}
        # Lines that decide and what they mean; and what the deciding lines of a head of one size were found to mean.
        self._line_kinds: dict[bytes, int] = {}
        self._skeletons: dict[tuple[object, ...], RequestHead] = {}

    def __repr__(self) -> str:
        return f"<RequestHeadReader {len(self._known)} remembered>"

    def read(self, raw: bytes) -> RequestHead | None:
        """The head's meaning, or None: hand the connection over."""
        head = self._known.get(raw)
        if head is not None:
            if head.key.alive:
                return head
            del self._known[raw]
        head = self._parse(raw)
        if head is not None:
            self._remember(raw, head)
        return head

    def shape(self, one: bytes, other: bytes, head: RequestHead) -> HeadTemplate | None:
        """What two heads of the same meaning have in common, if they differ in one value only; `head` is the other's."""
        if len(one) != len(other):
            return None
        lines, others = one.split(b"\r\n"), other.split(b"\r\n")
        apart = [place for place, line in enumerate(others) if line not in lines]
        if len(lines) != len(others) or len(apart) != 1 or self._kind_of(others[apart[0]]) != PASS:
            return None
        place = apart[0]
        name = others[place].partition(b":")[0]
        before = b"\r\n".join((*others[:place], name + b":"))
        after = b"\r\n".join((b"", *others[place + 1 :]))
        return HeadTemplate(before, after, head)

    def _remember(self, raw: bytes, head: RequestHead) -> None:
        if len(raw) > LONGEST_REMEMBERED:
            return
        sighting = hash(raw)
        if sighting in self._seen_once:
            if len(self._known) >= MOST_REMEMBERED:
                self._known.clear()
            self._known[raw] = head
            return
        if len(self._seen_once) >= MOST_REMEMBERED:
            self._seen_once.clear()
        self._seen_once.add(sighting)

    def _parse(self, raw: bytes) -> RequestHead | None:
        if len(raw) > self._max_head:
            return None
        lines = raw[:-4].split(b"\r\n")
        count = len(lines)
        # Without every permitted byte only the line ends may be left: no control bytes, no bare CR or LF.
        if count > MAX_HEADERS or len(raw.translate(None, _PLAIN)) != 2 * count + 2:
            return None
        route = self._lines.get(lines.pop(0))
        if route is None:
            return None
        # Only some lines decide. Whatever else stands in a head, the same ones of them mean the same.
        kinds = self._line_kinds
        deciding = [line for line in lines if (kinds.get(line) or self._kind_of(line))]
        skeleton = (route, len(raw), *deciding)
        head = self._skeletons.get(skeleton)
        if head is None or not head.key.alive:
            head = self._decide_by(raw, route, deciding)
            if head is not None and len(raw) <= LONGEST_REMEMBERED:
                _bounded(self._skeletons)[skeleton] = head
        return head

    def _kind_of(self, line: bytes) -> int:
        """What a line means; remembered for those that decide. PASS is 0."""
        name, colon, _ = line.partition(b":")
        kind = self._names.get(name)
        if kind is None:
            kind = _KINDS.get(name.lower(), PASS) if _NAME.fullmatch(name) else LEAVE
            if len(name) <= LONGEST_LINE_REMEMBERED:
                _bounded(self._names)[name] = kind
        if not colon:
            return LEAVE
        if kind not in (PASS, ID) and len(line) <= LONGEST_LINE_REMEMBERED:
            _bounded(self._line_kinds)[line] = kind
        return kind

    def _decide_by(self, raw: bytes, route: Route, lines: list[bytes]) -> RequestHead | None:
        found: dict[int, bytes] = {}
        for line in lines:
            kind = self._kind_of(line)
            if kind == LEAVE or kind in found:
                return None
            found[kind] = line.partition(b":")[2].strip(b" \t")
        return self._decide(raw, route, found)

    def _decide(self, raw: bytes, route: Route, found: dict[int, bytes]) -> RequestHead | None:
        length = found.get(LENGTH, b"")
        if HOST not in found or not _DIGITS.fullmatch(length):
            return None
        if not 0 < int(length) <= min(self._max_body, route.max_body):
            return None
        if not _JSON.fullmatch(found.get(TYPE, _JSON_TYPE)) or found.get(CONNECTION, _KEPT).lower() != _KEPT:
            return None
        key = self._key(found)
        if key is None:
            return None
        given = found.get(ID, b"")
        return RequestHead(
            len(raw),
            int(length),
            key,
            route,
            fresh=b"no-cache" in found.get(CACHE, b"").lower(),
            request_id=given if _REQUEST_ID.fullmatch(given) else b"",
        )

    def _key(self, found: dict[int, bytes]) -> Key | None:
        text = found.get(KEY, b"")
        if not text:
            scheme, _, text = found.get(BEARER, b"").partition(b" ")
            if scheme.lower() != b"bearer":
                return None
        if not text.isascii():
            return None
        key = self._find(text.strip().decode("ascii"))
        # From where such a key is used the gate looks at: who stands before us, and what they say of it.
        return None if key is None or key.fence is not None else key


def _bounded(memory: dict[Any, Any]) -> dict[Any, Any]:
    """A memory that is about to get one more: it begins anew when it is full."""
    if len(memory) >= MOST_REMEMBERED:
        memory.clear()
    return memory
