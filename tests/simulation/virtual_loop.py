"""An event loop in virtual time: when nothing is ready, the clock moves to the next timer."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
from collections.abc import Callable
from typing import Any

from tests.simulation.memory_network import Listening, MemoryNetwork
from tests.simulation.seams import Clock

# Turns of the loop between two collections of garbage: finalizers run at these moments and no others.
COLLECT_EVERY = 20_000


class Deadlock(Exception):
    """Nothing is ready, and nothing will ever be."""


class _Selector:
    """Takes the place of the selector: waiting for events moves the clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.turns = 0

    def select(self, timeout: float | None) -> list[Any]:
        self.turns += 1
        if self.turns % COLLECT_EVERY == 0:
            gc.collect()
        if timeout is None:
            raise Deadlock("nothing is scheduled, and the simulation has not ended")
        if timeout > 0:
            self._clock.advance(timeout)
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    def __init__(self, clock: Clock, network: MemoryNetwork, rng: random.Random) -> None:
        super().__init__()
        self._clock, self._network, self._rng = clock, network, rng
        self._selector = _Selector(clock)
        # Timers that are due within this time run together. A float of seconds is not exact below it.
        self._clock_resolution = 1e-7
        network.run_on(self)

    @property
    def turns(self) -> int:
        return self._selector.turns

    def time(self) -> float:
        return self._clock.ns / 1e9

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
        assert not options.get("sock"), "sockets that are connected already are not simulated"
        local = options.get("local_addr") or ("10.0.0.1", 0)
        transport = await self._network.connect(factory, (host, port), local[0])
        return transport, transport.get_protocol()

    async def create_server(self, factory: Any, host: Any = None, port: Any = None, **options: Any) -> Listening:  # type: ignore[override]
        sock = options.get("sock")
        return self._network.listen(factory, sock.getsockname() if sock is not None else (host, port))
