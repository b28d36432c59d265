"""What a client is told: the waiter's half of a connection on the hot path.

A call ends with a result, an error, a fault, or a large result in pieces; a batch with the replies of its items. Each becomes
bytes here (`hot.py` has their parts), leaves at the end of the turn, and makes way for the next request.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import msgspec

from proxy.core import jsonrpc
from proxy.core.limits import TOLERANCE_S
from proxy.errors import Fault, InternalError
from proxy.services.rpc.batches import CallBatch
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.short_batch import ShortBatch
from proxy.web.front.request_reader import RequestReading
from proxy.web.front.request_heads import RequestHead
from proxy.web.front.front_context import CACHE as _CACHE
from proxy.web.front.front_context import DIGITS as _DIGITS
from proxy.web.front.front_context import REPLY_LENGTHS as _REPLY_LENGTHS
from proxy.web.front.front_context import reply_length
from proxy.wire.connection import Piece, UpstreamConnection
from proxy.wire.write_buffer import DEFER_BELOW

if TYPE_CHECKING:
    from proxy.web.front.connection_limiter import ConnectionLimiter
    from proxy.web.front.front_context import FrontContext

_monotonic: Final = time.monotonic


class ReplyWriting(RequestReading):
    """One client connection and the request that is under way on it; how it is asked is its heir's."""

    __slots__ = ("batch", "cache", "chunked", "flight", "id", "policy", "units")

    def __init__(self, door: ConnectionLimiter, hot: FrontContext) -> None:
        super().__init__(door, hot)
        self.policy: MethodPolicy | None = None
        self.flight: Flight | None = None
        self.batch: CallBatch | ShortBatch | None = None
        self.id = b""
        self.units = 0
        self.cache = ""
        self.chunked = False

    def on_result(self, result: bytes | msgspec.Raw) -> None:
        self._count("results")
        policy = self.policy
        if policy is not None and self._is_usual(policy) and len(result) <= DEFER_BELOW:
            self.flight = None
            self._reply_shortly(result, policy, _monotonic())
            return
        self._finish(self._hot.result(self, result, _monotonic()) if self.id else self._hot.empty(self))

    def _is_usual(self, policy: MethodPolicy) -> bool:
        """Whether nothing but the reply itself is to be written: its price is the plan's, and the connection goes on."""
        is_whole = self.id and self.units == policy.units
        return bool(is_whole and not (self._ahead or self.left <= 1 or self._hot.careful))

    def _reply_shortly(self, result: bytes | msgspec.Raw, policy: MethodPolicy, now: float) -> None:
        """Write what `Hot.result` would, put together from the same parts with less ado."""
        hot = self._hot
        client: RequestHead = self._head  # type: ignore[assignment]
        key = client.key
        # As the bucket is now, and not as this call left it: others have taken from it since.
        edge = hot.windows.edge(key.slot)
        if edge < now - 1.0:
            edge = now - 1.0
        rate = key.requests_per_second
        held = int((now - edge + TOLERANCE_S) * rate)
        if held < 0:
            held = 0
        resets = int(edge + hot.resets)
        size = len(self.id) + len(result)
        request_id = client.request_id or hot.request_id()
        reply = (
            hot.ok_stamp,
            request_id,
            key.limit_line,
            _DIGITS[held if held < rate else rate] if held < 1024 else b"%d" % (held if held < rate else rate),
            hot.reset_lines.get(resets) or hot.reset_line(resets),
            policy.units_line,
            _CACHE[self.cache],
            _REPLY_LENGTHS[size] if size < 1024 else reply_length(size),
            self.id,
            b',"result":',
            result,
            b"}",
        )
        if hot.log is not None:
            hot.note(self, 200, request_id, now)
        self.left -= 1
        self.busy = False
        hot.write_buffer.write(self, b"".join(reply))

    def on_error(self, error: bytes) -> None:
        self._count("errors")
        self._finish(self._hot.error(self, error) if self.id else self._hot.empty(self))

    def on_fault(self, fault: Fault) -> None:
        self._give_back(fault)
        self._finish(self._hot.fault(self, fault))

    def _give_back(self, fault: Fault) -> None:
        """A fault costs nothing: it was refused before it was charged, or it is ours."""
        self._hot.rpc.refund(self.head.key, fault, 1, self.units)
        self.units = 0
        self._count("faults")

    def _on_batch(self, batch: CallBatch | ShortBatch) -> None:
        self.batch = None
        assert self._head is not None
        self.units = self._hot.rpc.settle_batch(self._head.key, batch)
        body = batch.body()
        self._finish(self._hot.ok(self, len(body)) + body if body else self._hot.empty(self))

    def on_stream(self, beginning: memoryview, left: int | None, connection: UpstreamConnection) -> None:
        """The beginning of a large result, under our own head. Without a length it goes out in chunks."""
        self._hot.write_buffer.flush()
        self.chunked = left is None
        start = jsonrpc.result_start(self.id)
        self._source = connection
        if self._stalled_since:
            connection.pause()
        head = self._hot.ok(self, None if left is None else left + len(start))
        if self.chunked:
            self._write(head)
            self.on_stream_piece(start + beginning)
        elif self.transport is not None:
            self.transport.writelines((head + start, beginning))

    def on_stream_piece(self, piece: Piece) -> None:
        self._write(b"%x\r\n%b\r\n" % (len(piece), bytes(piece)) if self.chunked else piece)

    def on_stream_end(self) -> None:
        # First: a write may call pause_writing, which must not pause a connection that was given back.
        self._source = None
        if self.chunked:
            self._write(b"0\r\n\r\n")
            self.chunked = False
        self._count("results")
        self._done()

    def on_stream_broken(self) -> None:
        """Half a reply is no reply: the client sees its connection break."""
        self._source = None
        self.chunked = False
        self._give_back(InternalError("the upstream's reply broke off"))
        if self.transport is not None:
            self.transport.abort()

    def _write_late(self, fault: Fault) -> None:
        self.policy = None
        self._write(self._hot.fault(self, fault))

    def _write(self, data: Piece) -> None:
        if self.transport is not None:
            self.transport.write(data)

    def _finish(self, reply: bytes) -> None:
        if self.transport is not None:
            if len(reply) < DEFER_BELOW:
                self._hot.write_buffer.write(self, reply)
            else:
                self._hot.write_buffer.write_at_once(self, reply)
        self._done()

    def _done(self) -> None:
        self.busy = False
        self.flight = None
        self.left -= 1
        if self.left <= 0 or self._hot.draining:
            self._close_after_reply()
        elif self._ahead or self._paused_reading:
            self._go_on()

    def _close_after_reply(self) -> None:
        # RFC 9112, 9.6: nothing is served behind the last reply, also where somebody is about to go on.
        self._ahead = b""
        self._hot.write_buffer.flush()
        if self.transport is not None:
            self.transport.close()

    def _count(self, outcome: str) -> None:
        if self.policy is not None:
            tally = self.head.key.sheet[self.policy.tally]
            tally.count(outcome, self.cache, self.units, _monotonic() - self._began)

    @property
    def streams(self) -> bool:
        """A notification has no reply, however large its result is."""
        return bool(self.id)

    @property
    def head(self) -> RequestHead:
        assert self._head is not None
        return self._head

    @property
    def began(self) -> float:
        return self._began
