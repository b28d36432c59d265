"""Several calls in one request to an upstream: a JSON-RPC batch of ours.

A convoy carries flights; when its reply comes, each flight gets its own part and goes on by itself, as if it had been sent
alone. Where the reply is not what a batch should be, the flights are sent again one by one, elsewhere if they can. An
upstream that refuses the batch as such is sent smaller ones for a while, and in the end none.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from proxy.core import dialect, jsonrpc
from proxy.wire.http1 import ReplyHead
from proxy.wire.upstream import OUT_OF_STEP, TOO_LARGE, Piece, Upstream, UpstreamConnection

if TYPE_CHECKING:
    from proxy.services.rpc.flights import Flight


class UpstreamBatch:
    __slots__ = ("_began", "_flights")

    def __init__(self, flights: Sequence[Flight], *, began: float = 0.0) -> None:
        self._flights = flights
        self._began = began

    def __repr__(self) -> str:
        return f"<UpstreamBatch of {len(self._flights)}>"

    def send(self, upstream: Upstream, now: float) -> None:
        self._began = now
        parts: list[bytes] = []
        for flight in self._flights:
            flight.carried_by(upstream, now)
            parts += (b",", jsonrpc.HEAD, flight.id, flight.policy.request_tail, flight.params, b"}")
        parts[0] = b"["
        parts.append(b"]")
        upstream.submit(self, *parts)

    def on_reply(self, connection: UpstreamConnection, head: ReplyHead, body: bytes) -> None:
        upstream = connection.upstream
        now = time.monotonic()
        if head.wants_rest:
            for flight in self._still_carried(upstream):
                flight.was_limited(upstream, now, head.retry_after_s)
            return
        if _is_refused(head, body):
            upstream.refused_batch(len(self._flights), now)
            for flight in self._still_carried(upstream):
                flight.arrived(upstream)
                flight.send(upstream, now)
            return
        try:
            if head.status != 200 or not head.plain:
                raise ValueError("no good reply")
            replies = jsonrpc.read_replies(body)
        except ValueError:
            if head.status < 400:
                connection.fail(OUT_OF_STEP)
            self._answered_otherwise(upstream, is_refused=head.status >= 400)
            return
        took = now - self._began
        for flight in self._still_carried(upstream):
            reply = replies.get(flight.id)
            if reply is None:
                flight.on_fail(upstream, "an upstream left a call unanswered", sent=True)
            else:
                flight.arrived(upstream)
                flight.receive(reply, upstream, now, took)

    def _answered_otherwise(self, upstream: Upstream, *, is_refused: bool) -> None:
        """What refuses one request may be about what is in it: who answers the first call decides that."""
        for place, flight in enumerate(self._still_carried(upstream)):
            if is_refused and not place:
                flight.accuse(upstream)
            blame = not is_refused and not place
            flight.on_fail(upstream, "an upstream answered a batch with something else", sent=True, blame=blame)

    def _still_carried(self, upstream: Upstream) -> list[Flight]:
        """Those that have not landed elsewhere meanwhile."""
        return [flight for flight in self._flights if not flight.done and flight.is_carried_by(upstream)]

    def on_fail(self, upstream: Upstream, reason: str, *, sent: bool) -> None:
        """One request failed, and its upstream once, however many calls were in it. Not where only all results together are too
        large."""
        for place, flight in enumerate(self._still_carried(upstream)):
            flight.on_fail(upstream, reason, sent=sent, blame=not place and reason != TOO_LARGE)

    def on_tick(self, connection: UpstreamConnection | None, now: float) -> None:
        for flight in self._flights:
            flight.on_tick(connection, now)
        if connection is not None and all(flight.done for flight in self._flights):
            connection.leave(self)

    def on_large(self, connection: UpstreamConnection, head: ReplyHead, beginning: Piece) -> bool:
        return False

    def on_piece(self, connection: UpstreamConnection, piece: Piece) -> None: ...
    def on_end(self, connection: UpstreamConnection) -> None: ...


def _is_refused(head: ReplyHead, body: bytes) -> bool:
    """One error for all calls: the upstream takes no batches, or none of this size. What is its own trouble is no refusal."""
    if head.status >= 500 or not head.plain or body[:1] != b"{":
        return False
    try:
        error = jsonrpc.read_any_reply(body).error
    except jsonrpc.NOT_JSON:
        return False
    return bool(error) and not dialect.classify(bytes(error)).blame
