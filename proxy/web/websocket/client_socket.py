"""One WebSocket, from its handshake to its close: messages in, frames out, and a bound on everything that waits.

*Reading.* Messages are taken one by one while fewer than the allowed number is under way and the client takes what it is sent;
otherwise they stay where they are, at last in the client's own buffers. Who reads none of the answers that are under way by
then is closed when they are too many bytes.

*Writing.* What is sent in one turn of the loop leaves in one write: the frames wait in `pending` until the
room writes them out.

*Holding.* Events go straight out unless the client does not read or its key has no units left: see `held.py`.

*Closing.* A close frame is sent, and the transport is closed when the client has answered it, or has had time to.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from proxy.core.access import Key
from proxy.services.feed.topics import FeedEvent
from proxy.services.rpc.networks import Route
from proxy.web.websocket import frames, socket_calls
from proxy.web.websocket.backlog import Backlog
from proxy.web.websocket.frames import FrameReader, ProtocolViolation, frame
from proxy.web.websocket.subscriptions import Subscription, Subscriptions

if TYPE_CHECKING:
    from proxy.web.websocket.client_sockets import ClientSockets
    from proxy.web.websocket.unit_allowance import UnitAllowance

# Messages taken before others have their turn.
MOST_IN_A_TURN = 64
# How long a client may take to answer a close frame; and to take what was written before it, where there is such.
ANSWER_S = 1.0
TAKE_S = 10.0
_PING = frame(b"", frames.PING)


class ClientSocket(asyncio.Protocol):
    __slots__ = (
        "_address", "_backlog", "_close_sent_at", "_close_when_answered", "_is_deaf", "_paused_reading", "_reader",
        "_since", "_stalled_since", "_unsent", "calls", "fd", "held", "is_straight", "key", "limits", "opened_at",
        "pending", "purse", "request_id", "room", "route", "silent", "subscriptions", "transport",
    )  # fmt: skip

    def __init__(
        self,
        room: ClientSockets,
        transport: asyncio.Transport,
        *,
        address: str,
        route: Route,
        key: Key,
        request_id: str,
    ) -> None:
        self.room = room
        self.limits = room.limits
        self.transport: asyncio.Transport | None = transport
        self.route = route
        self.key = key
        self.purse: UnitAllowance = room.purse_of(key)
        self.request_id = request_id
        self.opened_at = room.now()
        self._address = address
        self._reader = FrameReader(room.limits.max_message_bytes)
        # Since when a message is half there.
        self._since = 0.0
        self._paused_reading = False
        self._backlog = False
        # After a broken rule nothing more is understood.
        self._is_deaf = False
        # Rounds of pings without a byte from the client.
        self.silent = 0
        self.calls: set[socket_calls.SocketCall | socket_calls.SocketBatch] = set()
        self.subscriptions = Subscriptions(self)
        # Whether the transport holds nothing of ours: then frames are written past it. Its descriptor is good until it is lost.
        self.is_straight = False
        self.fd = transport.get_extra_info("socket").fileno()
        # What leaves at the end of the turn.
        self.pending: bytes | list[bytes] | None = None
        # Events that cannot go out now; None while they can.
        self.held: Backlog | None = None
        self._stalled_since = 0.0
        self._unsent = 0
        self._close_sent_at = 0.0
        self._close_when_answered: tuple[int, str] | None = None

    def __repr__(self) -> str:
        state = "closed" if self.transport is None else "closing" if self._close_sent_at else "open"
        return f"<ClientSocket {state}, {len(self.calls)} calls, {len(self.subscriptions)} subscriptions>"

    @property
    def is_open(self) -> bool:
        return self.transport is not None and not self._close_sent_at

    @property
    def is_stalled(self) -> bool:
        """Whether the client does not take what it is sent."""
        return self._stalled_since > 0

    @property
    def waiting_bytes(self) -> int:
        """All that the client has not taken yet, as far as it is here and not the kernel's."""
        unsent = self.transport.get_write_buffer_size() if self.transport is not None else 0
        return unsent + (self.held.size if self.held is not None else 0)

    # What the transport calls

    def data_received(self, data: bytes) -> None:
        self.silent = 0
        if not self._is_deaf:
            self._reader.feed(data)
            self._read()

    def eof_received(self) -> None:
        """The transport closes itself."""

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.is_straight = False
        self._let_go()
        self.room.left(self, self._address)

    def pause_writing(self) -> None:
        """The client does not take what it is sent."""
        self._stalled_since = self.room.now()
        self._hold()
        self.room.watch_clock(self)

    def resume_writing(self) -> None:
        self._stalled_since = 0.0
        if self.held is not None:
            self.held.pump()
        self._go_on()

    # Reading

    def _read(self) -> None:
        """Take what is there, as long as there is room for its answers."""
        try:
            for _ in range(MOST_IN_A_TURN):
                if self._is_busy():
                    self._pause_reading()
                    return
                message = self._reader.take()
                if message is None:
                    self._wait_for_more()
                    return
                self._on_message(*message)
        except ProtocolViolation as exc:
            self._is_deaf = True
            self.close(exc.code, exc.reason)
            return
        self._pause_reading()
        self._go_on()

    def _is_busy(self) -> bool:
        if self._close_sent_at:
            return False
        return (
            len(self.calls) >= self.limits.max_in_flight
            or self._stalled_since > 0
            or self._close_when_answered is not None
        )

    def _on_message(self, opcode: int, payload: bytes) -> None:
        if opcode == frames.CLOSE:
            code = frames.close_code(payload)
            self.close(code, "")
            self._shut()
        elif self._close_sent_at:
            return
        elif opcode == frames.TEXT:
            self._since = 0.0
            socket_calls.answer(self, payload)
        elif opcode == frames.PING:
            self.send(frame(payload, frames.PONG))

    def _wait_for_more(self) -> None:
        """Between two messages no clock runs; inside one it does, from its first byte on."""
        self._resume_reading()
        if self._reader.is_between:
            self._since = 0.0
        elif not self._since:
            self._since = self.room.now()
            self.room.watch_clock(self)

    def _pause_reading(self) -> None:
        if not self._paused_reading and self.transport is not None:
            self._paused_reading = True
            self.transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._paused_reading and self.transport is not None:
            self._paused_reading = False
            self.transport.resume_reading()

    def _go_on(self) -> None:
        """There may be room for messages that wait."""
        if self._paused_reading and not self._backlog and not self._is_busy():
            self._backlog = True
            self.room.loop.call_soon(self._again)

    def _again(self) -> None:
        self._backlog = False
        if self.transport is not None:
            self._read()

    def answered(
        self,
        call: socket_calls.SocketCall | socket_calls.SocketBatch,
        method: str,
        *,
        outcome: str,
        units: int,
        took_s: float,
    ) -> None:
        """A message has had its answer."""
        self.calls.discard(call)
        self.room.note(self, method, outcome=outcome, units=units, took_s=took_s)
        if self._close_when_answered is not None and not self.calls:
            self.close(*self._close_when_answered)
        else:
            self._go_on()

    # Writing

    def send(self, data: bytes) -> None:
        """At the end of the turn, together with what else it brings."""
        pending = self.pending
        if pending is None:
            self.pending = data
            if not self.room.dirty:
                self.room.arm()
            self.room.dirty.append(self)
        elif isinstance(pending, list):
            pending.append(data)
        else:
            self.pending = [pending, data]

    def write_out(self) -> None:
        """Past the transport where it holds nothing: that saves a microsecond for each message, a seventh of all it costs."""
        data, self.pending = self.pending, None
        if data is None or self.transport is None:
            return
        if isinstance(data, list):
            data = b"".join(data)
        if self.is_straight or not self.transport.get_write_buffer_size():
            self.is_straight = True
            try:
                data = data[os.write(self.fd, data) :]
            except OSError:  # It takes nothing now; or it is broken, and the transport will find out.
                pass
        if data:
            self.write_later(data)

    def write_later(self, data: bytes) -> None:
        """What the client does not take at once is the transport's."""
        self.is_straight = False
        if self.transport is None:
            return
        unread = self.transport.get_write_buffer_size()
        if unread and unread + len(data) > self.limits.max_unread_bytes and not self._close_sent_at:
            self.close(frames.TRY_LATER, "slow reader: too many bytes of answers wait; ask for less at a time")
        else:
            self.transport.write(data)

    def ping(self) -> None:
        """One round. A client that was not heard of in all the rounds it has is gone."""
        if self.silent >= self.room.silent_rounds:
            self.close(frames.POLICY, "no answer to a ping")
            return
        if not self._paused_reading:
            self.silent += 1
        self.send(_PING)

    # Holding

    def hold(self, made: Subscription, events: Sequence[FeedEvent]) -> None:
        """Events that cannot go out now."""
        self._hold().keep(made, events)

    def _hold(self) -> Backlog:
        if self.held is None:
            self.held = Backlog(self)
        return self.held

    # Closing

    def close_slow(self) -> None:
        self.close(frames.TRY_LATER, "slow reader: the queue of events is full; subscribe again with fromBlock")

    def close_after_answers(self, code: int, reason: str) -> None:
        """No more messages are taken; those under way are answered first."""
        if self.calls and not self._close_sent_at:
            self._close_when_answered = (code, reason)
        else:
            self.close(code, reason)

    def close(self, code: int, reason: str) -> None:
        if self._close_sent_at or self.transport is None:
            return
        self._close_sent_at = self.room.now()
        self._let_go()
        self.send(frames.close_frame(code, reason))
        self.room.closing(self, code)
        # What the client still says is read, up to its own close frame: to close upon unread bytes would reset the
        # connection, and the client might never see why.
        self._resume_reading()
        self.room.watch_clock(self)

    def _shut(self) -> None:
        self.write_out()
        self.is_straight = False
        if self.transport is not None:
            self.transport.close()

    def _let_go(self) -> None:
        """Whatever is under way for this client is nobody's."""
        calls, self.calls = self.calls, set()
        for call in calls:
            call.leave()
        self.subscriptions.close()
        if self.held is not None:
            self.held.close()

    # What the door asks

    def check(self, now: float) -> None:
        """Called by the sweep while a clock runs."""
        if self._close_sent_at:
            self._check_close(now)
        elif self._stalled_since:
            self._stalled_since, self._unsent = self.room.watch_reader(self, now, self._stalled_since, self._unsent)
        elif not self._since:
            self.room.stop_clock(self)
        elif now - self._since > self.room.message_timeout_s and not self._paused_reading:
            self.close(frames.POLICY, "the message did not arrive in time")

    def _check_close(self, now: float) -> None:
        transport = self.transport
        if transport is None:
            return
        waited_s = now - self._close_sent_at
        if waited_s > TAKE_S:
            transport.abort()
        elif waited_s > ANSWER_S and not transport.get_write_buffer_size():
            transport.close()

    def close_if_quiet(self, now: float, quiet_s: float) -> None:
        """Pings tell who is gone, and a drain closes sockets by itself."""

    def force_close(self) -> None:
        self.close(frames.RESTART, "service restart")
        self._shut()
