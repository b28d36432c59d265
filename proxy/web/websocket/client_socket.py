"""One WebSocket, from its handshake to its close: messages in, frames out, and a bound on everything that waits.

*Reading.* Messages are read while fewer than `max_in_flight` calls are under way, the messages of these have fewer bytes than
`max_message_bytes`, and the client reads its replies. Otherwise messages stay in the client's own buffers. A large message is
read in several turns, and waits while its account is at its limit (`large_messages.py`). A socket whose client leaves too many
bytes of replies unread is closed. While a socket is not read, it is polled for whether its client has left.

*Writing.* Frames sent in one turn of the event loop leave in one write (`socket_output.py`).

*Events* are sent directly unless the client does not read or its key has no units left (`backlog.py`).

*Closing.* A close frame is sent, and the transport is closed when the client has answered it, or after a deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from proxy import telemetry
from proxy.chains.registry import Network
from proxy.core.access import Key
from proxy.core.directives import Directives
from proxy.turn_queue import SLICE_S
from proxy.web.front.connection_limiter import has_left
from proxy.web.websocket import frames
from proxy.web.websocket.faulty_subscription import SocketFault
from proxy.web.websocket.frames import FrameReader, ProtocolViolation, frame
from proxy.web.websocket.socket_calls import SocketCalls
from proxy.web.websocket.socket_context import SocketContext, SocketTerms
from proxy.web.websocket.socket_output import SocketOutput
from proxy.web.websocket.subscriptions import Subscription, Subscriptions
from proxy.web.websocket.unit_allowance import UnitAllowance

# Frames that are read from one socket in a turn, whether or not they complete a message.
FRAMES_PER_TURN = 16
# The same for the bytes of messages: a compressed message may become a thousand times as large.
BYTES_PER_TURN = 65_536
# How long a client that has read everything may take to answer a close frame.
CLOSE_REPLY_S = 1.0
# How long a client may take to decompress the last messages. RFC 6455, 5.5.1: after both close frames the server "MUST close
# the underlying TCP connection immediately".
DECOMPRESS_S = 0.2
# How long a client may take to read the frames before the close frame, and to answer it.
CLOSE_READ_S = 10.0
_PING = frame(b"", frames.PING)
_monotonic = time.monotonic


def _subscriptions_of(directives: Directives | None) -> Callable[..., Subscription]:
    """Creates the subscriptions of a socket: faulty ones if its fault plan says so."""
    plan = None if directives is None else directives.fault
    return Subscription if plan is None or not plan.spoils_events else SocketFault(plan).subscription


class ClientSocket(asyncio.Protocol):
    __slots__ = (
        "_address",
        "_close_sent_at",
        "_close_when_answered",
        "_ignores_input",
        "_message_since",
        "_on_lost",
        "_paused_reading",
        "_reader",
        "_reads_soon",
        "_silent_rounds",
        "_unsent",
        "calls",
        "context",
        "output",
        "subscriptions",
    )

    def __init__(
        self,
        context: SocketContext,
        transport: asyncio.Transport,
        allowance: UnitAllowance,
        terms: SocketTerms,
        *,
        address: str,
        on_lost: Callable[[ClientSocket, str], None],
    ) -> None:
        """`on_lost` is called with the socket and its address when the connection is lost."""
        self.context = context
        self._address = address
        self._on_lost = on_lost
        self._reader = FrameReader(context.limits.max_message_bytes, inflates=terms.window_bits > 0)
        # When the first byte of an incomplete message came; 0.0 between messages.
        self._message_since = 0.0
        self._paused_reading = False
        # Whether reading is scheduled for the next turn.
        self._reads_soon = False
        # Set after a protocol violation: nothing after it can be parsed.
        self._ignores_input = False
        # Rounds of pings without a byte from the client.
        self._silent_rounds = 0
        # Unread bytes at the last check of a client that does not read.
        self._unsent = 0
        self._close_sent_at = 0.0
        self._close_when_answered: tuple[int, str] | None = None
        self.output = self._new_output(transport, terms)
        self.subscriptions = Subscriptions(
            context,
            self.output,
            allowance,
            network=terms.route.network.id,
            on_slow=self._close_unread_events,
            make=_subscriptions_of(terms.directives),
        )
        self.calls = SocketCalls(context, self.output, self.subscriptions, terms, on_answered=self._on_answered)

    def _new_output(self, transport: asyncio.Transport, terms: SocketTerms) -> SocketOutput:
        context = self.context
        return SocketOutput(
            context.queue,
            transport,
            max_unread=context.limits.max_unread_bytes,
            on_overflow=self._close_unread_replies,
            in_turn=partial(context.limiter.turns.add, terms.key.account.id),
            compress_from=context.limits.compress_from,
            window_bits=terms.window_bits,
        )

    def __repr__(self) -> str:
        state = "closed" if self.transport is None else "open" if self.is_open else "closing"
        return f"<ClientSocket {state}, {len(self.calls)} calls, {len(self.subscriptions)} subscriptions>"

    @property
    def transport(self) -> asyncio.Transport | None:
        return self.output.transport

    @property
    def key(self) -> Key:
        return self.calls.key

    @property
    def network(self) -> Network:
        return self.calls.route.network

    def use_key(self, successor: Key) -> None:
        self.calls.key = successor

    @property
    def is_open(self) -> bool:
        return self.output.is_open

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait here for the client, without those in the kernel."""
        backlog = self.subscriptions.backlog
        return self.output.unread_bytes + (backlog.size if backlog is not None else 0)

    # Called by the transport

    def data_received(self, data: bytes) -> None:
        self._silent_rounds = 0
        if self._ignores_input:
            self._pause_reading()
            self._read_soon()
        else:
            self._reader.feed(data)
            self._read()

    def eof_received(self) -> None:
        """The transport closes itself."""

    def connection_lost(self, exc: Exception | None) -> None:
        self.output.lose()
        self._drop_work()
        self._on_lost(self, self._address)

    def pause_writing(self) -> None:
        """The client does not read."""
        self.output.stalled_since = self.context.now()
        self.subscriptions.hold()
        self.context.limiter.deadline_runs(self)

    def resume_writing(self) -> None:
        self.output.resume()
        if self.subscriptions.backlog is not None:
            self.subscriptions.backlog.send()
        self._read_soon()

    # Reading

    def _read(self) -> None:
        """Read messages as long as there is room for their replies."""
        left, began = BYTES_PER_TURN, _monotonic()
        try:
            for _ in range(FRAMES_PER_TURN):
                if self._is_busy() or self._is_postponed():
                    self._pause_reading()
                    return
                message = self._reader.take()
                if message is None:
                    self._wait_for_more()
                    return
                self._on_message(*message)
                left -= len(message[1])
                if left <= 0 or (self._reader.has_arrived and _monotonic() - began > SLICE_S):
                    break
        except ProtocolViolation as exc:
            self._ignores_input = True
            self.close(exc.code, exc.reason)
            return
        if self._reader.is_in_message:
            self._start_message_clock()
        self._pause_reading()
        self._read_soon()

    def _is_busy(self) -> bool:
        if self._close_sent_at:
            return False
        limits = self.context.limits
        return (
            len(self.calls) >= limits.max_in_flight
            or self.calls.bytes_under_way >= limits.max_message_bytes
            or self.output.is_stalled
            or self._close_when_answered is not None
        )

    def _is_postponed(self) -> bool:
        """Whether a large message has arrived that has to wait. It is read later by `_read_soon`."""
        if not self._reader.is_large:
            return False
        self._message_since = 0.0
        return self.context.large_messages.must_wait(self.key.account.id, self._read_soon)

    def _on_message(self, opcode: int, payload: bytes) -> None:
        if opcode == frames.CLOSE:
            code = frames.close_code(payload)
            is_behind = self._may_be_decompressing()
            self.close(code, "")
            if is_behind:
                self.context.loop.call_later(DECOMPRESS_S, self.output.shut)
            else:
                self.output.shut()
        elif self._close_sent_at:
            return
        elif opcode == frames.TEXT:
            self._message_since = 0.0
            self.calls.serve(payload)
        elif opcode == frames.PING:
            self.output.send(frame(payload, frames.PONG))

    def _may_be_decompressing(self) -> bool:
        """Whether the client may not have processed our last messages yet. Node's own client decompresses in the background: if
        the connection ends meanwhile, it reports a failure (1006)."""
        return self.output.window_bits > 0 and self.context.now() - self.output.deflated_at < DECOMPRESS_S

    def _wait_for_more(self) -> None:
        """Wait for more bytes. Inside a message, a deadline runs from its first byte on; between messages there is none."""
        self._resume_reading()
        if self._reader.is_between:
            self._message_since = 0.0
        else:
            self._start_message_clock()

    def _start_message_clock(self) -> None:
        if not self._message_since:
            self._message_since = self.context.now()
            self.context.limiter.deadline_runs(self)

    def _pause_reading(self) -> None:
        if not self._paused_reading and self.transport is not None:
            self._paused_reading = True
            self.transport.pause_reading()
            self.context.limiter.deadline_runs(self)

    def _resume_reading(self) -> None:
        if self._paused_reading and self.transport is not None:
            self._paused_reading = False
            self.transport.resume_reading()

    def _read_soon(self) -> None:
        """Read on in the next turn, if reading was paused and there is room now."""
        if self._paused_reading and not self._reads_soon and not self._is_busy():
            self._reads_soon = True
            self.context.limiter.turns.add(self.key.account.id, self._read_now)

    def _read_now(self) -> bool:
        self._reads_soon = False
        if self._ignores_input:
            self._resume_reading()
        elif self.transport is not None:
            self._read()
        return False

    def _on_answered(self) -> None:
        if self._close_when_answered is not None and not self.calls:
            self.close(*self._close_when_answered)
        else:
            self._read_soon()

    def ping(self) -> None:
        """Send one ping. The socket is closed if its client sent nothing in `silent_rounds` rounds."""
        if self._silent_rounds >= self.context.silent_rounds:
            self.close(frames.POLICY, "no reply to pings")
            return
        if not self._paused_reading:
            self._silent_rounds += 1
        self.output.send(_PING)

    # Closing

    def _close_unread_replies(self) -> None:
        self.close(frames.TRY_LATER, "slow reader: too many unread replies; send fewer calls at a time")

    def _close_unread_events(self) -> None:
        self.close(frames.TRY_LATER, "slow reader: the event queue is full; subscribe again with fromBlock")

    def close_after_replies(self, code: int, reason: str) -> None:
        """Read no more messages, and close once the calls under way are answered."""
        if self.calls and not self._close_sent_at:
            self._close_when_answered = (code, reason)
        else:
            self.close(code, reason)

    def close(self, code: int, reason: str) -> None:
        if not self.is_open:
            return
        self._close_sent_at = self.context.now()
        self.output.is_closing = True
        self._drop_work()
        self.output.send(frames.close_frame(code, reason))
        telemetry.sockets_closed_total.labels(str(code) if code < 3000 else "other").inc()
        # Read on up to the client's own close frame: closing with unread bytes would reset the connection, and the client
        # might never see the reason.
        self._resume_reading()
        self.context.limiter.deadline_runs(self)

    def _drop_work(self) -> None:
        """Leave the calls under way and end all subscriptions."""
        self.calls.leave()
        self.subscriptions.close()

    # Called by the connection limiter

    def check(self, now: float) -> None:
        """Enforce the deadline that runs, if any."""
        output, limiter = self.output, self.context.limiter
        if self._close_sent_at:
            self._check_close(now)
        elif self._paused_reading and self.transport is not None and has_left(self.transport):
            self.transport.abort()
        elif output.stalled_since:
            output.stalled_since, self._unsent = limiter.watch_reader(self, now, output.stalled_since, self._unsent)
        elif not self._message_since:
            if not self._paused_reading:
                limiter.deadline_ended(self)
        elif now - self._message_since > limiter.limits.body_timeout_s and not self._is_busy():
            self.close(frames.POLICY, "the message did not arrive in time")

    def _check_close(self, now: float) -> None:
        transport = self.transport
        if transport is None:
            return
        waited_s = now - self._close_sent_at
        if waited_s > CLOSE_READ_S:
            transport.abort()
        elif waited_s > CLOSE_REPLY_S and not self.output.unread_bytes:
            transport.close()

    def close_if_quiet(self, now: float, quiet_s: float) -> None:
        """Do nothing: pings find clients that are gone, and `ClientSockets.drain` closes sockets."""

    def force_close(self) -> None:
        self.close(frames.RESTART, "service restart")
        self.output.shut()
