"""The short path: a plain read, an idle connection to the only upstream, a good reply.

Most calls are of this kind. The upstream connection passes the reply straight to this sink, which passes it to the reply writer
of its client connection. A call that is slow, fails or has an unusual reply becomes a `Flight`; clients see no difference. A
client connection has one call under way at a time, so one `ShortCall` is reused for all of them and nothing is allocated per
call.
"""

from __future__ import annotations

import time
from typing import Final, final

from proxy.core import jsonrpc
from proxy.services.rpc.flights import Flight, result_at
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.web.front.reply_writer import ReplyWriter
from proxy.web.front.request_headers import RequestHeaders
from proxy.wire.http1 import ReplyHeaders
from proxy.wire.upstream import Piece, Upstream, UpstreamConnection

_monotonic: Final = time.monotonic
_read_reply: Final = jsonrpc.read_numbered_reply
_NOT_JSON: Final = jsonrpc.NOT_JSON
_NO_REPLY: Final = jsonrpc.NumberedReply()


@final
class ShortCall:
    """The sink of a client connection's call on the short path."""

    __slots__ = ("_is_sampled", "_params", "_replies", "_upstream", "_wire_id")

    def __init__(self, replies: ReplyWriter) -> None:
        self._replies = replies
        # The call under way: its params, its id at the upstream, and the upstream.
        self._params = b""
        self._wire_id = 0
        self._upstream: Upstream | None = None
        # Whether an observer must see the reply. See `NetworkState.is_sampled`.
        self._is_sampled = False

    def __repr__(self) -> str:
        return f"<ShortCall {'idle' if self._upstream is None else self._upstream.label}>"

    @property
    def client(self) -> str:
        return self._replies.client

    def send(self, upstream: Upstream, policy: MethodPolicy, params: bytes, *, is_sampled: bool) -> bool:
        """Send the call. False if the upstream has no connection free for it."""
        sent = upstream.send_call(self, policy.request_tail, params) if upstream.health.free else 0
        if not sent:
            return False
        self._params = params
        self._wire_id = sent
        self._upstream = upstream
        self._is_sampled = is_sampled
        upstream.health.begin(self._replies.began)
        return True

    def leave(self) -> None:
        """The client is gone: give up the call under way, if there is one."""
        if self._upstream is not None:
            upstream, self._upstream = self._upstream, None
            upstream.health.ended()
            upstream.leave(self)

    # Called by the upstream connection

    def on_late(self, upstream: Upstream, headers: ReplyHeaders, body: bytes) -> None: ...

    def on_reply(self, connection: UpstreamConnection, headers: ReplyHeaders, body: bytes) -> None:
        """Pass on a good reply. Kept short, since almost every call ends here."""
        upstream, replies = connection.upstream, self._replies
        client: RequestHeaders = replies.request_headers  # type: ignore[assignment]
        policy: MethodPolicy = replies.policy  # type: ignore[assignment]
        try:
            reply = _read_reply(body)
        except _NOT_JSON:
            reply = _NO_REPLY
        result = reply.result
        if (
            not result
            or reply.error
            or reply.id != self._wire_id
            or headers.status != 200
            or not headers.plain
            or not body.isascii()
            or (policy.looks_up_null and client.route.state.is_null(result))
        ):
            self._to_flight(upstream).on_reply(connection, headers, body)
            return
        now = _monotonic()
        self._upstream = None
        upstream.health.answered(now - replies.began)
        if not self._is_sampled:
            replies.write_result(result, now)
            return
        read = (replies.client, policy, self._params, bytes(result), upstream, now - replies.began)
        replies.write_result(result, now)
        client.route.state.short_read_answered(*read)

    def on_fail(self, upstream: Upstream, reason: str, *, sent: bool) -> None:
        self._to_flight(upstream).on_fail(upstream, reason, sent=sent)

    def on_large(self, connection: UpstreamConnection, headers: ReplyHeaders, beginning: Piece) -> bool:
        """Pass on a large reply that is complete. One that arrives in pieces becomes a flight, which follows it to its end."""
        replies = self._replies
        policy: MethodPolicy = replies.policy  # type: ignore[assignment]
        start = result_at(policy, b"%d" % self._wire_id, headers, beginning) if len(beginning) == headers.length else 0
        if not start:
            flight = self._to_flight(connection.upstream)
            connection.replace(self, flight)
            return flight.on_large(connection, headers, beginning)
        replies.on_stream(memoryview(beginning)[start:], headers.length - start, connection)
        return True

    def on_piece(self, connection: UpstreamConnection, piece: Piece) -> None:
        raise AssertionError("a reply in pieces belongs to a flight")

    def on_end(self, connection: UpstreamConnection) -> None:
        self._upstream = None
        health = connection.upstream.health
        health.ended()
        health.succeeded(_monotonic() - self._replies.began)
        self._replies.on_stream_end()

    def on_tick(self, connection: UpstreamConnection | None, now: float) -> None:
        """A late call leaves the short path, so that the sweep can repeat it."""
        if connection is not None and now - self._replies.began > connection.upstream.health.late_after_s():
            flight = self._to_flight(connection.upstream)
            connection.replace(self, flight)
            flight.on_tick(connection, now)

    def _to_flight(self, upstream: Upstream) -> Flight:
        """Turn the call into a flight, because it is slow, failed, or has an unusual reply."""
        replies = self._replies
        assert replies.request_headers is not None
        assert replies.policy is not None
        self._upstream = None
        flight = replies.request_headers.route.dispatcher.take_over(
            replies.policy,
            self._params,
            replies,
            upstream,
            id_=b"%d" % self._wire_id,
            began=replies.began,
            client=replies.client,
            block=replies.block,
        )
        replies.on_flight(flight)
        return flight
