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
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from proxy.core import jsonrpc
from proxy.core.jsonrpc import MalformedCall, RawCall
from proxy.core.usage import KeyTallies
from proxy.errors import BROKEN_REPLY, Fault, InternalError
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.reply_share import FREE_BYTES, NO_ROOM, ReplyShare
from proxy.services.rpc.rpc_errors import rpc_error_of
from proxy.wire.upstream import Piece, UpstreamConnection

# Results up to this size are not counted: a whole batch of them is not large.
SMALL_BYTES = 1024
# Held replies are written in slices, so that a client that does not read is noticed, and others have their turns in between.
SLICE_BYTES = 65_536
# The price of a request that is answered with an error for its own mistake.
UNITS_OF_AN_ERROR = 1


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
        "batch", "block", "cache", "connection", "counted", "failure", "fault", "flight", "has_length", "id", "is_begun",
        "is_waiting", "parts", "policy", "reply", "reserved", "settled", "took_s", "units", "waited_s",
    )  # fmt: skip

    def __init__(self, batch: CallBatch, id_: bytes | None) -> None:
        self.batch = batch
        self.id = id_
        self.policy: MethodPolicy | None = None
        self.flight: Flight | None = None
        self.units = 0
        self.cache = ""
        self.block = 0
        self.reply = b""
        self.fault: Fault | None = None
        # The text of the error or the fault, and how long the item took.
        self.failure = ""
        self.took_s = 0.0
        # The part of it that the item waited for its account's rate limit.
        self.waited_s = 0.0
        self.settled = False
        # A large result: the upstream connection that it comes on, whether its length was known and how much of it is counted,
        # the parts that wait, and whether some were sent already.
        self.connection: UpstreamConnection | None = None
        self.has_length = False
        self.counted = 0
        self.parts: deque[Piece] | None = None
        self.is_begun = False
        # The bytes that are still to come and have their room; and whether the result waits unread for room or its turn.
        self.reserved = 0
        self.is_waiting = False

    @property
    def streams(self) -> bool:
        """A notification has no reply, so there is nothing to stream."""
        return bool(self.id)

    @property
    def reached(self) -> int:
        """A block that the state behind the result has reached; 0 if it is unknown."""
        return self.block if self.flight is None else self.flight.block

    def on_checked(self, policy: MethodPolicy) -> None:
        self.policy = policy

    def on_admitted(self, units: int) -> None:
        self.units = units

    def on_waited(self, waited_s: float) -> None:
        """The item was admitted or refused after waiting for its account's rate limit."""
        self.waited_s = waited_s

    def on_source(self, cache: str, block: int) -> None:
        self.cache, self.block = cache, block

    def on_flight(self, flight: Flight) -> None:
        self.flight = flight

    def on_result(self, result: bytes | msgspec.Raw) -> None:
        if self.id:
            size = len(result)
            if size > SMALL_BYTES and (refusal := self._count(size) or self.batch.hold(size)) is not None:
                self._drop_parts()
                self.on_error(refusal)
                return
            self.reply = jsonrpc.result_reply(self.id, result)
        self._settle("results")

    def on_error(self, error: bytes) -> None:
        self.failure = error.decode("utf-8", "replace") if self.fault is None else self.fault.message
        if self.id:
            self.reply = jsonrpc.error_reply(self.id, error)
        self._settle("errors" if self.fault is None else "faults")

    def on_fault(self, fault: Fault) -> None:
        self.fault = fault
        self.on_error(rpc_error_of(fault))

    def on_charged(self, units: int) -> bool:
        self.units += units
        self.batch.on_charged(units)
        return True

    def refuse(self, fault: Fault, error: bytes) -> None:
        """Like `on_fault`, with the error that the fault becomes: many items are refused for one reason."""
        self.fault = fault
        self.on_error(error)

    def keep(self, units: int) -> None:
        """The item failed, and costs these units."""
        self.units = units
        if units and self.policy is not None:
            self.batch.tallies[self.policy.tally].add_units(units)

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
        self.connection = connection
        self.has_length = left is not None
        self.parts = deque([jsonrpc.result_start(self.id)])
        refusal = None
        if left is not None:
            refusal = self._count(left) or self._make_room(left, connection)
        if refusal is not None:
            self._give_up(refusal)
        elif self.is_waiting:
            self.batch.share.take_anyway(len(beginning))
            self.parts.append(bytes(beginning))
        else:
            self.on_stream_piece(beginning)

    def _make_room(self, size: int, connection: UpstreamConnection) -> bytes | None:
        """Reserve room for the result, unless it can be passed on as it comes; or wait for room. Returns an error if there
        will be none."""
        batch = self.batch
        if size > FREE_BYTES:
            batch.begin()
        if batch.passes_on(self):
            return None
        if batch.share.reserve(size):
            self.reserved = size
            return None
        if not batch.sends_parts:
            return NO_ROOM
        self.is_waiting = True
        connection.when_stalled(self._on_stalled)
        connection.pause()
        batch.share.wait(self._take_room)
        return None

    def _take_room(self) -> bool:
        size = self.connection.bytes_left if self.connection is not None else 0
        if not self.batch.share.take(size):
            return False
        self.reserved = size
        self._read_on()
        return True

    def stop_waiting(self) -> None:
        """It is the item's turn, or it is given up."""
        if self.is_waiting:
            self.batch.share.forget(self._take_room)
            self._read_on()

    def _read_on(self) -> None:
        self.is_waiting = False
        if self.connection is not None:
            self.connection.when_stalled(None)
            self.connection.resume()

    def _on_stalled(self) -> None:
        self.stop_waiting()
        self._give_up(NO_ROOM)

    def on_stream_piece(self, piece: Piece) -> None:
        refusal = None if self.has_length else self._count(len(piece))
        size = len(piece)
        reserved = min(size, self.reserved)
        self.reserved -= reserved
        if self.is_begun and not self.parts:
            self.batch.share.give(reserved)
            self.batch.pass_on(piece)  # Beyond the bound too: a result that was begun can only be completed.
            return
        refusal = refusal or self.batch.hold(size - reserved)
        if refusal is None:
            assert self.parts is not None
            self.parts.append(bytes(piece))
            self.batch.flush()
        else:
            self._give_up(refusal)

    def _count(self, size: int) -> bytes | None:
        """Count bytes of the result. Returns an error if the whole reply becomes too large by them."""
        self.counted += size
        return self.batch.grow(size)

    def on_stream_end(self) -> None:
        self.connection = None
        self._settle("results")

    def on_stream_broken(self) -> None:
        self.stop_waiting()
        self.connection = None
        if self.is_begun:
            self.batch.break_off()
        else:
            self._drop_parts()
            self.on_fault(InternalError(BROKEN_REPLY))

    def _give_up(self, error: bytes) -> None:
        """There is no room for the result. If a part of it was sent, the whole reply ends here."""
        self.stop_waiting()
        self.connection = None
        flight, self.flight = self.flight, None
        if flight is not None:
            flight.leave(self)
        if self.is_begun:
            self.batch.break_off()
        else:
            self._drop_parts()
            self.on_error(error)

    def _drop_parts(self) -> None:
        self.batch.grow(-self.counted)
        self.batch.share.give(sum(map(len, self.parts or ())) + self.reserved)
        self.reserved = 0
        self.parts = None

    def pieces(self) -> list[Piece]:
        return [self.reply] if self.reply else list(self.parts or ())

    def held_parts(self) -> deque[Piece] | None:
        """The parts that wait, to be taken from the left. A whole reply is cut into slices."""
        if self.reply:
            self.parts = deque(slices(self.reply))
            self.reply = b""
        return self.parts

    def begin_sending(self) -> None:
        """A part of the reply is sent, so the rest of it must follow."""
        self.is_begun = True

    def _settle(self, outcome: str) -> None:
        if self.settled:
            return
        self.settled = True
        self.took_s = time.monotonic() - self.batch.began
        if self.policy is not None:
            units = self.units if self.fault is None else 0
            self.batch.tallies[self.policy.tally].count(outcome, self.cache, units, self.took_s - self.waited_s)
        self.batch.settled()


class CallBatch:
    """The items of one request. `done` is called when all are answered, unless the reply was sent in parts to `sink`."""

    __slots__ = (
        "_done", "_has_begun", "_next", "_open", "_sink", "_size", "_streams", "began", "items", "share", "tallies", "units",
    )  # fmt: skip

    def __init__(
        self,
        calls: Sequence[RawCall | MalformedCall],
        done: Callable[[CallBatch], None],
        now: float,
        tallies: KeyTallies,
        share: ReplyShare,
        sink: BatchSink | None = None,
    ) -> None:
        self.items: list[BatchItem] = []
        for call in calls:
            self.add(call)
        self.units = 0
        self.began = now
        # The tallies that its items are counted in.
        self.tallies = tallies
        # The memory that it holds. The owner gives it back once the reply is sent.
        self.share = share
        self._open = -1
        self._done = done
        self._sink = sink
        # Whether the reply is sent in parts, whether a part was sent, the item whose turn it is, and the bytes of all results.
        self._streams = False
        self._has_begun = False
        self._next = 0
        self._size = 0

    def __repr__(self) -> str:
        return f"<CallBatch of {len(self.items)}, {max(self._open, 0)} open>"

    def add(self, call: RawCall | MalformedCall) -> BatchItem:
        item = BatchItem(self, call.id if isinstance(call, MalformedCall) else call[2])
        self.items.append(item)
        return item

    def expect(self, count: int) -> None:
        """Set how many items are open. Refused items are settled already."""
        self._open = count
        if count == 0:
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
        if not any(item.parts for item in self.items):
            replies = [item.reply for item in self.items if item.reply]
            return [b"[%b]" % b",".join(replies)] if replies else []
        found: list[Piece] = []
        for item in self.items:
            if pieces := item.pieces():
                found += (b"," if found else b"[", *pieces)
        return [*found, b"]"] if found else []

    def body(self) -> bytes:
        return b"".join(self.pieces())

    @property
    def reached(self) -> int:
        """A block that the state behind all results has reached; 0 if it is unknown."""
        return min([item.reached for item in self.items if item.reached], default=0)

    def failed(self) -> list[BatchItem]:
        return [item for item in self.items if item.fault is not None]

    def leave(self) -> None:
        self._sink = None
        for item in self.items:
            item.stop_waiting()
            if item.flight is not None and not item.settled:
                item.flight.leave(item)
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
        """Hold a result, or a piece of one, until its turn. Returns an error if there is no room for it."""
        if not self.share.take(size):
            return NO_ROOM
        if self.share.is_large:
            self.begin()
        return None

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
            item.stop_waiting()
            is_sent = self._send_held(item, sink)
            sink.on_batch_source(item.connection)
            if not is_sent or not item.settled:
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


def slices(reply: Piece) -> list[Piece]:
    if len(reply) <= SLICE_BYTES:
        return [reply]
    view = memoryview(reply)
    return [view[at : at + SLICE_BYTES] for at in range(0, len(reply), SLICE_BYTES)]
