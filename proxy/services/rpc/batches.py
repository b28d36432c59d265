"""The calls of one batch request, answered in order.

Every item is checked, priced and answered separately: a refused item gets a JSON-RPC error while the others run.

A reply is sent when all items are answered. A large one is sent in parts, if its client's connection is a `BatchSink`: an item
as soon as all before it are sent, and the item whose turn it is while it arrives. Other items are held until their turn, within
the bounds of the memory budget; beyond them an item is not read before its turn. An item of unknown length, or of a reply that
is sent whole, gets an error instead.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from proxy.core import jsonrpc
from proxy.core.jsonrpc import RawCall
from proxy.core.pricing import UNITS_OF_AN_ERROR
from proxy.core.usage import Outcome, outcome_of
from proxy.errors import BROKEN_REPLY, Fault, InternalError
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.held_body import FREE_BYTES, NO_ROOM, HeldBody, ReplyShare, slices
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.rpc_errors import rpc_error_of
from proxy.wire.upstream import Piece, UpstreamConnection

# Results up to this size are not counted: a whole batch of them is not large.
SMALL_BYTES = 1024


class BatchSink(Protocol):
    """A client's connection that takes a large reply in parts."""

    @property
    def is_stalled(self) -> bool: ...
    def on_batch_begin(self, batch: CallBatch) -> None: ...
    def on_batch_part(self, part: Piece) -> None: ...
    def on_batch_source(self, connection: UpstreamConnection | None) -> None: ...
    def on_batch_end(self, batch: CallBatch) -> None: ...
    def on_batch_broken(self) -> None: ...


class BatchItem:
    """One call of a batch, and its reply once that has arrived."""

    __slots__ = (
        "_body",
        "_counted",
        "_has_length",
        "_parts",
        "batch",
        "block",
        "cache",
        "failure",
        "fault",
        "flight",
        "id",
        "is_begun",
        "outcome",
        "params",
        "policy",
        "reply",
        "took_s",
        "units",
        "waited_s",
    )

    def __init__(self, batch: CallBatch, id_: bytes | None, params: bytes) -> None:
        self.batch = batch
        self.id = id_
        # Empty unless they are recorded.
        self.params = params
        self.policy: MethodPolicy | None = None
        self.flight: Flight | None = None
        self.units = 0
        self.cache = ""
        self.block = 0
        self.reply = b""
        self.fault: Fault | None = None
        # None until the item is answered. Then also the text of the error or the fault, and how long the item took.
        self.outcome: Outcome | None = None
        self.failure = ""
        self.took_s = 0.0
        # The part of it that the item waited for its account's rate limit.
        self.waited_s = 0.0
        # A large result while it arrives, whether its length was known and how much of it is counted, the parts that wait, and
        # whether some were sent already.
        self._body: HeldBody | None = None
        self._has_length = False
        self._counted = 0
        self._parts: deque[Piece] | None = None
        self.is_begun = False

    def __repr__(self) -> str:
        return f"<BatchItem {self.outcome or 'open'}>"

    @property
    def streams(self) -> bool:
        """A notification has no reply, so there is nothing to stream."""
        return bool(self.id)

    @property
    def size(self) -> int:
        """The bytes of its reply; of a large one, those of its result that have arrived."""
        return len(self.reply) or self._counted

    @property
    def reached(self) -> int:
        """A block that the state behind the result has reached; 0 if it is unknown."""
        return self.block if self.flight is None else self.flight.block

    @property
    def source(self) -> UpstreamConnection | None:
        """The upstream connection that a large result comes on."""
        return None if self._body is None else self._body.source

    def on_checked(self, policy: MethodPolicy) -> None:
        self.policy = policy

    def on_admitted(self, units: int) -> None:
        self.units = units

    def on_waited(self, waited_s: float) -> None:
        """The item has waited for its account's rate limit: until it was admitted or refused, or for further upstream calls."""
        self.waited_s += waited_s

    def on_source(self, cache: str, block: int) -> None:
        self.cache, self.block = cache, block

    def on_flight(self, flight: Flight) -> None:
        self.flight = flight

    def on_result(self, result: bytes | msgspec.Raw) -> None:
        if self.id:
            size = len(result)
            if size > SMALL_BYTES and (refusal := self._count(size) or self.batch.hold(size)) is not None:
                self._drop()
                self.on_error(refusal)
                return
            if size > FREE_BYTES:  # It is not copied: others may wait for the same one.
                self._parts = deque((jsonrpc.result_start(self.id), *slices(memoryview(result)), b"}"))
            else:
                self.reply = jsonrpc.result_reply(self.id, result)
        self._settle("results")

    def on_error(self, error: bytes) -> None:
        self.failure = error.decode("utf-8", "replace") if self.fault is None else self.fault.message
        if self.id:
            self.reply = jsonrpc.error_reply(self.id, error)
        self._settle("errors" if self.fault is None else outcome_of(self.fault))

    def on_fault(self, fault: Fault) -> None:
        self.refuse(fault, rpc_error_of(fault))

    def on_charged(self, units: int) -> bool:
        self.units += units
        self.batch.on_charged(units)
        return True

    def refuse(self, fault: Fault, error: bytes) -> None:
        """Like `on_fault`, with the error that the fault becomes: many items are refused for one reason."""
        self.fault = fault
        self.on_error(error)

    def on_refunded(self, units: int) -> None:
        """The item failed, and costs these units."""
        self.units = units

    def decline(self, why: bytes | Fault) -> None:
        """Answer the item without calling an upstream. A refusal is free."""
        if isinstance(why, Fault):
            self.on_fault(why)
        else:
            self.units = UNITS_OF_AN_ERROR
            self.on_error(why)

    # Large results, in pieces

    def on_stream(self, beginning: memoryview, left: int | None, connection: UpstreamConnection) -> None:
        assert self.id is not None
        body = self._body = HeldBody(self.batch.share, connection, self._on_no_room)
        body.parts.append(jsonrpc.result_start(self.id))
        self._parts = body.parts
        self._has_length = left is not None
        refusal = None if left is None else self._count(left)
        if refusal is None and self._makes_room(body, left):
            self.on_stream_piece(beginning)
        else:
            self._give_up(refusal or NO_ROOM)

    def _makes_room(self, body: HeldBody, size: int | None) -> bool:
        """Reserve room for the result, unless it can be passed on as it comes; or let it wait for room. False if there will be
        none."""
        batch = self.batch
        if size is not None and size > FREE_BYTES:
            batch.begin()
        return (size is not None and batch.passes_on(self)) or body.hold(size, may_wait=batch.sends_parts)

    def take_turn(self) -> None:
        """All items before this one are sent."""
        if self._body is not None:
            self._body.turn_came()

    def on_stream_piece(self, piece: Piece) -> None:
        body, batch, size = self._body, self.batch, len(piece)
        if body is None:
            return
        refusal = None if self._has_length else self._count(size)
        if self.is_begun and not self._parts:
            body.passed_on(size)
            batch.pass_on(piece)  # Beyond the bound too: a result that was begun can only be completed.
        elif refusal is None and body.add(piece):
            batch.begin_if_large()
            batch.flush()
        else:
            self._give_up(refusal or NO_ROOM)

    def _count(self, size: int) -> bytes | None:
        """Count bytes of the result. Returns an error if the whole reply becomes too large by them."""
        self._counted += size
        return self.batch.grow(size)

    def on_stream_end(self) -> None:
        self._end_body()
        self._settle("results")

    def on_stream_broken(self) -> None:
        self._break_off(InternalError(BROKEN_REPLY, reason="upstream"))

    def _on_no_room(self) -> None:
        self._give_up(NO_ROOM)

    def _give_up(self, error: bytes) -> None:
        """There is no room for the result."""
        flight, self.flight = self.flight, None
        if flight is not None:
            flight.leave(self)
        self._break_off(error)

    def _break_off(self, why: bytes | Fault) -> None:
        """The result will not be completed. If a part of it was sent, the whole reply ends here."""
        if self.is_begun:
            self._end_body()
            self.batch.break_off()
            return
        self._drop()
        if isinstance(why, Fault):
            self.on_fault(why)
        else:
            self.on_error(why)

    def leave(self) -> None:
        """The client is gone."""
        self._end_body()
        if self.flight is not None and not self.outcome:
            self.flight.leave(self)

    def _end_body(self) -> None:
        if self._body is not None:
            body, self._body = self._body, None
            body.end()

    def _drop(self) -> None:
        self.batch.grow(-self._counted)
        self._parts = None
        if self._body is not None:
            body, self._body = self._body, None
            body.drop()

    def pieces(self) -> list[Piece]:
        return [self.reply] if self.reply else list(self._parts or ())

    def held_parts(self) -> deque[Piece] | None:
        """The parts that wait, to be taken from the left. A whole reply is cut into slices."""
        if self.reply:
            self._parts = deque(slices(self.reply))
            self.reply = b""
        return self._parts

    def begin_sending(self) -> None:
        """A part of the reply is sent, so the rest of it must follow."""
        self.is_begun = True

    def _settle(self, outcome: Outcome) -> None:
        if not self.outcome:
            self.outcome = outcome
            self.took_s = time.monotonic() - self.batch.began
            self.batch.settled()


class BatchAdmitting(Protocol):
    """Reads, admits or sends the calls of a batch."""

    def leave(self) -> None: ...


class CallBatch:
    """The items of one request. `done` is called when all are answered, unless the reply was sent in parts to `sink`.

    Plain reads that an upstream answers together have no items: see `on_plain_replies`.
    """

    __slots__ = (
        "_admitting",
        "_block",
        "_body",
        "_done",
        "_has_begun",
        "_next",
        "_open",
        "_sink",
        "_size",
        "_streams",
        "answered_label",
        "began",
        "items",
        "plain",
        "share",
        "took_s",
        "units",
    )

    def __init__(
        self, done: Callable[[CallBatch], None], now: float, share: ReplyShare, sink: BatchSink | None = None
    ) -> None:
        self.items: list[BatchItem] = []
        self.units = 0
        self.began = now
        # The memory that it holds. The owner gives it back once the reply is sent.
        self.share = share
        # Plain reads that were answered together, their replies, how long they took, the name of the upstream, and a block that
        # the state behind the results has reached.
        self.plain: list[tuple[MethodPolicy, RawCall]] = []
        self._body = b""
        self.took_s = 0.0
        self.answered_label = ""
        self._block = 0
        # The object that reads and admits the items or sends the plain reads, until that is done.
        self._admitting: BatchAdmitting | None = None
        self._open = -1
        self._done = done
        self._sink = sink
        # Whether the reply is sent in parts, whether a part was sent, the item whose turn it is, and the bytes of all results.
        self._streams = False
        self._has_begun = False
        self._next = 0
        self._size = 0

    def __repr__(self) -> str:
        return f"<CallBatch of {len(self.items) or len(self.plain)}, {max(self._open, 0)} open>"

    def begin_admission(self, by: BatchAdmitting) -> None:
        self._admitting = by

    def end_admission(self) -> None:
        """All items are sent or answered."""
        self._admitting = None

    def add(self, id_: bytes | None, params: bytes = b"") -> BatchItem:
        """`params`: if they are recorded."""
        item = BatchItem(self, id_, params)
        self.items.append(item)
        return item

    def expect(self, count: int) -> None:
        """Set how many items are open. Refused items are settled already."""
        self._open = count
        if count == 0:
            self._done(self)

    def on_plain_replies(
        self, calls: list[tuple[MethodPolicy, RawCall]], body: bytes, took_s: float, block: int, label: str
    ) -> None:
        """The batch had plain reads only, and the upstream with this label has answered all of them."""
        self._admitting = None
        self.plain = calls
        self._body = body
        self.took_s = took_s
        self._block = block
        self.answered_label = label
        self._done(self)

    def on_charged(self, units: int) -> None:
        """Items were charged this much, or further upstream calls for them."""
        self.units += units

    def settled(self) -> None:
        if self._open > 0:
            self._open -= 1
            if self._streams:
                self.flush()
            elif self._open == 0:
                self._done(self)

    def pieces(self) -> list[Piece]:
        """The reply; empty if all items were notifications."""
        if self._body:
            return [self._body]
        if not any(item.pieces() for item in self.items if not item.reply):
            replies = [item.reply for item in self.items if item.reply]
            return [b"[%b]" % b",".join(replies)] if replies else []
        parts: list[Piece] = []
        for item in self.items:
            if pieces := item.pieces():
                parts += (b"," if parts else b"[", *pieces)
        return [*parts, b"]"] if parts else []

    def body(self) -> bytes:
        return b"".join(self.pieces())

    @property
    def reached(self) -> int:
        """A block that the state behind all results has reached; 0 if it is unknown."""
        return self._block or min([item.reached for item in self.items if item.reached], default=0)

    def leave(self) -> None:
        """The client is gone."""
        self._sink = None
        if self._admitting is not None:
            admitting, self._admitting = self._admitting, None
            admitting.leave()
        for item in self.items:
            item.leave()
        self.share.give_all()

    # Large replies

    def grow(self, size: int) -> bytes | None:
        """Count results. Returns an error if they are too large together."""
        self._size += size
        most = self.share.per_reply
        if self._size <= most:
            return None
        message = (
            f"the results of the batch exceed {most / (1 << 20):g} MiB: make this call alone or in a smaller batch"
        )
        return jsonrpc.error(jsonrpc.LIMIT_EXCEEDED, message)

    def hold(self, size: int) -> bytes | None:
        """Hold a result until its turn. Returns an error if there is no room for it."""
        if not self.share.take(size):
            return NO_ROOM
        self.begin_if_large()
        return None

    def begin_if_large(self) -> None:
        if self.share.is_large:
            self.begin()

    @property
    def sends_parts(self) -> bool:
        return self._sink is not None

    def passes_on(self, item: BatchItem) -> bool:
        """Whether it is the item's turn in a reply that is sent in parts."""
        return self._streams and self.items[self._next] is item

    def begin(self) -> None:
        """The reply is large: send it in parts from now on, if the client's connection takes them."""
        if self._sink is not None and not self._streams:
            self._streams = True
            self._sink.on_batch_begin(self)
            self.flush()

    def pass_on(self, piece: Piece) -> None:
        """Send a piece of the item whose turn it is."""
        if self._sink is not None:
            self._sink.on_batch_part(piece)

    def flush(self) -> None:
        """Send what can be sent now."""
        sink = self._sink
        while sink is not None and self._streams and self._next < len(self.items):
            item = self.items[self._next]
            item.take_turn()
            is_sent = self._send_held(item, sink)
            sink.on_batch_source(item.source)
            if not is_sent or not item.outcome:
                return
            self._next += 1
        if sink is not None and self._streams and self._open == 0:
            self._sink = None
            sink.on_batch_part(b"]")
            sink.on_batch_end(self)

    def _send_held(self, item: BatchItem, sink: BatchSink) -> bool:
        """Send the pieces of the item that are held. Returns whether the client takes more."""
        parts = item.held_parts()
        while parts and not sink.is_stalled:
            if not item.is_begun:
                sink.on_batch_part(b"," if self._has_begun else b"[")
                self._has_begun = True
                item.begin_sending()
            part = parts.popleft()
            sink.on_batch_part(part)
            self.share.give(len(part))
        return not sink.is_stalled

    def break_off(self) -> None:
        """The reply cannot be completed."""
        if self._sink is not None:
            self._sink.on_batch_broken()
