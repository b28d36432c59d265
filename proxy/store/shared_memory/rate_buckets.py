"""Rate-limit buckets of all accounts and keys, shared by the worker processes of one host.

The memory is an anonymous file that the supervisor creates and every worker maps. It holds an array of mutexes, then two
doubles (edges, see core/limits) per bucket pair. It outlives workers, so a restarted one continues with the same buckets. Every
account has a pair. A key has one too, which is used if its own limits are lower.

A mutex (robust_mutexes) guards the buckets of an account and of its keys. Each is a number that is written atomically,
so nothing needs repair if its holder is killed. A host with one worker needs no locks and saves a microsecond; while a reload
runs its successor beside it, two takes at once may be counted as one.
"""

from __future__ import annotations

import mmap
import os

from proxy.core import limits
from proxy.core.limits import EDGES_PER_BUCKET, BucketRates
from proxy.store.shared_memory import robust_mutexes
from proxy.store.shared_memory.growing_file import map_part
from proxy.store.shared_memory.robust_mutexes import STRIPE_BYTES, Mutex

# Accounts that share a mutex wait for each other; with this many mutexes that is rare.
STRIPES = 256
MUTEX_BYTES = STRIPES * STRIPE_BYTES
BUCKET_BYTES = 8 * EDGES_PER_BUCKET
FIRST_BUCKETS = 1 << 16

_lock = robust_mutexes.lock
_unlock = robust_mutexes.unlock
_adopt = robust_mutexes.adopt


def create() -> int:
    """Create full buckets and return the file descriptor, which the workers inherit."""
    fd = os.memfd_create("penstock-buckets")
    os.ftruncate(fd, MUTEX_BYTES + FIRST_BUCKETS * BUCKET_BYTES)
    with mmap.mmap(fd, MUTEX_BYTES) as memory:
        robust_mutexes.initialise(memory, STRIPES)
    return fd


def mutexes_of(fd: int) -> list[Mutex]:
    return robust_mutexes.mutexes_of(mmap.mmap(fd, MUTEX_BYTES), STRIPES)


class RateBuckets:
    """The limits of accounts and keys: each has a pair of buckets, which a mutex guards."""

    __slots__ = ("_locks",)

    def __init__(self, mutexes: list[Mutex]) -> None:
        self._locks = mutexes

    def reserve(self, bucket_index: int) -> None:
        """Ensure that these buckets exist."""
        raise NotImplementedError

    def reserve_rates(self, rate: BucketRates, own: BucketRates | None) -> None:
        """Ensure that the buckets of an account and of a key with lower limits exist."""
        self.reserve(rate.bucket_index)
        if own is not None:
            self.reserve(own.bucket_index)

    def take(self, bucket_index: int, now: float, request_s: float, unit_s: float) -> float:
        """Take from both buckets and return zero, or take from neither and return the seconds to wait."""
        raise NotImplementedError

    def take_both(self, rate: BucketRates, own: BucketRates, now: float, *, requests: int, units: int) -> float:
        """The same for the buckets of an account and of a key with lower limits, in one step."""
        raise NotImplementedError

    def give_back(self, bucket_index: int, request_s: float, unit_s: float) -> None:
        mutex = self._hold(bucket_index)
        try:
            self._return(bucket_index, request_s, unit_s)
        finally:
            _unlock(mutex)

    def give_back_both(self, rate: BucketRates, own: BucketRates, *, requests: int, units: int) -> None:
        mutex = self._hold(rate.bucket_index)
        try:
            for each in (rate, own):
                self._return(each.bucket_index, requests * each.request_s, units * each.unit_s)
        finally:
            _unlock(mutex)

    def _return(self, bucket_index: int, request_s: float, unit_s: float) -> None:
        raise NotImplementedError

    def _hold(self, bucket_index: int) -> Mutex:
        mutex = self._locks[bucket_index % len(self._locks)]
        if held := _lock(mutex):
            _adopt(mutex, held)
        return mutex

    def edge(self, bucket_index: int) -> float:
        """Return the request bucket's edge, for the headers. Reading a single double is atomic and needs no lock."""
        raise NotImplementedError

    def tighter(self, rate: BucketRates, own: BucketRates | None, now: float) -> BucketRates:
        """The limit that allows fewer requests now, for the headers."""
        if own is None:
            return rate
        left = limits.remaining(self.edge(rate.bucket_index), now, rate.requests_per_second)
        return own if limits.remaining(self.edge(own.bucket_index), now, own.requests_per_second) <= left else rate


class SharedBuckets(RateBuckets):
    """The buckets of one host, as one of its processes sees them."""

    __slots__ = ("_edges", "_fd", "bucket_count")

    def __init__(self, fd: int) -> None:
        super().__init__(mutexes_of(fd))
        self._fd = fd
        self._edges = memoryview(b"").cast("d")
        self.bucket_count = 0
        self._map(os.fstat(fd).st_size)

    def _map(self, size: int) -> None:
        self._edges = memoryview(map_part(self._fd, 0, size))[MUTEX_BYTES:].cast("d")
        self.bucket_count = (size - MUTEX_BYTES) // BUCKET_BYTES

    def reserve(self, bucket_index: int) -> None:
        """The file only grows. Other workers remap when they need to."""
        if bucket_index < self.bucket_count:
            return
        wanted = FIRST_BUCKETS
        while wanted <= bucket_index:
            wanted *= 2
        self._map(MUTEX_BYTES + wanted * BUCKET_BYTES)

    def take(self, bucket_index: int, now: float, request_s: float, unit_s: float) -> float:
        mutex = self._locks[bucket_index % STRIPES]
        if held := _lock(mutex):
            _adopt(mutex, held)
        # An unreserved index is a bug: it must raise here, not leave the stripe locked for every worker.
        try:
            return limits.take(self._edges, bucket_index * EDGES_PER_BUCKET, now, request_s, unit_s)
        finally:
            _unlock(mutex)

    def take_both(self, rate: BucketRates, own: BucketRates, now: float, *, requests: int, units: int) -> float:
        mutex = self._hold(rate.bucket_index)
        try:
            return limits.take_both(self._edges, rate, own, now, requests=requests, units=units)
        finally:
            _unlock(mutex)

    def _return(self, bucket_index: int, request_s: float, unit_s: float) -> None:
        limits.give_back(self._edges, bucket_index * EDGES_PER_BUCKET, request_s, unit_s)

    def edge(self, bucket_index: int) -> float:
        return self._edges[bucket_index * EDGES_PER_BUCKET]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.bucket_count} bucket pairs>"


class UnsharedBuckets(SharedBuckets):
    """The buckets of a host with a single worker, without locks."""

    __slots__ = ()

    def take(self, bucket_index: int, now: float, request_s: float, unit_s: float) -> float:
        return limits.take(self._edges, bucket_index * EDGES_PER_BUCKET, now, request_s, unit_s)
