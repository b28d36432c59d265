"""Request headers: a strict parser for the common case, and a cache of its results.

The parser accepts a narrow subset of HTTP/1.1: a POST with a length on a JSON-RPC route, or a GET of a route of a REST chain
(`rest_requests.py`), with one known key, and nothing that changes the framing or the connection. Every other request is left to
aiohttp: None means *hand over*, never *refuse*. aiohttp must understand accepted headers in the same way, which a differential
fuzz test checks.

Clients mostly repeat their header blocks, so results are cached by the exact bytes. A block is cached the second time it is
seen, so that blocks which never repeat (each with its own trace id) do not fill the cache. A result is used only while its key
is alive.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from proxy.core import directives, encodings
from proxy.core.access import Key
from proxy.core.bounded import make_room
from proxy.core.directives import DIRECTIVES, Directives
from proxy.core.jsonrpc import envelope_reader
from proxy.core.presented_key import presented_key
from proxy.errors import InvalidRequest
from proxy.services.rpc.networks import Route
from proxy.telemetry import REQUEST_ID
from proxy.web.front.rest_requests import RestLocation, RouteRequest, RouteRequestReader
from proxy.web.request_targets import TargetReader

MOST_REMEMBERED = 8192
# Longer header blocks are parsed each time. With MOST_REMEMBERED this limits the cache to 16 MB.
LONGEST_REMEMBERED = 2048
LONGEST_LINE_REMEMBERED = 256
MAX_HOT_HEADER_BYTES = 8190
MAX_HEADERS = 64

# Every byte that is allowed in a header block, except for the line ends.
_PLAIN = bytes(byte for byte in range(256) if byte == 9 or (byte >= 32 and byte != 127))
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_REQUEST_ID = re.compile(REQUEST_ID.encode())
# A subset of the hosts that web/strict_http.py accepts.
_HOST = re.compile(rb"[A-Za-z0-9\-._]*(?::[0-9]*)?")
_DIGITS = re.compile(rb"[0-9]{1,7}")
# Defaults for requests without these headers.
_JSON_TYPE, _KEPT = b"application/json", b"keep-alive"
_CLOSED = b"close"
_POST, _VERSION = b"POST ", b" HTTP/1.1"
_GET = b"GET "
_NO_BODY = b"0"
# Targets with keys have no other bytes than these.
_TARGET = re.compile(rb"[A-Za-z0-9/_?=&%.~-]+")
_NO_KEYS: tuple[str, ...] = ()
_JSON = re.compile(rb"application/json(?:[ \t]*;[ \t]*charset=(?:utf-8|UTF-8))?", re.IGNORECASE)

# The roles of headers. PASS: ignored. LEAVE: hand over to aiohttp. ONCE: ignored, but aiohttp refuses duplicates. Directives
# have the roles from FIRST_DIRECTIVE on, in the order of their table.
PASS, LEAVE, LENGTH, KEY, AUTHORIZATION, HOST, TYPE, CACHE, ID, CONNECTION, ONCE, ENCODINGS, FIRST_DIRECTIVE = range(13)
# The header of traces. The lowest bit of its last digit means "sampled" (W3C Trace Context, 3.2.2.5).
_TRACEPARENT, _SAMPLED = b"traceparent", b"13579bdf"
_ROLES = {
    b"content-length": LENGTH,
    b"x-api-key": KEY,
    b"authorization": AUTHORIZATION,
    b"host": HOST,
    b"content-type": TYPE,
    b"cache-control": CACHE,
    b"x-request-id": ID,
    b"connection": CONNECTION,
    b"accept-encoding": ENCODINGS,
    b"user-agent": ONCE,
    **{each.header.lower().encode(): FIRST_DIRECTIVE + index for index, each in enumerate(DIRECTIVES)},
    **dict.fromkeys(
        (
            b"transfer-encoding", b"expect", b"upgrade", b"content-encoding", b"proxy-connection", b"te", b"trailer",
            b"http2-settings", b"keep-alive", b"etag", b"server", b"content-location", b"content-range",
            b"max-forwards", b"sec-websocket-key1", b"origin",
        ),
        LEAVE,
    ),
}  # fmt: skip


class RequestHeaders:
    """Parsed headers: the key, the route, and the length of the body. `rest`: the request of a GET, which has no body."""

    __slots__ = (
        "closes",
        "directives",
        "encoding",
        "key",
        "length",
        "policies",
        "read_envelope",
        "request_id",
        "rest",
        "route",
        "size",
        "total",
    )

    def __init__(
        self,
        size: int,
        length: int,
        key: Key,
        route: Route,
        *,
        directives: Directives | None,
        request_id: bytes,
        encoding: int = encodings.IDENTITY,
        closes: bool = False,
        rest: RouteRequest | None = None,
    ) -> None:
        self.size = size
        self.rest = rest
        # Whether the client wants the connection to be closed after the reply.
        self.closes = closes
        # How large replies are compressed.
        self.encoding = encoding
        self.length = length
        self.total = size + length
        self.key = key
        self.route = route
        self.directives = directives
        self.request_id = request_id
        self.read_envelope = envelope_reader(route.dialect)
        # The methods that may take the short path with this key. A changed key is a new object and gets new headers.
        self.policies = {} if directives is not None else route.short_policies(key)

    def __repr__(self) -> str:
        return f"<RequestHeaders {self.route.network.id} {self.length} bytes, {self.key!r}>"


class HeaderTemplate:
    """Header blocks that differ in one ignored value, such as a trace id: the bytes around it, and the parsed headers.

    A client with such a header never repeats its block. Comparing the bytes around it takes 1 µs instead of 7 to parse.
    """

    __slots__ = ("after", "after_at", "before", "before_at", "headers")

    def __init__(self, before: bytes, after: bytes, headers: RequestHeaders) -> None:
        self.before = before
        self.before_at = len(before)
        self.after = after
        self.after_at = headers.size - len(after)
        self.headers = headers

    def __repr__(self) -> str:
        return f"<HeadTemplate {self.headers!r}>"

    def fits(self, data: bytes) -> bool:
        """Whether a message starts with such a block and its key is alive. The value must not contain a line end."""
        return (
            self.headers.key.alive
            and data.startswith(self.before)
            and data.startswith(self.after, self.after_at)
            and not data[self.before_at : self.after_at].translate(None, _PLAIN)
        )


class RequestHeaderReader:
    def __init__(
        self,
        routes: Mapping[str, Route],
        find: Callable[[str], Key | None],
        targets: TargetReader,
        *,
        max_header_bytes: int,
        max_body: int,
        is_tracing: bool = False,
        rest: RouteRequestReader | None = None,
    ) -> None:
        """`routes` are keyed by path; `find` looks up a key by its text; `targets` reads targets that are not the path of a
        route. `is_tracing`: sampled requests are handed over. `rest` reads GET requests."""
        self._rest = rest
        self._lines = {_POST + path.encode("ascii") + _VERSION: route for path, route in routes.items()}
        self._find = find
        self._targets = targets
        self._max_header_bytes = min(max_header_bytes, MAX_HOT_HEADER_BYTES)
        self._max_body = max_body
        self._is_tracing = is_tracing
        self._known: dict[bytes, RequestHeaders] = {}
        # Hashes of blocks seen once. On a collision a block is cached one sighting too early.
        self._seen_once: dict[int, None] = {}
        # The role of each header name, in any case it was sent in.
        self._names: dict[bytes, int] = {}
        # The roles of significant lines; and parsed headers by their route, size and significant lines.
        self._line_roles: dict[bytes, int] = {}
        self._skeletons: dict[tuple[object, ...], RequestHeaders] = {}

    def __repr__(self) -> str:
        return f"<RequestHeadReader {len(self._known)} remembered>"

    def read(self, raw: bytes) -> RequestHeaders | None:
        """The parsed headers, or None if the connection must be handed over."""
        headers = self._known.get(raw)
        if headers is not None:
            if headers.key.alive:
                return headers
            del self._known[raw]
        headers = self._parse(raw)
        if headers is not None:
            self._remember(raw, headers)
        return headers

    def template(self, one: bytes, other: bytes, headers: RequestHeaders) -> HeaderTemplate | None:
        """The template of two blocks that parse to the same `headers`, if they differ in the value of one ignored header."""
        if len(one) != len(other):
            return None
        lines, others = one.split(b"\r\n"), other.split(b"\r\n")
        different = [place for place, line in enumerate(others) if line not in lines]
        if len(lines) != len(others) or len(different) != 1 or self._role_of(others[different[0]]) != PASS:
            return None
        place = different[0]
        name = others[place].partition(b":")[0]
        if self._is_tracing and name.lower() == _TRACEPARENT:
            return None
        before = b"\r\n".join((*others[:place], name + b":"))
        after = b"\r\n".join((b"", *others[place + 1 :]))
        return HeaderTemplate(before, after, headers)

    def _remember(self, raw: bytes, headers: RequestHeaders) -> None:
        if len(raw) > LONGEST_REMEMBERED:
            return
        sighting = hash(raw)
        if sighting in self._seen_once:
            make_room(self._known, MOST_REMEMBERED)
            self._known[raw] = headers
            return
        make_room(self._seen_once, MOST_REMEMBERED)
        self._seen_once[sighting] = None

    def _parse(self, raw: bytes) -> RequestHeaders | None:
        if len(raw) > self._max_header_bytes:
            return None
        lines = raw[:-4].split(b"\r\n")
        count = len(lines)
        # With all allowed bytes removed only the line ends may remain: no control bytes, no bare CR or LF.
        if count > MAX_HEADERS or len(raw.translate(None, _PLAIN)) != 2 * count + 2:
            return None
        line = lines.pop(0)
        route, keys = self._lines.get(line), _NO_KEYS
        if route is None:
            if line.startswith(_GET):
                return None if self._rest is None else self._parse_get(self._rest, raw, line, lines)
            route, keys = self._locate(line, lines)
        if route is None:
            return None
        # Blocks with equal significant lines parse to the same result, whatever their other lines are.
        roles = self._line_roles
        significant = [line for line in lines if (roles.get(line) or self._role_of(line))]
        skeleton = (route, keys, len(raw), *significant)
        headers = self._skeletons.get(skeleton)
        if headers is None or not headers.key.alive:
            headers = self._parse_lines(raw, route, keys, significant)
            # Directives may have another value in each request.
            if headers is not None and headers.directives is None and len(raw) <= LONGEST_REMEMBERED:
                make_room(self._skeletons, MOST_REMEMBERED)
                self._skeletons[skeleton] = headers
        return headers

    def _parse_get(
        self, reader: RouteRequestReader, raw: bytes, line: bytes, lines: list[bytes]
    ) -> RequestHeaders | None:
        significant = [each for each in lines if self._role_of(each) or reader.is_significant(each)]
        skeleton = (line, len(raw), *significant)
        headers = self._skeletons.get(skeleton)
        if headers is None or not headers.key.alive:
            location = reader.locate(line)
            headers = None if location is None else self._build_get(reader, raw, location, significant)
            if headers is not None and headers.directives is None and len(raw) <= LONGEST_REMEMBERED:
                make_room(self._skeletons, MOST_REMEMBERED)
                self._skeletons[skeleton] = headers
        return headers

    def _build_get(
        self, reader: RouteRequestReader, raw: bytes, location: RestLocation, lines: list[bytes]
    ) -> RequestHeaders | None:
        by_role = self._by_role(lines)
        if by_role is None or by_role.get(LENGTH, _NO_BODY) != _NO_BODY:
            return None
        key = self._key(location.keys, by_role)
        rest = None if key is None else reader.read(location, lines)
        return None if key is None or rest is None else self._finished(raw, 0, location.route, key, by_role, rest)

    def _locate(self, line: bytes, lines: list[bytes]) -> tuple[Route | None, tuple[str, ...]]:
        """The route of a request line with keys in its target, or an alias, and the keys. Several hosts are refused later."""
        # A shorter line could not be sliced: compiled code refuses a slice that ends before it starts.
        if len(line) <= len(_POST) + len(_VERSION) or not (line.startswith(_POST) and line.endswith(_VERSION)):
            return None, _NO_KEYS
        text = line[len(_POST) : -len(_VERSION)]
        if not _TARGET.fullmatch(text):
            return None, _NO_KEYS
        hosts = [each[5:].strip(b" \t") for each in lines if each[:5].lower() == b"host:"]
        target = self._targets.read(text.decode("ascii"), b"".join(hosts[:1]).decode("latin-1"), "call")
        return self._lines.get(_POST + target.text.encode("ascii") + _VERSION), target.keys

    def _role_of(self, line: bytes) -> int:
        """The role of a line, cached for significant ones. PASS is 0."""
        name, colon, _ = line.partition(b":")
        role = self._names.get(name)
        if role is None:
            role = _ROLES.get(name.lower(), PASS) if _NAME.fullmatch(name) else LEAVE
            if len(name) <= LONGEST_LINE_REMEMBERED:
                make_room(self._names, MOST_REMEMBERED)
                self._names[name] = role
        if not colon or (self._is_tracing and _is_sampled(name, line)):
            return LEAVE
        if role not in (PASS, ID) and role < FIRST_DIRECTIVE and len(line) <= LONGEST_LINE_REMEMBERED:
            make_room(self._line_roles, MOST_REMEMBERED)
            self._line_roles[line] = role
        return role

    def _parse_lines(
        self, raw: bytes, route: Route, keys: tuple[str, ...], lines: list[bytes]
    ) -> RequestHeaders | None:
        by_role = self._by_role(lines)
        return None if by_role is None else self._build(raw, route, keys, by_role)

    def _by_role(self, lines: list[bytes]) -> dict[int, bytes] | None:
        """The values of lines by their role; None if one of them is left to aiohttp, or is there twice."""
        by_role: dict[int, bytes] = {}
        for line in lines:
            role = self._role_of(line)
            if role == LEAVE or role in by_role:
                return None
            if role != PASS:
                by_role[role] = line.partition(b":")[2].strip(b" \t")
        return by_role

    def _build(
        self, raw: bytes, route: Route, keys: tuple[str, ...], by_role: dict[int, bytes]
    ) -> RequestHeaders | None:
        length = by_role.get(LENGTH, b"")
        if not _DIGITS.fullmatch(length) or not 0 < int(length) <= min(self._max_body, route.max_body):
            return None
        if not _JSON.fullmatch(by_role.get(TYPE, _JSON_TYPE)):
            return None
        key = self._key(keys, by_role)
        return None if key is None else self._finished(raw, int(length), route, key, by_role, None)

    def _finished(
        self,
        raw: bytes,
        length: int,
        route: Route,
        key: Key,
        by_role: dict[int, bytes],
        rest: RouteRequest | None,
    ) -> RequestHeaders | None:
        connection = by_role.get(CONNECTION, _KEPT).lower()
        if not _HOST.fullmatch(by_role.get(HOST, b"/")) or connection not in (_KEPT, _CLOSED):
            return None
        try:
            directives = self._directives(by_role, key, route)
        except InvalidRequest:
            return None
        given = by_role.get(ID, b"")
        return RequestHeaders(
            len(raw),
            length,
            key,
            route,
            directives=directives,
            request_id=given if _REQUEST_ID.fullmatch(given) else b"",
            encoding=encodings.accepted(by_role.get(ENCODINGS, b"").decode("latin-1")),
            closes=connection == _CLOSED,
            rest=rest,
        )

    def _directives(self, by_role: dict[int, bytes], key: Key, route: Route) -> Directives | None:
        """The directives of a request. Raises InvalidRequest for those that aiohttp's handler refuses, whatever the reason."""
        given = [
            (directive, by_role[FIRST_DIRECTIVE + index].decode("latin-1"))
            for index, directive in enumerate(DIRECTIVES)
            if FIRST_DIRECTIVE + index in by_role
        ]
        read = directives.read(given, fresh=b"no-cache" in by_role.get(CACHE, b"").lower())
        if directives.refusal(given, key.directives) or directives.unknown_upstream(read, route.labels):
            raise InvalidRequest("refused")
        if read is not None and read.fault is not None:
            raise InvalidRequest("faults are made by aiohttp's handlers")
        return read

    def _key(self, in_url: tuple[str, ...], by_role: dict[int, bytes]) -> Key | None:
        named, authorization = by_role.get(KEY, b""), by_role.get(AUTHORIZATION, b"")
        if not (named.isascii() and authorization.isascii()):
            return None
        presented = presented_key((named.decode("ascii"),), (authorization.decode("ascii"),), in_url)
        key = None if presented is None else self._find(presented.text)
        if presented is None or key is None or (presented.is_in_url and not key.allow_in_url):
            return None
        # Keys with restrictions go to aiohttp, where the client's address and origin are checked, and so do those with faults.
        return None if key.restrictions is not None or key.fault is not None else key


def _is_sampled(name: bytes, line: bytes) -> bool:
    """Whether a line asks for a trace. Such requests are handed over."""
    return name.lower() == _TRACEPARENT and line.rstrip(b" \t")[-1:] in _SAMPLED
