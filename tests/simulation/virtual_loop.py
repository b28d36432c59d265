"""An event loop in virtual time: when nothing is ready, the clock moves to the next timer."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from heapq import heapify, heappop, heappush
from typing import Any

from tests.simulation.memory_network import ArrivalLoop, Listening, MemoryNetwork, host_of_task
from tests.simulation.seams import Clock, UnconnectedSocket

# Turns of the loop between two collections of garbage: finalizers run at these moments and no others. Most garbage is young.
# All objects are looked at more rarely: the oracle keeps every call, and looking at all of them takes as long as many calls.
COLLECT_EVERY, COLLECT_ALL_EVERY = 20_000, 200_000
# A float of seconds is not exact below this.
TOGETHER_S = 1e-7


class Deadlock(Exception):
    """Nothing is ready, and nothing will ever be."""


class _Handle(asyncio.Handle):
    """A callback that is ready. Its base class looks for the loop's debug mode, which takes longer than the rest."""

    __slots__ = ()

    def __init__(self, callback: Any, args: Any, loop: VirtualLoop, context: Context | None) -> None:
        self._context = copy_context() if context is None else context
        self._callback, self._args, self._loop = callback, args, loop
        self._cancelled = False
        self._repr = self._source_traceback = None


class _Timer(asyncio.TimerHandle):
    """A callback in the loop's heap, likewise."""

    __slots__ = ()

    def __init__(self, when: float, callback: Any, args: Any, loop: VirtualLoop, context: Context | None) -> None:
        self._context = copy_context() if context is None else context
        self._callback, self._args, self._loop, self._when = callback, args, loop, when
        self._cancelled, self._scheduled = False, True
        self._repr = self._source_traceback = None

    def cancel(self) -> None:
        if not self._cancelled:
            if self._scheduled:
                self._loop.timer_cancelled()
            self._cancelled = True
            self._callback, self._args = None, ()


class VirtualLoop(ArrivalLoop):
    """Timers are kept in a heap of tuples: comparing those is much faster than comparing handles, and timers that are due at
    the same time run in the order in which they were set."""

    # Attributes of the base class.
    _ready: deque[_Handle | _Timer]
    _stopping: bool

    def __init__(self, clock: Clock, network: MemoryNetwork, rng: random.Random) -> None:
        super().__init__()
        self._clock, self._network, self._rng = clock, network, rng
        self._timers: list[tuple[float, int, _Timer]] = []
        self._set, self._cancelled = 0, 0
        self.turns = 0
        network.run_on(self)

    def __repr__(self) -> str:
        return f"<VirtualLoop at {self.time():.6f} with {len(self._timers)} timers>"

    def time(self) -> float:
        return self._clock.ns / 1e9

    # Timers

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        when = self._clock.ns / 1e9 + delay
        handle = _Timer(when, callback, args, self, context)
        self._set = number = self._set + 1
        heappush(self._timers, (when, number, handle))
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = _Timer(when, callback, args, self, context)
        self._set = number = self._set + 1
        heappush(self._timers, (when, number, handle))
        return handle

    def arrival(self, callback: Callable[[], None], context: Context) -> _Timer:
        return _Timer(0.0, callback, (), self, context)

    def arrives_at(self, when: float, arrival: _Timer) -> None:
        self._set += 1
        heappush(self._timers, (when, self._set, arrival))

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def timer_cancelled(self) -> None:
        """A timer that is in the heap was cancelled."""
        self._cancelled += 1
        if self._cancelled > 100 and 2 * self._cancelled > len(self._timers):
            self._timers = [each for each in self._timers if not each[2]._cancelled]
            heapify(self._timers)
            self._cancelled = 0

    def _run_once(self) -> None:
        """Turn until the loop is stopped, which the base class looks at after this: a call for each turn would take longer.

        A turn runs everything that is ready. If nothing is, the clock first moves to the next timer.
        """
        ready, clock = self._ready, self._clock
        popleft, append = ready.popleft, ready.append
        while True:
            self.turns += 1
            if not self.turns % COLLECT_EVERY:
                gc.collect(2 if self.turns % COLLECT_ALL_EVERY == 0 else 1)
            timers = self._timers
            if not ready and not self._stopping:
                while timers and timers[0][2]._cancelled:
                    heappop(timers)
                    self._cancelled -= 1
                if not timers:
                    raise Deadlock("nothing is scheduled, and the simulation has not ended")
                clock.move_to(timers[0][0])
            # Timers within TOGETHER_S of each other run together.
            end = clock.ns / 1e9 + TOGETHER_S
            while timers and timers[0][0] < end:
                timer = heappop(timers)[2]
                timer._scheduled = False
                if timer._cancelled:
                    self._cancelled -= 1
                else:
                    append(timer)
            for _ in range(len(ready)):
                handle = popleft()
                if not handle._cancelled:
                    try:
                        handle._context.run(handle._callback, *handle._args)
                    except (SystemExit, KeyboardInterrupt):
                        raise
                    except BaseException as exc:
                        self.call_exception_handler({"message": f"{handle!r} failed", "exception": exc})
            if self._stopping:
                return

    def _process_events(self, event_list: list[Any]) -> None: ...
    def _write_to_self(self) -> None: ...

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Do the work now, and report its result after a while: a thread could end at any time."""
        future = self.create_future()
        result: Any = None
        failure: Exception | None = None
        try:
            result = func(*args)
        except Exception as exc:
            failure = exc

        def report() -> None:
            if future.done():
                return
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)

        self.call_later(self._rng.uniform(1e-5, 5e-3), report)
        return future

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> Any:
        await asyncio.sleep(self._rng.uniform(1e-4, 0.05))
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port))]

    async def create_connection(self, factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:  # type: ignore[override]
        assert not options.get("ssl"), "TLS is not simulated"
        if (sock := options.get("sock")) is not None:
            assert isinstance(sock, UnconnectedSocket), "sockets of the kernel are not simulated"
            host, port = sock.address
        local = options.get("local_addr") or (host_of_task.get(), 0)
        transport = await self._network.connect(factory, (host, port), local[0])
        return transport, transport.get_protocol()

    async def create_server(self, factory: Any, host: Any = None, port: Any = None, **options: Any) -> Listening:  # type: ignore[override]
        sock = options.get("sock")
        return self._network.listen(factory, sock.getsockname() if sock is not None else (host, port))
