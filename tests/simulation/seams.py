"""Everything through which the outside world reaches the program: clocks, randomness, the order of sets, the kernel.

The one seam for time is the `time` module, and for randomness `os.urandom`: both are replaced for good before the program is
imported, because many modules keep `time.monotonic` under a name of their own. So a process that simulates does nothing else.
"""

from __future__ import annotations

import copy
import fcntl
import gc
import itertools
import os
import random
import select
import sys
import termios
import time
from collections.abc import Iterable, Iterator, MutableSet
from contextvars import ContextVar
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

# Real CPU time, for the runner's figures only.
cpu_s = time.process_time
real_s = time.monotonic

# Each look at the clock takes this long. Code that works until a moment has come would never end otherwise.
TICK_NS = 2_000
# Histories begin here: late enough that no product code takes "60 s ago" for a negative time.
FIRST_NS = 1_000 * 10**9
EPOCH_NS = 1_750_000_000 * 10**9
# Simulated sockets have file descriptors from here on, which the kernel never gives out.
FIRST_FD = 1 << 24
# Sets whose order decides what happens next, and whose members are hashed by address. In these modules, `set` is ordered.
ORDERED_IN = (
    "asyncio.tasks",
    "asyncio.taskgroups",
    "aiohttp.web_protocol",
    "aiohttp.web_server",
    "proxy.services.accounts.quotas",
    "proxy.services.feed.head_watcher",
    "proxy.services.rpc.tracker",
    "proxy.web.websocket.client_sockets",
    "proxy.wire.websocket_client",
)
# Modules that look at the clock when something happens for the first time in a process, such as a metric with a new label. For
# them, looking takes no time: otherwise a second history in one process would differ from the first.
FREE_LOOKS = ("logging", "prometheus_client.metrics")
# Files that the program reads once, before it forks workers: `preload_files` in `proxy/compose/app.py`. They never change,
# and reading them takes as long as a hundred calls.
READ_ONCE = (
    "proxy.web.api_spec.load",
    "proxy.web.dashboard.static_files.shipped_files",
    "proxy.web.docs.pages.page_files",
)
# How far the wall clock of the current task's host is ahead of the true time.
skew_ns: ContextVar[int] = ContextVar("skew_ns", default=0)


class Clock:
    """Virtual time. It moves when the event loop has nothing to do, and a little whenever it is read."""

    def __init__(self) -> None:
        self.ns = FIRST_NS

    def __repr__(self) -> str:
        return f"<Clock {self.elapsed_s:.6f} s>"

    @property
    def elapsed_s(self) -> float:
        """Seconds since the history began. Looking at it takes no time."""
        return (self.ns - FIRST_NS) / 1e9

    def restart(self) -> None:
        self.ns = FIRST_NS

    def advance(self, seconds: float) -> None:
        self.ns += round(seconds * 1e9) + 1

    def move_to(self, seconds: float) -> None:
        """Move to a time of `monotonic`, if it is not past."""
        ns = round(seconds * 1e9)
        self.ns = (ns if ns > self.ns else self.ns) + 1

    def monotonic_ns(self) -> int:
        self.ns += TICK_NS
        return self.ns

    def monotonic(self) -> float:
        self.ns += TICK_NS
        return self.ns / 1e9

    def time_ns(self) -> int:
        return EPOCH_NS + self.monotonic_ns() + skew_ns.get()

    def time(self) -> float:
        return self.time_ns() / 1e9


class OrderedSet(MutableSet[T]):
    """A set that is iterated in the order of insertion."""

    __slots__ = ("_items",)

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._items = dict.fromkeys(items)

    def __repr__(self) -> str:
        return f"OrderedSet({[*self._items]})"

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def add(self, value: T) -> None:
        self._items[value] = None

    def discard(self, value: T) -> None:
        self._items.pop(value, None)


class SimulatedSocket(Protocol):
    """The questions about a connection that the program asks the kernel."""

    @property
    def unread(self) -> int: ...
    @property
    def peer_has_left(self) -> bool: ...


class Descriptors:
    """The connections behind simulated file descriptors."""

    def __init__(self) -> None:
        self._sockets: dict[int, SimulatedSocket] = {}

    def __repr__(self) -> str:
        return f"<Descriptors {len(self._sockets)} sockets>"

    def add(self, sock: SimulatedSocket) -> int:
        fd = FIRST_FD + len(self._sockets)
        self._sockets[fd] = sock
        return fd

    def clear(self) -> None:
        self._sockets.clear()

    def __getitem__(self, fd: int) -> SimulatedSocket:
        return self._sockets[fd]


class _Poll:
    """`select.poll`, for real and simulated descriptors."""

    def __init__(self, descriptors: Descriptors, real: Any) -> None:
        self._descriptors, self._real, self._simulated = descriptors, real, list[int]()

    def register(self, fd: int, *events: int) -> None:
        if fd >= FIRST_FD:
            self._simulated.append(fd)
        else:
            self._real.register(fd, *events)

    def unregister(self, fd: int) -> None:
        self._real.unregister(fd)

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        if not self._simulated:
            found: list[tuple[int, int]] = self._real.poll(timeout)
            return found
        return [(fd, select.POLLHUP) for fd in self._simulated if self._descriptors[fd].peer_has_left]


class _Serials:
    """The counters of the program's modules, as they were when the program was imported."""

    def __init__(self) -> None:
        self._found: list[tuple[dict[str, Any], str, Any]] = []
        self._caches: list[Any] = []

    def find(self) -> None:
        for module, names in [(name, vars(each)) for name, each in sys.modules.items()]:
            if module.partition(".")[0] == "proxy":
                for name, value in names.items():
                    if isinstance(getattr(value, "__self__", value), itertools.count):
                        self._found.append((names, name, value))
                    elif hasattr(value, "cache_clear") and f"{value.__module__}.{value.__name__}" not in READ_ONCE:
                        self._caches.append(value)

    def restart(self) -> None:
        """Every history counts from the same numbers. Names that share a counter still share it."""
        again: dict[int, Any] = {}
        for names, name, value in self._found:
            counter = getattr(value, "__self__", value)
            if id(counter) not in again:
                again[id(counter)] = copy.copy(counter)
            made = again[id(counter)]
            names[name] = made if value is counter else made.__next__
        for each in self._caches:
            each.cache_clear()


class Seams:
    """The replaced parts of this process."""

    def __init__(self, clock: Clock, descriptors: Descriptors, entropy: random.Random) -> None:
        self.clock, self.descriptors, self._entropy = clock, descriptors, entropy
        self._serials = _Serials()
        self._generators: list[random.Random] = []

    def __repr__(self) -> str:
        return f"<Seams at {self.clock!r}>"

    def imported(self) -> None:
        """The program is imported: its sets get an order. A module's own name `set` is found before the builtin."""
        for name in ORDERED_IN:
            vars(import_module(name))["set"] = OrderedSet
        free = SimpleNamespace(**{**vars(time), "time": lambda: (EPOCH_NS + self.clock.ns) / 1e9})
        for name in FREE_LOOKS:
            vars(import_module(name))["time"] = free
        vars(import_module("aiohappyeyeballs"))["start_connection"] = _unconnected
        # The masks of frames come from a generator that aiohttp made when it was imported.
        defaults = import_module("aiohttp.http_websocket").WebSocketWriter.__init__.__kwdefaults__.values()
        self._generators = [each for each in defaults if isinstance(each, random.Random)]
        assert self._generators, "aiohttp masks frames in another way"
        self._serials.find()

    def begin(self, seed: int) -> None:
        """Start a history: whatever ran before has used the clock and random numbers."""
        self.clock.restart()
        self.descriptors.clear()
        self._serials.restart()
        random.seed(f"module {seed}")
        self._entropy.seed(f"entropy {seed}")
        for each in self._generators:
            each.seed(f"frames {seed}")


class UnconnectedSocket:
    """Stands for the socket that aiohttp's client hands to the loop, which connects it."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address

    def __repr__(self) -> str:
        return f"<UnconnectedSocket to {self.address}>"


async def _unconnected(addr_infos: Any, **_: Any) -> UnconnectedSocket:
    """Takes the place of `aiohappyeyeballs.start_connection`, which opens sockets of the kernel."""
    return UnconnectedSocket(addr_infos[0][4][:2])


def install() -> Seams:
    """Replace clocks, randomness and questions to the kernel in this process, for good."""
    assert not any(name.partition(".")[0] == "proxy" for name in sys.modules), "the program is imported already"
    assert os.environ.get("PYTHONHASHSEED", "random") != "random", "hashes of strings would differ from run to run"
    clock, descriptors, entropy = Clock(), Descriptors(), random.Random(0)
    replaced: dict[str, Any] = {
        "monotonic": clock.monotonic,
        "monotonic_ns": clock.monotonic_ns,
        "perf_counter": clock.monotonic,
        "perf_counter_ns": clock.monotonic_ns,
        "time": clock.time,
        "time_ns": clock.time_ns,
    }
    vars(time).update(replaced)
    # `secrets`, `uuid` and `SystemRandom` all end here.
    vars(os)["urandom"] = vars(random)["_urandom"] = entropy.randbytes
    _replace_kernel(descriptors)
    # Finalizers then run at fixed moments: see `VirtualLoop`.
    gc.disable()
    return Seams(clock, descriptors, entropy)


def _replace_kernel(descriptors: Descriptors) -> None:
    ioctl, poll = fcntl.ioctl, select.poll

    def simulated_ioctl(fd: Any, request: int, *args: Any) -> Any:
        if not isinstance(fd, int) or fd < FIRST_FD:
            return ioctl(fd, request, *args)
        assert request == termios.TIOCOUTQ, f"not simulated: ioctl {request}"
        return descriptors[fd].unread.to_bytes(4, sys.byteorder)

    vars(fcntl)["ioctl"] = simulated_ioctl
    vars(select)["poll"] = lambda: _Poll(descriptors, poll())
