"""Calls of our own to one upstream, outside admission and routing."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from proxy.chains.lookups import Lookup, Values
from proxy.core import jsonrpc, upstream_errors
from proxy.core.upstream_errors import ErrorRule
from proxy.services.rpc.dispatcher import failure_in
from proxy.services.rpc.flights import next_id
from proxy.wire.http1 import ReplyHeaders
from proxy.wire.upstream import STALE, Piece, Upstream, UpstreamConnection

# How long an upstream may take to reply.
REPLY_S = 3.0


class Probe:
    """One call to one upstream. Its result is None if the call failed. `rules`: what errors mean in the chain's family."""

    client = ""

    def __init__(
        self, upstream: Upstream, method: str, params: bytes = b"[]", *, rules: Sequence[ErrorRule] = ()
    ) -> None:
        self._id = b"%d" % next_id()
        self._upstream = upstream
        self._rules = rules
        self._meter = upstream.health.meter
        self._spender = (method, "", "")
        self._body = b"".join((jsonrpc.ENVELOPE_START, self._id, jsonrpc.request_tail(method), params, b"}"))
        self.result: bytes | None = None
        # Called once, when there is a result, or none can come.
        self._on_done: Callable[[], None] | None = None
        self._given_up_at = math.inf
        # Whether the upstream replied, even with an error. One that limits our rate has said nothing about the call.
        self.is_answered = False
        # Whether it limits our rate.
        self.is_limited = False
        # The kind of error that it replied with, if any.
        self.error = ""
        self.lacks_method = False
        self.error_reply = b""

    async def send(self, within_s: float = REPLY_S, *, beside: bool = False) -> bytes | None:
        """`beside`: probes of an upstream go one after the other, unless they may be beside each other, like calls."""
        done = asyncio.Event()
        self._begin(done.set, beside=beside)
        try:
            async with asyncio.timeout(within_s):
                await done.wait()
        except TimeoutError:
            self._give_up()
        return self.result

    def start(self, on_done: Callable[[], None], within_s: float) -> None:
        """Send it for a caller that does not wait. Its upstream's sweep gives it up."""
        self._given_up_at = time.monotonic() + within_s
        self._begin(on_done, beside=False)

    def _begin(self, on_done: Callable[[], None], *, beside: bool) -> None:
        self._on_done = on_done
        if self._meter is not None:
            if not self._meter.affords(self._spender[0]):
                self._settle(None)
                return
            self._meter.began(self._spender)
        (self._upstream.submit if beside else self._upstream.probe)(self, self._body)

    def _give_up(self) -> None:
        if self._upstream.leave(self) and self._meter is not None:
            self._meter.not_sent(self._spender)
        self._settle(None)

    def on_reply(self, connection: UpstreamConnection, headers: ReplyHeaders, body: bytes) -> None:
        self.on_late(connection.upstream, headers, body)
        self.is_limited = headers.wants_rest
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

    def on_late(self, upstream: Upstream, headers: ReplyHeaders, body: bytes) -> None:
        if self._meter is not None and (outcome := failure_in(headers, body, self._id)):
            self._meter.failed(self._spender, outcome)

    def on_fail(self, upstream: Upstream, reason: str, *, sent: bool) -> None:
        if self._meter is not None and (not sent or reason == STALE):
            self._meter.not_sent(self._spender)
        self._settle(None)

    def on_large(self, connection: UpstreamConnection, headers: ReplyHeaders, beginning: Piece) -> bool:
        return False

    def on_piece(self, connection: UpstreamConnection, piece: Piece) -> None: ...
    def on_end(self, connection: UpstreamConnection) -> None: ...

    def on_tick(self, connection: UpstreamConnection | None, now: float) -> None:
        if now > self._given_up_at:
            self._give_up()

    def _settle(self, result: bytes | None) -> None:
        on_done, self._on_done = self._on_done, None
        if on_done is not None:
            self.result = result
            on_done()


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """The answer of an upstream to a lookup. `values`: None if a call failed. `lacked`: methods that it does not serve.
    `is_answered`: whether it replied to all calls, even with an error. `error`: the kind of that error."""

    values: Values | None
    is_answered: bool
    lacked: tuple[str, ...] = ()
    error: str = ""


async def look_up(
    upstream: Upstream,
    lookup: Lookup,
    values: Values | None = None,
    *,
    within_s: float = REPLY_S,
    skips_errors: bool = False,
    rules: Sequence[ErrorRule] = (),
) -> LookupAnswer:
    """Make the calls of a lookup one after the other. `values`: those that are given. `skips_errors`: a call that the upstream
    refuses does not end the lookup. `rules`: what errors mean in the chain's family."""
    found, lacked = dict(values or {}), list[str]()
    for call in lookup.calls:
        probe = Probe(upstream, *call.with_values(found), rules=rules)
        result = await probe.send(within_s)
        if result is None and skips_errors and probe.is_answered:
            continue
        if result is None:
            return LookupAnswer(None, probe.is_answered, error=probe.error)
        found |= call.values_in(result)
        lacked += call.lacked_in(result)
    return LookupAnswer(found, is_answered=True, lacked=tuple(lacked))
