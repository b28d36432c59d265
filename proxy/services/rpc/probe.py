"""Calls of our own to one upstream, outside admission and routing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Final

from proxy.core import jsonrpc, upstream_errors
from proxy.core.upstream_errors import ErrorRule
from proxy.services.rpc.dispatcher import failure_in
from proxy.services.rpc.flights import next_id
from proxy.wire.http1 import ReplyHeaders
from proxy.wire.upstream import STALE, Piece, Upstream, UpstreamConnection

_read_reply: Final = jsonrpc.read_numbered_reply
_NOT_JSON: Final = jsonrpc.NOT_JSON


class Probe:
    """One call to one upstream. Its result is None if the call failed."""

    client: str = ""

    def __init__(
        self,
        upstream: Upstream,
        method: str,
        params: bytes = b"[]",
        *,
        rules: Sequence[ErrorRule] = (),
        is_batch: bool = False,
        archive: bool = False,
        number: int = 0,
    ) -> None:
        """`rules`: what errors mean in the chain's family. `is_batch`: the call is sent twice, as a batch, and the result is
        the reply to both. `archive`: the call reads old state, which may cost more. `number`: the id of a call that was sent
        already."""
        self._number = number or next_id()
        self._id = b"%d" % self._number
        self._upstream = upstream
        self._rules = rules
        self._meter = upstream.health.meter
        self.method = method
        self._spender = (method, "", "")
        self._archive = archive
        body = b"".join((jsonrpc.ENVELOPE_START, self._id, jsonrpc.request_tail(method), params, b"}"))
        self._is_batch = is_batch
        self._body = b"[%b,%b]" % (body, body) if is_batch else body
        self.result: bytes | None = None
        # Called once, when there is a result, or none can come.
        self._on_done: Callable[[], None] | None = None
        self._given_up_at = math.inf
        # Whether the upstream replied, even with an error. One that limits our rate has said nothing about the call.
        self.is_answered = False
        # Whether it limits our rate, and the status of its reply.
        self.is_limited = False
        self.status = 0
        # Why there is no reply.
        self.failure = ""
        # The kind of error that it replied with, if any.
        self.error = ""
        self.lacks_method = False
        self.error_reply = b""

    def start(self, on_done: Callable[[], None], within_s: float) -> None:
        """Send it for a caller that does not wait. Its upstream's sweep gives it up."""
        self._given_up_at = time.monotonic() + within_s
        self.begin(on_done, beside=False)

    def take_over(self, on_done: Callable[[], None], give_up_at: float) -> None:
        """Go on with a call that was sent with its number, and counted."""
        self._on_done = on_done
        self._given_up_at = give_up_at

    def begin(self, on_done: Callable[[], None], *, beside: bool) -> None:
        """`beside`: probes of an upstream go one after the other, unless they may be beside each other, like calls."""
        self._on_done = on_done
        if self._meter is not None:
            if not self._meter.affords(self.method, archive=self._archive):
                self._settle(None)
                return
            self._meter.began(self._spender, archive=self._archive)
        (self._upstream.submit if beside else self._upstream.probe)(self, self._body)

    def give_up(self) -> None:
        if self._upstream.leave(self) and self._meter is not None:
            self._meter.not_sent(self._spender, archive=self._archive)
        self._settle(None)

    def on_reply(self, connection: UpstreamConnection, headers: ReplyHeaders, body: bytes) -> None:
        self.on_late(connection.upstream, headers, body)
        self.is_limited = headers.wants_rest
        self.status = headers.status
        if self._is_batch:
            self._settle(body if body.lstrip().startswith(b"[") else None)
            return
        if headers.status == 200 and headers.plain and (result := self._plain_result(body)):
            self.is_answered = True
            self._settle(result)
            return
        try:
            reply = jsonrpc.read_reply(body, self._id)
        except ValueError:
            self._settle(None)
            return
        verdict = upstream_errors.classify(bytes(reply.error), self._rules) if reply.error else None
        self.error = "" if verdict is None else verdict.kind
        self.error_reply = bytes(reply.error)
        self.lacks_method = verdict is not None and verdict.lacks_method
        self.is_limited |= verdict is not None and verdict.wants_rest
        self.is_answered = not self.is_limited
        self._settle(bytes(reply.result) or None)

    def _plain_result(self, body: bytes) -> bytes:
        """The result of a usual reply, which is read as on the short path; empty for any other reply."""
        if not body.isascii() or len(body) > jsonrpc.READ_WHOLE:
            return b""
        try:
            reply = _read_reply(body)
        except _NOT_JSON:
            return b""
        return bytes(reply.result) if reply.id == self._number and not reply.error else b""

    def on_late(self, upstream: Upstream, headers: ReplyHeaders, body: bytes) -> None:
        if self._meter is not None and (outcome := failure_in(headers, body, self._id)):
            self._meter.failed(self._spender, outcome, archive=self._archive)

    def on_fail(self, upstream: Upstream, reason: str, *, sent: bool) -> None:
        if self._meter is not None and (not sent or reason == STALE):
            self._meter.not_sent(self._spender, archive=self._archive)
        self.failure = reason
        self._settle(None)

    def on_large(self, connection: UpstreamConnection, headers: ReplyHeaders, beginning: Piece) -> bool:
        return False

    def on_piece(self, connection: UpstreamConnection, piece: Piece) -> None: ...
    def on_end(self, connection: UpstreamConnection) -> None: ...

    def on_tick(self, connection: UpstreamConnection | None, now: float) -> None:
        if now > self._given_up_at:
            self.give_up()

    def _settle(self, result: bytes | None) -> None:
        on_done, self._on_done = self._on_done, None
        if on_done is not None:
            self.result = result
            on_done()
