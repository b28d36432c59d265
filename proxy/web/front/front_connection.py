"""The hot path: complete POSTs with a known length on JSON-RPC routes, and GETs of routes of REST chains, with a known key.

Every client connection starts as a `FrontConnection`. Its `RequestReader` turns bytes into requests; its `ReplyWriter` waits
for their outcomes and writes the replies. At the first message of any other form, the connection is handed over to aiohttp for
good, with the bytes from the start of that message. A connection serves one request at a time, so it holds the state of
that request itself and allocates nothing for it.

Most calls take the short path (`short_call.py`), and cached results are answered right here. All other calls become a `Flight`
or go through `RpcService`. Clients see no difference.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final, final

from proxy.core import jsonrpc, large_envelope
from proxy.core.caching import key_of
from proxy.core.jsonrpc import MalformedCall
from proxy.core.pricing import request_units, size_units
from proxy.errors import Fault, RequestTimeout
from proxy.services.rpc.rpc_service import fault_of
from proxy.web.front.connection_limiter import ConnectionLimiter
from proxy.web.front.front_context import FrontContext
from proxy.web.front.handler_connection import hand_over
from proxy.web.front.lingering import LingeringConnection
from proxy.web.front.reply_writer import ReplyWriter
from proxy.web.front.request_headers import RequestHeaders
from proxy.web.front.request_reader import LARGE_BODY, RequestMessage, RequestReader
from proxy.web.front.rest_requests import RouteRequest
from proxy.web.front.short_call import ShortCall
from proxy.wire.upstream import Upstream

# Bounds the bytes that a client may send before it has its replies. Beyond it, reading pauses until at most half of this is
# left. The last read may exceed it by up to 256 KiB.
MAX_AHEAD: Final = 262_144
# The rest of a body that arrives in larger pieces than this is read in turn with other clients.
READ_AT_ONCE: Final = 65_536
# A larger body is served in its client's turn. Bodies of many clients may be complete in the same round of the loop. Smaller
# ones, which one read of the transport can bring, are not worth it: a turn costs as much as serving 100 KB.
SERVED_AT_ONCE: Final = 262_144
_monotonic: Final = time.monotonic
_NOT_JSON: Final = jsonrpc.NOT_JSON


@final
class FrontConnection(asyncio.Protocol):
    """One client connection."""

    __slots__ = (
        "_address",
        "_arriving",
        "_context",
        "_limiter",
        "_next",
        "_reader",
        "_reads_soon",
        "_replies",
        "_sender",
        "_short",
        "_since",
        "_unsent",
    )

    def __init__(self, limiter: ConnectionLimiter, context: FrontContext) -> None:
        self._limiter = limiter
        self._context = context
        self._address = ""
        # When the connection was made, or when the first byte of an incomplete message came.
        self._since = 0.0
        # The room that was taken for a body that is still arriving, and the account that it counts for.
        self._arriving = 0
        self._sender = ""
        # See `ConnectionLimiter.watch_reader`.
        self._unsent = 0
        # Whether reading ahead is scheduled, and a message that waits for the connection's turn.
        self._reads_soon = False
        self._next: RequestMessage | None = None
        self._reader = RequestReader(context.header_reader, context.max_header_bytes)
        self._replies = ReplyWriter(context, self._reader, self._go_on)
        self._short = ShortCall(self._replies)

    def __repr__(self) -> str:
        state = "busy" if self._replies.busy else "idle" if self._reader.is_empty else "reading"
        return f"<FrontConnection {state}>"

    @property
    def bytes_ahead(self) -> int:
        return self._reader.bytes_ahead

    @property
    def transport(self) -> asyncio.Transport | None:
        return self._replies.transport

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._replies.open(transport)  # type: ignore[arg-type]
        peer = transport.get_extra_info("peername")
        self._address = peer[0] if isinstance(peer, tuple) else ""
        self._since = _monotonic()
        self._limiter.add(self, self._address)

    def data_received(self, data: bytes) -> None:
        reader, replies = self._reader, self._replies
        if not replies.busy and not reader.ahead and data.startswith(reader.known_bytes):
            headers: RequestHeaders = reader.known  # type: ignore[assignment]
            if len(data) == headers.total and headers.key.alive:
                if headers.length:
                    self._serve_call(headers, data[headers.size :])
                else:
                    self._serve_get(headers)
                return
        self._read(data)

    def connection_lost(self, exc: Exception | None) -> None:
        replies = self._replies
        self._limiter.remove(self, self._address)
        replies.close()
        self._give_room()
        self._reader.forget_known()
        if replies.flight is not None:
            replies.leave_flight(replies.flight)
        elif not replies.leave_batch():
            self._short.leave()

    def pause_writing(self) -> None:
        self._replies.stream.pause(_monotonic())
        self._unsent = 0
        self._reader.forget_known()
        self._limiter.deadline_runs(self)

    def resume_writing(self) -> None:
        self._replies.resume()

    # Reading

    def _read(self, data: bytes) -> None:
        """Read new headers, a part of a message, or several messages."""
        reader, replies = self._reader, self._replies
        is_new = reader.is_empty
        is_free = not replies.busy and not replies.is_stalled
        message = reader.take(data, is_free=is_free)
        if reader.bytes_ahead > MAX_AHEAD:
            replies.pause_reading()
        if reader.is_in_body or self._arriving:
            self._count_body()
        if message is None:
            if is_free:
                self._run_clock(is_new=is_new)
            if reader.is_in_body and len(data) > READ_AT_ONCE:
                self._read_in_turn()
        elif message.headers is None or replies.was_refused or message.headers.length > SERVED_AT_ONCE:
            self._serve_in_turn(message)
        else:
            self._serve_message(message)

    def _read_in_turn(self) -> None:
        """Read the rest of a large body after other clients' turns. The transport would read up to 8 MB at once."""
        self._replies.pause_reading()
        self._limiter.turns.add(self._sender, self._read_on)

    def _read_on(self) -> bool:
        if self._reader.bytes_ahead <= MAX_AHEAD:
            self._replies.resume_reading()
        return True

    def _count_body(self) -> None:
        """Take room for a body that is still arriving, and give it back once it is complete."""
        reader = self._reader
        if not reader.is_in_body:
            self._give_room()
        elif not self._arriving:
            headers: RequestHeaders = reader.known  # type: ignore[assignment]
            self._sender = headers.key.account.id
            refusal = self._limiter.take_body(self._sender, headers.length)
            if refusal is None:
                self._arriving = headers.length
            else:
                self._refuse_body(refusal)

    def _give_room(self) -> None:
        if self._arriving:
            self._limiter.give_back_body(self._sender, self._arriving)
            self._arriving = 0

    def _serve_message(self, message: RequestMessage) -> None:
        if message.headers is not None:
            if message.headers.closes:
                self._replies.expect_last()
            self._serve(message.headers, message.data, message.start)
        else:
            self._hand_over(message.data + self._reader.take_rest())

    def _serve_in_turn(self, message: RequestMessage) -> None:
        """Serve the message in the client's next turn: it follows a refused call, which costs its client nothing, or it is
        large or has to be handed over to aiohttp, which take long. Other clients are served in between."""
        self._next = message
        self._replies.await_turn()
        client = self._replies.client or self._address
        if message.headers is None:
            self._replies.pause_reading()
            client = self._limiter.client_of_headers(self._address, message.data) or client
        elif message.headers.length > SERVED_AT_ONCE:
            client = message.headers.key.account.id
        self._limiter.turns.add(client, self._serve_next)

    def _serve_next(self) -> bool:
        message, self._next = self._next, None
        replies = self._replies
        if message is None or replies.transport is None:
            return False
        replies.turn_came()
        self._serve_message(message)
        return False

    def _run_clock(self, *, is_new: bool) -> None:
        """Put a deadline on an incomplete message, counted from its first byte."""
        if is_new or self not in self._limiter.timed:
            self._since = _monotonic()
            self._limiter.deadline_runs(self)

    def _go_on(self) -> None:
        """Serve the requests that the client has sent ahead, in the next turn of the loop."""
        if self._reader.bytes_ahead <= MAX_AHEAD // 2:
            self._replies.resume_reading()
        if self._reader.ahead and not self._reads_soon:
            self._reads_soon = True
            self._limiter.turns.add(self._replies.client or self._address, self._read_ahead)

    def _read_ahead(self) -> bool:
        self._reads_soon = False
        reader, replies = self._reader, self._replies
        if not reader.ahead or replies.busy or replies.is_stalled or replies.transport is None:
            return False
        message = reader.take_ahead()
        if message is not None:
            self._serve_message(message)
            return False
        replies.resume_reading()
        self._run_clock(is_new=True)
        return False

    def _hand_over(self, data: bytes) -> None:
        """Hand the connection over to aiohttp, with every byte of the message."""
        transport = self._replies.transport
        assert transport is not None
        self._context.write_buffer.flush()
        self._replies.resume_reading()
        hand_over(self, self._limiter, transport, self._address, data)
        self._replies.close()

    # Serving

    def _serve(self, headers: RequestHeaders, data: bytes, start: int) -> None:
        if not headers.length:
            self._serve_get(headers)
        elif headers.length < LARGE_BODY:
            self._serve_call(headers, data[start:])
        else:
            self._serve_large(headers, data, start)

    def _serve_get(self, headers: RequestHeaders) -> None:
        """Serve a request of a REST route: from the cache if that is possible, or with all checks. Nothing is charged to a key
        before that is certain."""
        rest: RouteRequest = headers.rest  # type: ignore[assignment]
        policy, state = headers.policies.get(rest.method), headers.route.state
        if policy is not None and policy.shared:
            state.stay_current()
            known = state.replies.get(rest.cache_key) if state.caches else None
            if known is not None:
                now, rate, units = _monotonic(), headers.key.rate, rest.price(policy, state)
                if not self._context.buckets.take(rate.bucket_index, now, rate.request_s, units * rate.unit_s):
                    replies = self._replies
                    replies.begin_call(headers, policy, b"", now, state.tip, "hit")
                    replies.on_admitted(units)
                    replies.write_record(known, now)
                    return
        self._serve_in_full(headers, b"", None, call=rest.call)

    def _serve_call(self, headers: RequestHeaders, body: bytes) -> None:
        """Take the short path if the call allows it. Nothing is charged to a key before that is certain."""
        try:
            envelope = headers.read_envelope(body)
        except _NOT_JSON:
            self._serve_in_full(headers, body, None)
            return
        policy = headers.policies.get(envelope.method)
        params, call_id = b"" + envelope.params, b"" + envelope.id  # Half as many instructions as `bytes` takes.
        if policy is None or not policy.is_short_call(envelope, params, call_id, body):
            self._serve_in_full(headers, body, envelope if isinstance(envelope, jsonrpc.Envelope) else None)
            return
        key, context, replies = headers.key, self._context, self._replies
        rate = key.rate
        now = _monotonic()
        if context.buckets.take(rate.bucket_index, now, rate.request_s, policy.units * rate.unit_s):
            self._serve_in_full(headers, body, envelope if isinstance(envelope, jsonrpc.Envelope) else None)
            return
        route = headers.route
        state = route.state
        if policy.shared:
            # Hits are the most frequent calls, so they are answered right here.
            state.stay_current()
            known = state.replies.get(key_of(policy.request_tail, params)) if state.caches else None
            if known is not None:
                replies.begin_call(headers, policy, call_id, now, state.tip, "hit")
                replies.write_result(known, now)
                return
            replies.begin_call(headers, policy, call_id, now, state.tip, "")
        else:
            replies.begin_call(headers, policy, call_id, now, state.tip, "")
            upstream: Upstream = route.only  # type: ignore[assignment]
            is_sampled = policy.is_observed and state.is_sampled()
            if self._short.send(upstream, policy, params, is_sampled=is_sampled):
                return
        context.forwarder.forward((replies, policy, params), route, key, now)

    def _serve_large(self, headers: RequestHeaders, data: bytes, start: int) -> None:
        """Serve a large body without the short path, which would save less than another copy of the body costs. It is not
        parsed for an account that cannot pay for its size."""
        now = _monotonic()
        refusal = self._context.rpc.size_refusal(headers.key, request_units(data, start), now)
        if refusal is not None:
            self._replies.begin(headers, now)
            self._replies.on_fault(refusal)
            return
        call = large_envelope.read_call(data, start)
        self._serve_in_full(headers, b"" if call else data[start:], None, call=call)

    def _serve_in_full(
        self,
        headers: RequestHeaders,
        body: bytes,
        envelope: jsonrpc.Envelope | None,
        *,
        call: jsonrpc.RawCall | None = None,
    ) -> None:
        """Serve any request, with all checks. `envelope` or `call` is given if it was read already."""
        replies, key, route = self._replies, headers.key, headers.route
        now = _monotonic()
        replies.begin(headers, now)
        if (
            key.disabled
            or key.expires_at <= now
            or not key.scopes & route.any_scope
            or (route.is_live and not key.live)
        ):
            replies.on_fault(self._context.refusal(headers, now))
            return
        try:
            if call is None and envelope is None and jsonrpc.is_batch(body):
                self._serve_batch(headers, body, now)
            else:
                call = call or jsonrpc.parse(body, envelope, route.dialect)
                replies.on_parsed(call)
                self._context.rpc.call(replies, route, key, call, now, directives=headers.directives)
        except MalformedCall as exc:
            self._context.rpc.charge_size(key, size_units(headers.length), now)
            replies.on_fault(fault_of(exc))

    def _serve_batch(self, headers: RequestHeaders, body: bytes, now: float) -> None:
        replies = self._replies
        batch = self._context.rpc.call_batch(
            body,
            headers.route,
            headers.key,
            now,
            replies.on_batch,
            replies.on_batch_refused,
            directives=headers.directives,
            sink=replies,
        )
        replies.await_batch(batch)

    # Called by the connection limiter

    def check(self, now: float) -> None:
        """Enforce the deadline that runs, if any."""
        limiter, reader, replies = self._limiter, self._reader, self._replies
        limits, stream = limiter.limits, replies.stream
        if stream.stalled_since:
            since, self._unsent = limiter.watch_reader(self, now, stream.stalled_since, self._unsent)
            stream.stalled(since)
        elif replies.busy or reader.is_empty:
            limiter.deadline_ended(self)
        elif now - self._since > (limits.body_timeout_s if reader.is_in_body else limits.header_timeout_s):
            self._time_out()

    def _time_out(self) -> None:
        if not self._reader.is_in_body:
            self._limiter.close_late_headers(self)
            return
        # The request had a key, so this reply has its rate headers.
        self._refuse_body(RequestTimeout("the request's body did not arrive in time"))

    def _refuse_body(self, fault: Fault) -> None:
        """Refuse a request whose body is still arriving, and skip the rest of it."""
        replies = self._replies
        transport = replies.transport
        if transport is None:
            return
        replies.refuse_incomplete(fault)
        self._give_room()
        LingeringConnection(self._limiter, transport, self._address, replies.client).begin(self)
        self._reader.forget_known()
        replies.close()

    def close_if_quiet(self, now: float, quiet_s: float) -> None:
        is_quiet = not self._replies.busy and self._reader.is_empty
        if is_quiet and now - max(self._since, self._replies.began) >= quiet_s:
            self.force_close()

    def force_close(self) -> None:
        if self._replies.transport is not None:
            self._replies.transport.close()
