"""Batches on the short path: plain reads for a network whose only upstream accepts batches.

One request is sent and one reply received, in order and without an error. No state is kept for each item. For ten reads, that
saves 40 µs of CPU time (compiled) compared with an `UpstreamBatch` of flights, which the batch becomes in every other case.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from proxy.core import jsonrpc
from proxy.core.access import Key
from proxy.core.batch_envelopes import SHORT_BATCH_ITEMS
from proxy.core.jsonrpc import RawCall
from proxy.services.rpc.batches import BatchItem, BatchSink, CallBatch
from proxy.services.rpc.flights import next_id
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.networks import Route
from proxy.services.rpc.reply_share import ReplyShare
from proxy.services.rpc.upstream_batch import UpstreamBatch
from proxy.wire.http1 import ReplyHeaders
from proxy.wire.upstream import Piece, Upstream, UpstreamConnection

# Between two calls or replies, and before the first and after the last one.
_NEXT: Final = b"}," + jsonrpc.HEAD
_FIRST: Final = b"[" + jsonrpc.HEAD
_LAST: Final = b"}]"
# The last three digits of the ids in a batch: joining is faster than formatting a number for each call.
_PLACES: Final = [b"%03d" % place for place in range(SHORT_BATCH_ITEMS)]


def may_be_short(policy: MethodPolicy, call: RawCall) -> bool:
    """Whether the call can be passed on as it is, unless it is about an old block: its result is not shared, and it expects a
    reply."""
    return policy.short and not policy.shared and not policy.looks_up_null and call[2] != b""


class ShortBatch:
    __slots__ = (
        "_became", "_body", "_calls", "_client", "_done", "_first_id", "_ids", "_route", "_sink", "_tallies", "_upstream",
        "began", "reached", "share", "units",
    )  # fmt: skip

    def __init__(
        self,
        calls: Sequence[tuple[MethodPolicy, RawCall]],
        route: Route,
        done: Callable[[CallBatch | ShortBatch], None],
        key: Key,
        share: ReplyShare,
        sink: BatchSink | None = None,
        *,
        units: int,
    ) -> None:
        self._calls = calls
        self._route = route
        self._done = done
        self._tallies = key.tallies
        self._client = key.account.id
        self._first_id = 0
        self._ids = b""
        self._upstream: Upstream | None = None
        self._became: CallBatch | None = None
        self._body = b""
        self._sink = sink
        self.share = share
        self.began = 0.0
        self.units = units
        # A block that the state behind all results has reached.
        self.reached = 0

    def __repr__(self) -> str:
        return f"<ShortBatch of {len(self._calls)}{'' if self._body else ', in flight'}>"

    @property
    def client(self) -> str:
        return self._client

    def send(self, upstream: Upstream, now: float) -> None:
        self.began = now
        self.reached = self._route.state.tip
        self._upstream = upstream
        # Multiplied by 1,000, far above the current ids of flights: an `UpstreamBatch` that takes over keeps them.
        number = next_id()
        self._first_id = number * 1000
        start = b"%d" % number
        self._ids = start + (b"," + start).join(_PLACES[: len(self._calls)])
        parts: list[bytes] = []
        for place, (policy, call) in enumerate(self._calls):
            parts += (_NEXT, start, _PLACES[place], policy.request_tail, call[1])
        parts[0] = _FIRST
        parts.append(_LAST)
        upstream.health.begin(now)
        upstream.submit(self, b"".join(parts))

    # A sink of its connection

    def on_reply(self, connection: UpstreamConnection, headers: ReplyHeaders, body: bytes) -> None:
        results = self._results(headers, body)
        if results is None:
            self._take_over().on_reply(connection, headers, body)
            return
        now = time.monotonic()
        took = now - self.began
        connection.upstream.health.batch_answered(len(results), took)
        self._upstream = None
        parts: list[bytes] = []
        counted, same = self._calls[0][0], 0
        for (policy, call), result in zip(self._calls, results, strict=True):
            parts += (_NEXT, call[2], b',"result":', result)
            if policy is not counted:
                self._tallies[counted.tally].count_results(same, counted.units, took)
                counted, same = policy, 0
            same += 1
        self._tallies[counted.tally].count_results(same, counted.units, took)
        parts[0] = _FIRST
        parts.append(_LAST)
        self._body = b"".join(parts)
        self._done(self)

    def _results(self, headers: ReplyHeaders, body: bytes) -> list[Any] | None:
        """The results in order, as views of the reply; None if it is anything else."""
        if headers.status != 200 or not headers.plain or not body.isascii():
            return None
        try:
            replies = jsonrpc.read_any_replies(body)
        except jsonrpc.NOT_JSON:
            return None
        if len(replies) != len(self._calls):
            return None
        ids: list[Any] = []
        results: list[Any] = []
        for reply in replies:
            if not reply.result or reply.error:
                return None
            ids.append(reply.id)
            results.append(reply.result)
        return results if b",".join(ids) == self._ids else None

    def on_fail(self, upstream: Upstream, reason: str, *, sent: bool) -> None:
        # A refusal is reported one loop turn later: the client may have left meanwhile.
        if self._upstream is not None:
            self._take_over().on_fail(upstream, reason, sent=sent)

    def on_tick(self, connection: UpstreamConnection | None, now: float) -> None:
        upstream = self._upstream
        if upstream is not None and now - self.began > upstream.health.late_after_s():
            batch = self._take_over()
            # A batch that still waits for a connection has the same deadline.
            (connection or upstream).replace(self, batch)
            batch.on_tick(connection, now)

    def on_large(self, connection: UpstreamConnection, headers: ReplyHeaders, beginning: Piece) -> bool:
        batch = self._take_over()
        connection.replace(self, batch)
        return batch.on_large(connection, headers, beginning)

    def on_piece(self, connection: UpstreamConnection, piece: Piece) -> None: ...
    def on_end(self, connection: UpstreamConnection) -> None: ...

    def _take_over(self) -> UpstreamBatch:
        """Give up the short path: each item becomes a flight, and this batch an ordinary one."""
        upstream = self._upstream
        assert upstream is not None
        self._upstream = None
        calls = [call for _, call in self._calls]
        self._became = batch = CallBatch(calls, self._done, self.began, self._tallies, self.share, self._sink)
        batch.on_charged(self.units)
        batch.expect(len(calls))
        dispatcher = self._route.dispatcher
        flights = []
        for index, (item, (policy, call)) in enumerate(zip(batch.items, self._calls, strict=True)):
            item.on_checked(policy)
            item.on_admitted(policy.units)
            flight = dispatcher.take_over(
                policy,
                call[1],
                item,
                upstream,
                id_=b"%d" % (self._first_id + index),
                began=self.began,
                client=self._client,
                block=self.reached,
            )
            item.on_flight(flight)
            flights.append(flight)
        upstream.health.batch_split(len(flights))
        return UpstreamBatch(dispatcher, flights, began=self.began)

    def policies(self) -> list[MethodPolicy]:
        return [policy for policy, _ in self._calls]

    @property
    def answered_label(self) -> str:
        """The name of the upstream that answered all calls."""
        return "" if self._route.only is None else self._route.only.label

    # The interface of `CallBatch`

    def pieces(self) -> list[Piece]:
        return [self._body]

    def body(self) -> bytes:
        return self._body

    def failed(self) -> list[BatchItem]:
        return []

    def leave(self) -> None:
        if self._became is not None:
            self._became.leave()
        elif self._upstream is not None:
            upstream, self._upstream = self._upstream, None
            upstream.health.ended()
            upstream.leave(self)
