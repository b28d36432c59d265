"""Connections in memory, with everything that goes wrong on real ones.

A connection is two *pipes*, one for each direction. Bytes wait at the sender until the receiver's window has room, travel in
segments of random size with random latency, and wait at the receiver until its protocol reads. Segments of one pipe keep their
order; those of different connections overtake each other. A connection may be refused, stay unanswered, be reset at any
segment, or *freeze*: it then looks open to both ends and carries nothing any more, as if a host had lost power.

Hosts can be cut off from each other, in one direction or both. What is sent meanwhile arrives when the cut is mended, as with
TCP's retransmissions, unless one end gave up before.

Several hosts run in one process. `host_of_task` says which one a task or callback belongs to: a connection is opened from that
host, and callbacks of a transport run in the context in which it was opened or in which its server listens.

Transports keep asyncio's contract: data and ends arrive in a later turn of the loop, `connection_lost` is called once and last,
and unread bytes fill the window of the sender, whose `pause_writing` is then called.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from typing import Any

from tests.simulation.history import History
from tests.simulation.seams import Descriptors

Address = tuple[str, int]

MAX_READ = 262_144
HIGH_WATER = 65_536
# A connection attempt without an answer ends after this time at the latest, as with a real kernel.
CONNECT_GIVES_UP_S = 120.0
WINDOWS = (4_096, 65_536, 1 << 20)

# The address of the host that the current task belongs to.
host_of_task: ContextVar[str] = ContextVar("host_of_task", default="10.0.0.1")


@dataclass(frozen=True, slots=True)
class Weather:
    """Faults of connections, as probabilities for each connection or segment."""

    latency_s: tuple[float, float] = (0.0001, 0.003)
    split: float = 0.0
    stall: float = 0.0
    stall_s: tuple[float, float] = (0.05, 1.5)
    reset: float = 0.0
    refuse: float = 0.0
    silent: float = 0.0
    freeze: float = 0.0


CALM = Weather()


class Sky:
    """The weather of one address, which may change: connections look at it for every segment."""

    __slots__ = ("weather",)

    def __init__(self) -> None:
        self.weather = CALM

    def __repr__(self) -> str:
        return f"<Sky {self.weather}>"


class ArrivalLoop(asyncio.BaseEventLoop):
    """An event loop on which segments arrive."""

    def arrival(self, callback: Callable[[], None], context: Context) -> asyncio.TimerHandle:
        """A callback that is due many times: see `arrives_at`."""
        raise NotImplementedError

    def arrives_at(self, when: float, arrival: Any) -> None:
        """Like `call_at`, without a handle for each time. It cannot be cancelled."""
        raise NotImplementedError


class Listening(asyncio.AbstractServer):
    def __init__(self, network: MemoryNetwork, address: Address) -> None:
        self._network, self._address = network, address

    def close(self) -> None:
        self._network.stop_listening(self._address)

    async def wait_closed(self) -> None: ...

    def is_serving(self) -> bool:
        return True

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._network.loop

    async def start_serving(self) -> None: ...

    async def serve_forever(self) -> None: ...


class ListeningSocket:
    """Takes the place of the listening socket that a worker is given."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def getsockname(self) -> Address:
        return self._address


class MemoryNetwork:
    def __init__(self, history: History, descriptors: Descriptors, rng: random.Random) -> None:
        self.history, self.descriptors, self.rng = history, descriptors, rng
        self._servers: dict[Address, tuple[Callable[[], asyncio.BaseProtocol], Context]] = {}
        self._skies: dict[Address, Sky] = {}
        self._count = 0
        # When a connection to each address last met a fault.
        self._faults: dict[Address, float] = {}
        # For each direction that is cut, from host to host: what happens when it is mended.
        self.cuts: dict[tuple[str, str], list[Callable[[], object]]] = {}
        self._loop: ArrivalLoop | None = None

    def __repr__(self) -> str:
        return f"<MemoryNetwork {self._count} connections, {len(self._servers)} servers>"

    @property
    def loop(self) -> ArrivalLoop:
        assert self._loop is not None
        return self._loop

    def run_on(self, loop: ArrivalLoop) -> None:
        self._loop = loop

    def fault(self, address: Address, who: str, kind: str) -> None:
        self._faults[address] = self.history.now_s
        self.history.fault(who, kind)

    def last_fault_s(self, address: Address) -> float:
        return self._faults.get(address, -1e9)

    def set_weather(self, address: Address, weather: Weather) -> None:
        """For connections to this address, in both directions, from now on."""
        self.sky(address).weather = weather

    def sky(self, address: Address) -> Sky:
        return self._skies.setdefault(address, Sky())

    def listen(self, factory: Callable[[], asyncio.BaseProtocol], address: Address) -> Listening:
        self._servers[address] = factory, copy_context()
        return Listening(self, address)

    def stop_listening(self, address: Address) -> None:
        self._servers.pop(address, None)

    # Cuts

    def cut(self, one: str, other: str) -> None:
        """Nothing that one host sends reaches the other."""
        self.cuts.setdefault((one, other), [])

    def mend(self, one: str, other: str) -> None:
        for arrive in self.cuts.pop((one, other), ()):
            arrive()

    def mend_all(self) -> None:
        for pair in [*self.cuts]:
            self.mend(*pair)

    def is_cut(self, one: str, other: str) -> bool:
        return (one, other) in self.cuts

    def has_cuts(self, host: str) -> bool:
        """Whether the host is cut off from any other."""
        return any(host in pair for pair in self.cuts)

    def when_mended(self, one: str, other: str, arrive: Callable[[], object]) -> None:
        self.cuts[one, other].append(arrive)

    async def _until_mended(self, one: str, other: str) -> None:
        """Attempts to connect are repeated, as the kernel does."""
        for pair in ((one, other), (other, one)):
            while pair in self.cuts:
                mended = asyncio.Event()
                self.when_mended(*pair, mended.set)
                await mended.wait()

    async def connect(
        self, factory: Callable[[], asyncio.BaseProtocol], address: Address, local: str
    ) -> MemoryTransport:
        weather, rng = self.sky(address).weather, self.rng
        self._count += 1
        number, name = self._count, f"{local}>{address[0]}#{self._count}"
        await asyncio.sleep(rng.uniform(*weather.latency_s))
        if rng.random() < weather.silent:
            self.fault(address, name, "connection unanswered")
            await asyncio.sleep(CONNECT_GIVES_UP_S)
            raise TimeoutError("no answer")
        if self.cuts:
            async with asyncio.timeout(CONNECT_GIVES_UP_S):
                await self._until_mended(local, address[0])
        server = self._servers.get(address)
        if server is None or rng.random() < weather.refuse:
            self.fault(address, name, "connection refused")
            raise ConnectionRefusedError(f"nothing listens at {address}")
        here = (local, 20_000 + number)
        ours = MemoryTransport(self, f"{name}.c", factory(), here, address, copy_context())
        context = server[1].copy()
        theirs = MemoryTransport(self, f"{name}.s", context.run(server[0]), address, here, context)
        _Pipe.between(ours, theirs, address)
        _Pipe.between(theirs, ours, address)
        self.history.wire(name, "open")
        context.run(theirs.begin)
        ours.begin()
        return ours


class _Pipe:
    """One direction of a connection. None in a queue is the end of the stream."""

    sender: MemoryTransport
    receiver: MemoryTransport
    _arrival: asyncio.TimerHandle

    def __init__(self, net: MemoryNetwork, server: Address) -> None:
        self._net, self._server, self._sky = net, server, net.sky(server)
        self._rng, self._loop = net.rng, net.loop
        self._window = net.rng.choice(WINDOWS)
        # Bytes that the window has no room for, segments that travel, and segments that the receiver has not read.
        self._waiting: deque[bytes] = deque()
        self.waiting_bytes = 0
        self._flight: deque[bytes | None] = deque()
        self.arrived: deque[bytes | None] = deque()
        # Bytes that were sent and that the receiver has not read.
        self.unread = 0
        self._last_at = 0.0
        # Whether no more bytes will be written, and whether the receiver was sent that.
        self._ends = self._has_ended = False
        self._is_frozen = False

    @classmethod
    def between(cls, sender: MemoryTransport, receiver: MemoryTransport, server: Address) -> None:
        pipe = cls(sender.network, server)
        pipe.connect(sender, receiver)
        sender.outgoing = receiver.incoming = pipe

    def connect(self, sender: MemoryTransport, receiver: MemoryTransport) -> None:
        self.sender, self.receiver = sender, receiver
        self._arrival = self._loop.arrival(self._arrive, receiver.context)

    def write(self, data: bytes) -> None:
        size = len(data)
        if self._waiting or size > self._window - self.unread:
            self._waiting.append(data)
            self.waiting_bytes += size
            self.send()
            return
        # The same as in `send`, for data that the window has room for: most.
        split = self._sky.weather.split
        if size > 1 and split and self._rng.random() < split:
            first = self._rng.randint(1, size)
            data, rest = data[:first], data[first:]
            self.unread += first
            self._launch(data)
            if rest:
                self._waiting.append(rest)
                self.waiting_bytes += len(rest)
                self.send()
        else:
            self.unread += size
            self._launch(data)

    def end(self) -> None:
        """No more bytes will follow."""
        self._ends = True
        self.send()

    @property
    def is_flushed(self) -> bool:
        """Whether everything was handed to the kernel."""
        return not self._waiting

    def send(self) -> None:
        """Put into flight what the window has room for."""
        rng, split, waiting = self._rng, self._sky.weather.split, self._waiting
        # A window that is almost full is left alone: otherwise it would stay so, and the segments would be tiny.
        while waiting and (room := self._window - self.unread) >= min(self._window // 2, self.waiting_bytes):
            data = waiting.popleft()
            size = min(room, len(data))
            if size > 1 and split and rng.random() < split:
                size = rng.randint(1, size)
            if size < len(data):
                waiting.appendleft(data[size:])
                data = data[:size]
            self.waiting_bytes -= size
            self.unread += size
            self._launch(data)
        if self._ends and not self._has_ended and not waiting:
            self._has_ended = True
            self._launch(None)
        self.sender.flushed()

    def _launch(self, segment: bytes | None) -> None:
        rng, weather, loop = self._rng, self._sky.weather, self._loop
        shortest_s, longest_s = weather.latency_s
        delay_s = shortest_s + (longest_s - shortest_s) * rng.random()
        if weather.stall and rng.random() < weather.stall:
            self._net.fault(self._server, self.sender.name, "segment stalled")
            delay_s += rng.uniform(*weather.stall_s)
        earliest, at = self._last_at + 1e-6, loop.time() + delay_s
        self._last_at = at = at if at > earliest else earliest
        self._flight.append(segment)
        loop.arrives_at(at, self._arrival)

    def _arrive(self) -> None:
        if not self._flight or self._is_frozen:
            return
        if self._net.cuts and self._net.is_cut(self.sender.host, self.receiver.host):
            self._when_mended(self._arrive)
            return
        segment = self._flight.popleft()
        if segment is not None and self._is_struck():
            return
        receiver = self.receiver
        if receiver.is_deaf:
            if segment is not None:
                self.sender.fail()  # The kernel answers data for a closed socket with a reset.
        elif segment is None or self.arrived or not receiver.reads_at_once(segment):
            self.arrived.append(segment)
            receiver.readable()
        else:
            receiver.receive(segment)

    def _is_struck(self) -> bool:
        """Whether the connection broke under this segment."""
        weather = self._sky.weather
        if not weather.reset and not weather.freeze:
            return False
        draw = self._rng.random()
        if draw < weather.reset:
            self._net.fault(self._server, self.sender.name, "connection reset")
            self.receiver.fail()
            self.sender.fail()
            return True
        if draw < weather.reset + weather.freeze:
            self._net.fault(self._server, self.sender.name, "connection frozen")
            self.freeze()
            self.receiver.outgoing.freeze()
            return True
        return False

    def freeze(self) -> None:
        self._is_frozen = True

    def reset(self) -> None:
        """The sender aborts: what travels is lost, and the receiver sees a reset a little later."""
        self._flight.clear()
        self._drop_waiting()
        if self._is_frozen:
            return
        if self._net.is_cut(self.sender.host, self.receiver.host):
            self._when_mended(self.receiver.fail)
        else:
            self._net.loop.call_later(self._net.rng.uniform(*self._sky.weather.latency_s), self.receiver.fail)

    def _when_mended(self, arrive: Callable[[], None]) -> None:
        self._net.when_mended(
            self.sender.host,
            self.receiver.host,
            lambda: self._net.loop.call_soon(arrive, context=self.receiver.context),
        )

    def _drop_waiting(self) -> None:
        self._waiting.clear()
        self.waiting_bytes = 0

    def take(self, most: int) -> bytes:
        """Return the bytes of one read of the receiver."""
        if len(self.arrived) == 1 and (first := self.arrived[0]) is not None and len(first) <= most:
            self.arrived.clear()
            return first
        parts, size = [], 0
        while self.arrived and self.arrived[0] is not None and size < most:
            part = self.arrived.popleft()
            assert part is not None
            if size + len(part) > most:
                self.arrived.appendleft(part[most - size :])
                part = part[: most - size]
            parts.append(part)
            size += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def acknowledge(self, size: int) -> None:
        self.unread -= size
        if self._waiting:
            self.send()


class _Socket:
    family = type = proto = 0

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def setsockopt(self, *_: int) -> None: ...


class MemoryTransport(asyncio.Transport):
    """One end of a connection."""

    outgoing: _Pipe
    incoming: _Pipe

    def __init__(
        self, network: MemoryNetwork, name: str, protocol: Any, here: Address, there: Address, context: Context
    ) -> None:
        super().__init__({"sockname": here, "peername": there, "socket": _Socket(network.descriptors.add(self))})
        self.network, self.name, self.host, self.context = network, name, here[0], context
        self._protocol = protocol
        self._high, self._low = HIGH_WATER, HIGH_WATER // 4
        self._reading, self._reads_soon, self._paused = True, False, False
        self._closing = self._half_closed = self._lost = False

    def __repr__(self) -> str:
        state = "lost" if self._lost else "closing" if self._closing else "open"
        return f"<MemoryTransport {self.name} {state}>"

    def begin(self) -> None:
        self._protocol.connection_made(self)

    # For protocols

    def get_protocol(self) -> Any:
        return self._protocol

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        if not self._reading and not self._closing:
            self._reading = True
            self.read_soon()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = HIGH_WATER if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def get_write_buffer_size(self) -> int:
        return self.outgoing.waiting_bytes

    def write(self, data: Any) -> None:
        if self._closing or self._half_closed or not data:
            return
        self.outgoing.write(bytes(data))
        if self.outgoing.waiting_bytes > self._high and not self._paused:
            self._paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._half_closed = True
        self.outgoing.end()

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        if any(segment is not None for segment in self.incoming.arrived):
            self._abort()  # As the kernel does if received data was not read.
            return
        self.outgoing.end()
        self.flushed()

    def abort(self) -> None:
        if not self._lost:
            self._closing = True
            self._abort()

    def _abort(self) -> None:
        self.outgoing.reset()
        self._lose(None)

    # For servers

    @property
    def asker(self) -> tuple[str, int]:
        """The host at the other end, and the port at this one."""
        return self.get_extra_info("peername")[0], self.get_extra_info("sockname")[1]

    @property
    def is_read(self) -> bool:
        """Whether the other end has read everything that was written here."""
        return not self.outgoing.unread and self.outgoing.is_flushed

    # For the kernel's part: see `SimulatedSocket`

    @property
    def unread(self) -> int:
        return self.outgoing.unread

    @property
    def peer_has_left(self) -> bool:
        return self._lost or None in self.incoming.arrived

    # For pipes

    @property
    def is_deaf(self) -> bool:
        return self._closing

    def flushed(self) -> None:
        """More of what was written has left."""
        pipe = self.outgoing
        if self._closing and pipe.is_flushed:
            self._lose(None)
        elif self._paused and pipe.waiting_bytes <= self._low and not self._lost:
            self._paused = False
            self.network.loop.call_soon(self._resume_writing, context=self.context)

    def _resume_writing(self) -> None:
        if not self._lost and not self._paused:
            self._protocol.resume_writing()

    def reads_at_once(self, segment: bytes) -> bool:
        """Whether one read takes the segment as it is: most do."""
        if not self._reading or self._reads_soon or len(segment) > MAX_READ:
            return False
        return not isinstance(self._protocol, asyncio.BufferedProtocol)

    def receive(self, segment: bytes) -> None:
        """The same as `_read`, for a segment that is the only one."""
        self.network.history.wire(self.name, "data", segment)
        self._protocol.data_received(segment)
        self.incoming.acknowledge(len(segment))
        self.read_soon()

    def readable(self) -> None:
        """A segment has arrived in this turn of the loop, which reads it if nothing else waits to be read."""
        if self._reading and not self._reads_soon:
            self._read()

    def read_soon(self) -> None:
        if self.incoming.arrived and self._reading and not self._reads_soon and not self._closing:
            self._reads_soon = True
            self.network.loop.call_soon(self._read, context=self.context)

    def _read(self) -> None:
        """One read, as the loop makes it when a socket is readable: what has arrived, up to a limit."""
        self._reads_soon = False
        arrived = self.incoming.arrived
        if not self._reading or self._closing or not arrived:
            return
        if arrived[0] is None:
            arrived.popleft()
            self.network.history.wire(self.name, "end")
            if not self._protocol.eof_received():
                self.close()
            return
        size = self._hand_over()
        self.incoming.acknowledge(size)
        self.read_soon()

    def _hand_over(self) -> int:
        protocol = self._protocol
        buffer: Any = protocol.get_buffer(-1) if isinstance(protocol, asyncio.BufferedProtocol) else None
        data = self.incoming.take(MAX_READ if buffer is None else len(buffer))
        self.network.history.wire(self.name, "data", data)
        if buffer is None:
            protocol.data_received(data)
        else:
            buffer[: len(data)] = data
            protocol.buffer_updated(len(data))
        return len(data)

    def fail(self) -> None:
        """The connection was reset."""
        if not self._lost:
            self._closing = True
            self.incoming.arrived.clear()
            self._lose(ConnectionResetError("connection reset by peer"))

    def _lose(self, exc: Exception | None) -> None:
        if not self._lost:
            self._lost = True
            self.network.loop.call_soon(self._report_loss, exc, context=self.context)

    def _report_loss(self, exc: Exception | None) -> None:
        self.network.history.wire(self.name, "lost" if exc is None else "failed")
        self._protocol.connection_lost(exc)
