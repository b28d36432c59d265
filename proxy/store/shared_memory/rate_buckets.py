"""Rate-limit buckets of all accounts and keys, shared by the worker processes of one host.

The memory is an anonymous file that the supervisor creates and every worker maps. It holds an array of mutexes, then two
doubles (edges, see core/limits) per slot. It outlives workers, so a restarted one continues with the same buckets. Every
account has a slot. A key has one too, which is used if its own limits are lower.

A mutex (robust_mutexes) guards the buckets of an account and of its keys. Each is a number that is written atomically,
so nothing needs repair if its holder is killed. A host with one worker needs no locks and saves a microsecond; while a reload
runs its successor beside it, two takes at once may be counted as one.
"""

from __future__ import annotations

import mmap
import os

from proxy.core import limits
from proxy.core.limits import EDGES_PER_SLOT, BucketRates
from proxy.store.shared_memory import robust_mutexes
from proxy.store.shared_memory.growing_file import map_part
from proxy.store.shared_memory.robust_mutexes import STRIPE_BYTES, Mutex

# Accounts that share a mutex wait for each other; with this many mutexes that is rare.
STRIPES = 256
MUTEX_BYTES = STRIPES * STRIPE_BYTES
SLOT_BYTES = 8 * EDGES_PER_SLOT
FIRST_SLOTS = 1 << 16

_lock = robust_mutexes.lock
_unlock = robust_mutexes.unlock
_adopt = robust_mutexes.adopt


def create() -> int:
    """Create full buckets and return the file descriptor, which the workers inherit."""
    fd = os.memfd_create("penstock-buckets")
    os.ftruncate(fd, MUTEX_BYTES + FIRST_SLOTS * SLOT_BYTES)
    with mmap.mmap(fd, MUTEX_BYTES) as memory:
        robust_mutexes.initialise(memory, STRIPES)
    return fd


def mutexes_of(fd: int) -> list[Mutex]:
    return robust_mutexes.mutexes_of(mmap.mmap(fd, MUTEX_BYTES), STRIPES)


class RateBuckets:
    """The limits of accounts and keys: each has a slot, which a mutex guards."""

    __slots__ = ("_locks",)

    def __init__(self, mutexes: list[Mutex]) -> None:
        self._locks = mutexes

    def reserve(self, slot: int) -> None:
        """Ensure that this slot exists."""
        raise NotImplementedError

    def reserve_rates(self, rate: BucketRates, own: BucketRates | None) -> None:
        """Ensure that the slots of an account and of a key with lower limits exist."""
        self.reserve(rate.slot)
        if own is not None:
            self.reserve(own.slot)

    def take(self, slot: int, now: float, request_s: float, unit_s: float) -> float:
        """Take from both of the slot's buckets and return zero, or take from neither and return the seconds to wait."""
        raise NotImplementedError

    def take_both(self, rate: BucketRates, own: BucketRates, now: float, *, requests: int, units: int) -> float:
        """The same for the buckets of an account and of a key with lower limits, in one step."""
        raise NotImplementedError

    def give_back(self, slot: int, request_s: float, unit_s: float) -> None:
        mutex = self._hold(slot)
        try:
            self._return(slot, request_s, unit_s)
        finally:
            _unlock(mutex)

    def give_back_both(self, rate: BucketRates, own: BucketRates, *, requests: int, units: int) -> None:
        mutex = self._hold(rate.slot)
        try:
            for each in (rate, own):
                self._return(each.slot, requests * each.request_s, units * each.unit_s)
        finally:
            _unlock(mutex)

    def _return(self, slot: int, request_s: float, unit_s: float) -> None:
        raise NotImplementedError

    def _hold(self, slot: int) -> Mutex:
        mutex = self._locks[slot % len(self._locks)]
        if held := _lock(mutex):
            _adopt(mutex, held)
        return mutex

    def edge(self, slot: int) -> float:
        """Return the request bucket's edge, for the headers. Reading a single double is atomic and needs no lock."""
        raise NotImplementedError

    def tighter(self, rate: BucketRates, own: BucketRates | None, now: float) -> BucketRates:
        """The limit that allows fewer requests now, for the headers."""
        if own is None:
            return rate
        left = limits.remaining(self.edge(rate.slot), now, rate.requests_per_second)
        return own if limits.remaining(self.edge(own.slot), now, own.requests_per_second) <= left else rate


class SharedBuckets(RateBuckets):
    """The buckets of one host, as one of its processes sees them."""

    __slots__ = ("_edges", "_fd", "slots")

    def __init__(self, fd: int) -> None:
        super().__init__(mutexes_of(fd))
        self._fd = fd
        self._edges = memoryview(b"").cast("d")
        self.slots = 0
        self._map(os.fstat(fd).st_size)

    def _map(self, size: int) -> None:
        self._edges = memoryview(map_part(self._fd, 0, size))[MUTEX_BYTES:].cast("d")
        self.slots = (size - MUTEX_BYTES) // SLOT_BYTES

    def reserve(self, slot: int) -> None:
        """The file only grows. Other workers remap when they need to."""
        if slot < self.slots:
            return
        wanted = FIRST_SLOTS
        while wanted <= slot:
            wanted *= 2
        self._map(MUTEX_BYTES + wanted * SLOT_BYTES)

    def take(self, slot: int, now: float, request_s: float, unit_s: float) -> float:
        mutex = self._locks[slot % STRIPES]
        if held := _lock(mutex):
            _adopt(mutex, held)
        # An unreserved slot is a bug: it must raise here, not leave the stripe locked for every worker.
        try:
            return limits.take(self._edges, slot * EDGES_PER_SLOT, now, request_s, unit_s)
        finally:
            _unlock(mutex)

    def take_both(self, rate: BucketRates, own: BucketRates, now: float, *, requests: int, units: int) -> float:
        mutex = self._hold(rate.slot)
        try:
            return limits.take_both(self._edges, rate, own, now, requests=requests, units=units)
        finally:
            _unlock(mutex)

    def _return(self, slot: int, request_s: float, unit_s: float) -> None:
        limits.give_back(self._edges, slot * EDGES_PER_SLOT, request_s, unit_s)

    def edge(self, slot: int) -> float:
        return self._edges[slot * EDGES_PER_SLOT]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.slots} slots>"


class UnsharedBuckets(SharedBuckets):
    """The buckets of a host with a single worker, without locks."""

    __slots__ = ()

    def take(self, slot: int, now: float, request_s: float, unit_s: float) -> float:
        return limits.take(self._edges, slot * EDGES_PER_SLOT, now, request_s, unit_s)
