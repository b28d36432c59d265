"""An upstream that serves REST routes over HTTP/1.1 (`core/rest_routes.py`).

To its callers it is an upstream like every other: they submit JSON-RPC calls whose method is a route, and receive JSON-RPC
replies whose result is a record of the HTTP reply. A *translator* stands between each call's sink and its connection. It makes
a reply of status 2xx a result, one with another status an error with the status as its code, and passes on the beginning of a
large reply with the start of its record before it, so that it can be streamed.
"""

from __future__ import annotations

import base64
from typing import Final

import msgspec

from proxy.core.jsonrpc import NOT_JSON, error_reply, result_reply, result_start
from proxy.core.rest_routes import JSON, RestCall, RestTransport, read_call, target_of
from proxy.core.upstream_health import UpstreamHealth
from proxy.wire.http1 import CHUNKED, ReplyHeaders
from proxy.wire.http_connection import HttpConnection
from proxy.wire.http_upstream import HttpUpstream, PoolTerms
from proxy.wire.upstream import Piece, ReplySink, Upstream, UpstreamConnection
from proxy.wire.upstream_events import EventStream, event_stream
from proxy.wire.websocket_client import WebSocketLink

# The text of an error reply in which phrases are looked for.
_LONGEST_MESSAGE: Final = 500
_DELIVERED_WHOLE: Final = ReplyHeaders(200, CHUNKED, close=False, plain=True)
_NOT_A_REPLY: Final = b"the reply is not JSON"
_encode: Final = msgspec.json.encode
_is_json: Final = msgspec.json.Decoder(msgspec.Raw).decode


class RestUpstream(HttpUpstream):
    __slots__ = ("_link", "_translators", "_transport")

    def __init__(self, health: UpstreamHealth, terms: PoolTerms, transport: RestTransport, link: WebSocketLink) -> None:
        """`link`: for event streams, which have connections of their own."""
        super().__init__(health, terms)
        self._transport = transport
        self._link = link
        # The translators of the calls that are under way, by their sinks.
        self._translators: dict[ReplySink, ReplyTranslator] = {}

    def send_call(self, sink: ReplySink, tail: bytes, params: bytes) -> int:
        return 0  # The short path is for JSON-RPC.

    def submit(
        self, sink: ReplySink, *body: bytes, once: bool = False, fresh: bool = False, header: bytes = b""
    ) -> UpstreamConnection | None:
        call = read_call(b"".join(body))
        translator = ReplyTranslator(self, sink, bytes(call.id), self._transport)
        self._translators[sink] = translator
        return self.send_request(translator, (self._request(call, header),), once=once, fresh=fresh)

    def _request(self, call: RestCall, header: bytes) -> bytes:
        """The bytes of the request. Every value in it was checked when the call was made."""
        address, params = self._terms.address, call.params
        verb, target = target_of(call.method, params)
        target = self._own_target(target)
        # Not every route has every representation, and then a node replies with JSON.
        accept = params.accept if params.accept == JSON else f"{params.accept}, {JSON};q=0.9"
        lines = [f"{verb} {target} HTTP/1.1", *address.lines, f"Accept: {accept}"]
        lines += [f"{name}: {value}" for name, value in params.headers.items()]
        body = b""
        if verb != "GET":
            body = base64.b64decode(params.body) if params.type != JSON else bytes(params.json) or params.body.encode()
            lines += [f"Content-Type: {params.type}", f"Content-Length: {len(body)}"]
        return b"%b\r\n%b\r\n%b" % ("\r\n".join(lines).encode("latin-1"), header, body)

    def _own_target(self, target: str) -> str:
        """The target below the path of the upstream's URL, with that URL's query."""
        address = self._terms.address
        target = address.path.rstrip("/") + target
        return f"{target}{'&' if '?' in target else '?'}{address.query}" if address.query else target

    def events(self, target: str) -> EventStream:
        """Open an event stream: see `event_stream`."""
        return event_stream(self._link, self.label, self._own_target(target))

    def probe_pool(self) -> HttpUpstream:
        return RestUpstream(self.health, self.probe_terms, self._transport, self._link)

    def in_flight(self) -> list[ReplySink]:
        return list(self._translators)

    def leave(self, sink: ReplySink) -> bool:
        translator = self._translators.pop(sink, None)
        if translator is not None:
            return super().leave(translator)
        return self._probes is not None and self._probes.leave(sink)

    def translated(self, sink: ReplySink) -> None:
        """The call of this sink is over."""
        self._translators.pop(sink, None)


class ReplyTranslator:
    """The sink of one request: passes its reply on as that to a JSON-RPC call."""

    def __init__(self, upstream: RestUpstream, sink: ReplySink, id_: bytes, transport: RestTransport) -> None:
        self._upstream = upstream
        self._sink = sink
        self._id = id_
        self._transport = transport

    @property
    def client(self) -> str:
        return self._sink.client

    def on_reply(self, connection: UpstreamConnection, headers: ReplyHeaders, body: bytes) -> None:
        self._upstream.translated(self._sink)
        if headers.wants_rest or not headers.plain:
            self._sink.on_reply(connection, headers, body)
        else:
            self._sink.on_reply(connection, _DELIVERED_WHOLE, self._reply(connection, headers.status, body))

    def on_late(self, upstream: Upstream, headers: ReplyHeaders, body: bytes) -> None:
        self._sink.on_late(upstream, headers, b"")

    def on_large(self, connection: UpstreamConnection, headers: ReplyHeaders, beginning: Piece) -> bool:
        if not 200 <= headers.status < 300 or not headers.plain:
            return False
        start = result_start(self._id) + self._record_start(connection, headers.status)
        length = headers.length + len(start) if headers.length >= 0 else CHUNKED
        shown = ReplyHeaders(200, length, close=headers.close, plain=True)
        return self._sink.on_large(connection, shown, start + bytes(beginning))

    def on_piece(self, connection: UpstreamConnection, piece: Piece) -> None:
        self._sink.on_piece(connection, piece)

    def on_end(self, connection: UpstreamConnection) -> None:
        self._upstream.translated(self._sink)
        self._sink.on_end(connection)

    def on_fail(self, upstream: Upstream, reason: str, *, sent: bool) -> None:
        self._upstream.translated(self._sink)
        self._sink.on_fail(upstream, reason, sent=sent)

    def on_tick(self, connection: UpstreamConnection | None, now: float) -> None:
        self._sink.on_tick(connection, now)

    def _reply(self, connection: UpstreamConnection, status: int, body: bytes) -> bytes:
        """The reply to the JSON-RPC call. A body that should be JSON and is not makes it invalid."""
        is_error = self._is_error(body)
        is_good = 200 <= status < 300 and not is_error
        is_json = not body or self._is_json(connection)
        if not is_json and is_good:
            encoded = b'"base64":"%b"}' % base64.b64encode(body)
            return result_reply(self._id, self._record_start(connection, status).removesuffix(b'"body":') + encoded)
        if is_good:
            if body and not _is_whole_json(body):
                return _NOT_A_REPLY
            return result_reply(self._id, self._record_start(connection, status) + (body or b"null") + b"}")
        text = body[:_LONGEST_MESSAGE].decode("utf-8", "replace")
        record = b"null"
        if is_json and body and _is_whole_json(body):
            record = self._record_start(connection, status) + body + b"}"
        # The body of an error with a good status may repeat the caller's words: its code says nothing, so that they have little
        # effect (`core/upstream_errors.py`).
        code = 0 if is_error else status
        error = b'{"code":%d,"message":%b,"data":%b}' % (code, _encode(text or f"status {status}"), record)
        return error_reply(self._id, error)

    def _is_error(self, body: bytes) -> bool:
        member = self._transport.error_member
        return bool(member) and body[:64].lstrip().startswith(b'{"%b"' % member.encode())

    def _is_json(self, connection: UpstreamConnection) -> bool:
        kind = _headers_in(connection, frozenset(("content-type",))).get("content-type", JSON).partition(";")[0].strip()
        return kind not in self._transport.types or kind.lower() == JSON

    def _record_start(self, connection: UpstreamConnection, status: int) -> bytes:
        passed = _headers_in(connection, self._transport.reply_headers | {"content-type"})
        return b'{"status":%d,"headers":%b,"body":' % (status, _encode(passed))


def _is_whole_json(body: bytes) -> bool:
    try:
        _is_json(body)
    except NOT_JSON:
        return False
    return True


def _headers_in(connection: UpstreamConnection, names: frozenset[str]) -> dict[str, str]:
    """These headers of the reply that is being delivered."""
    if not isinstance(connection, HttpConnection):
        return {}
    headers = {}
    for line in connection.header_block[:-4].split(b"\r\n")[1:]:
        name, _, value = line.decode("latin-1").partition(":")
        if name.lower() in names:
            headers[name.lower()] = value.strip(" \t")
    return headers
