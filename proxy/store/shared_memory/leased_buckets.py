"""Buckets that all hosts share: tokens are leased from Valkey, kept in the memory of the host, and spent without asking.

Each pair has a record of leased tokens (lease_records). `take` spends them under the pair's mutex. If they run out it returns
ASK: the caller's worker asks Valkey for its own waiting calls (valkey/lease_client) and leaves the surplus here for all workers
of the host. The rules of the leases are in schemas/valkey/functions.lua.

While Valkey is away, the host uses its share of each limit: its part of all recent grants, and at least 1/N for N hosts.

Upstreams have limits of this kind too. An upstream is chosen first (`look`), and charged when the call is sent (`charge`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from proxy.core.limits import TOLERANCE_S, BucketRates
from proxy.store.shared_memory import robust_mutexes
from proxy.store.shared_memory.growing_file import map_part
from proxy.store.shared_memory.host_memory import LEASES_AT, UPSTREAM_LEASES_AT, UPSTREAMS
from proxy.store.shared_memory.lease_records import (
    ALL,
    ANSWERED_AT,
    CELLS,
    DRY_UNTIL,
    EDGE_R,
    EDGE_U,
    FLEET_EDGE,
    MINE,
    READY_R,
    READY_U,
    RECORD_BYTES,
    RESERVE_R,
    RESERVE_U,
    UNTIL,
    Lease,
    LeaseGrant,
    LeaseReport,
    share_edge,
    share_of,
)
from proxy.store.shared_memory.rate_buckets import FIRST_BUCKETS, RateBuckets, mutexes_of
from proxy.store.shared_memory.robust_mutexes import Mutex

# `take` returns this if the caller has to wait for a lease.
ASK: Final = -1.0
# Tokens for this long, or for this many round trips, are requested in advance. When half of them are left, more are requested.
AHEAD_S: Final = 0.05
AHEAD_ROUND_TRIPS: Final = 3.0

_lock = robust_mutexes.lock
_unlock = robust_mutexes.unlock
_adopt = robust_mutexes.adopt


class LeasedBuckets(RateBuckets):
    __slots__ = ("_alone", "_cells", "_fd", "_low", "_start", "away", "bucket_count", "least_share", "rates")

    def __init__(self, mutexes: list[Mutex], fd: int, start: int, *, bucket_count: int, alone: bool) -> None:
        """The leases begin at `start` in the host's memory. `alone`: this worker is the host's only one and needs no locks."""
        super().__init__(mutexes)
        self._alone = alone
        self._fd = fd
        self._start = start
        self._low: Callable[[int], None] = _ignore
        # Whether Valkey does not answer this worker.
        self.away = True
        # 1/N for N hosts.
        self.least_share = 1.0
        # By bucket index: what one request and one unit cost there, and the index whose mutex guards it.
        self.rates: dict[int, tuple[BucketRates, int]] = {}
        self.bucket_count = bucket_count
        self._cells = self._map(bucket_count)

    @classmethod
    def of_accounts(cls, buckets_fd: int, memory_fd: int, *, alone: bool) -> LeasedBuckets:
        """The limits of accounts and keys. Their mutexes are those of the host's own buckets."""
        return cls(mutexes_of(buckets_fd), memory_fd, LEASES_AT, bucket_count=FIRST_BUCKETS, alone=alone)

    @classmethod
    def of_upstreams(cls, memory_fd: int, mutexes: list[Mutex]) -> LeasedBuckets:
        """The limits of upstreams. Their mutexes are those of the host's memory, which background processes map too."""
        return cls(mutexes, memory_fd, UPSTREAM_LEASES_AT, bucket_count=UPSTREAMS, alone=False)

    def on_low(self, notify: Callable[[int], None]) -> None:
        """Have this called with each bucket index that needs more tokens soon."""
        self._low = notify

    # Bucket pairs

    def reserve_rates(self, rate: BucketRates, own: BucketRates | None) -> None:
        super().reserve_rates(rate, own)
        self.rates[rate.bucket_index] = (rate, rate.bucket_index)
        if own is not None:
            self.rates[own.bucket_index] = (own, rate.bucket_index)

    def reserve(self, bucket_index: int) -> None:
        if bucket_index >= self.bucket_count:
            while self.bucket_count <= bucket_index:
                self.bucket_count *= 2
            self._cells = self._map(self.bucket_count)

    def _map(self, bucket_count: int) -> memoryview[float]:
        return memoryview(map_part(self._fd, self._start, bucket_count * RECORD_BYTES)).cast("d")

    # Spending

    def take(self, bucket_index: int, now: float, request_s: float, unit_s: float) -> float:
        """Zero if both were taken, ASK if Valkey has to be asked, otherwise the seconds to wait."""
        if self._alone:
            return self._spend(bucket_index, now, request_s, unit_s)
        mutex = self._locks[bucket_index % len(self._locks)]
        if held := _lock(mutex):
            _adopt(mutex, held)
        try:
            return self._spend(bucket_index, now, request_s, unit_s)
        finally:
            _unlock(mutex)

    def _spend(self, bucket_index: int, now: float, request_s: float, unit_s: float) -> float:
        cells = self._cells
        at = bucket_index * CELLS
        requests: float = cells[at + READY_R] - request_s
        units: float = cells[at + READY_U] - unit_s
        if requests < -TOLERANCE_S or units < -TOLERANCE_S or now >= cells[at + UNTIL]:
            return self._spend_rest(bucket_index, now, request_s, unit_s)
        cells[at + READY_R] = requests
        cells[at + READY_U] = units
        return 0.0

    def _spend_rest(self, bucket_index: int, now: float, request_s: float, unit_s: float) -> float:
        """Spend the reserve too, and request more tokens."""
        if (dry_s := self._refused_for(bucket_index, now, request_s, unit_s)) > 0.0:
            return dry_s
        cells, at = self._cells, bucket_index * CELLS
        if self.away and request_s > TOLERANCE_S and cells[at + READY_R] + cells[at + RESERVE_R] <= 0.0:
            return self._take_share(at, now, request_s, unit_s)
        lease = Lease(cells, bucket_index)
        lease.expire(now)
        is_spent = lease.spend(request_s, unit_s)
        lease.write(cells, bucket_index)
        if is_spent:
            if not self.away and lease.may_ask(now):
                self._low(bucket_index)
            return 0.0
        if self.away:
            return self._take_share(at, now, request_s, unit_s)
        return lease.dry_until - now if now < lease.dry_until else ASK

    def _take_share(self, at: int, now: float, request_s: float, unit_s: float) -> float:
        """Take from the host's share of the tokens refilled since Valkey last answered, or return the seconds to wait.
        In place, because every call needs it while Valkey is away."""
        cells = self._cells
        share = share_of(cells[at + MINE], cells[at + ALL], self.least_share)
        answered_at: float = cells[at + ANSWERED_AT]
        requests = share_edge(cells[at + EDGE_R], now, request_s, share, answered_at)
        units = share_edge(cells[at + EDGE_U], now, unit_s, share, answered_at)
        wait = max(requests, units) - now
        if wait > TOLERANCE_S:
            return wait
        cells[at + EDGE_R] = requests
        cells[at + EDGE_U] = units
        return 0.0

    def _refused_for(self, bucket_index: int, now: float, request_s: float, unit_s: float) -> float:
        """The seconds until Valkey can be asked, if it has to be. Read in place: a flood of refused calls must be cheap."""
        cells, at = self._cells, bucket_index * CELLS
        dry_s: float = cells[at + DRY_UNTIL] - now
        if dry_s <= 0.0 or self.away or now >= cells[at + UNTIL]:
            return 0.0
        requests: float = cells[at + READY_R] + cells[at + RESERVE_R] - request_s
        units: float = cells[at + READY_U] + cells[at + RESERVE_U] - unit_s
        return dry_s if requests < -TOLERANCE_S or units < -TOLERANCE_S else 0.0

    def take_both(self, rate: BucketRates, own: BucketRates, now: float, *, requests: int, units: int) -> float:
        """The same for the buckets of an account and of a key with lower limits, in one step."""
        mutex = self._hold(rate.bucket_index)
        try:
            wait = self._spend(rate.bucket_index, now, requests * rate.request_s, units * rate.unit_s)
            own_wait = self._spend(own.bucket_index, now, requests * own.request_s, units * own.unit_s)
            if wait and not own_wait:
                self._return(own.bucket_index, requests * own.request_s, units * own.unit_s)
            elif own_wait and not wait:
                self._return(rate.bucket_index, requests * rate.request_s, units * rate.unit_s)
        finally:
            _unlock(mutex)
        if wait > 0.0 or own_wait > 0.0:
            return max(wait, own_wait)
        return min(wait, own_wait)

    def _return(self, bucket_index: int, request_s: float, unit_s: float) -> None:
        cells, at = self._cells, bucket_index * CELLS
        if self.away:
            lease = Lease(cells, bucket_index)
            lease.give_back_share(request_s, unit_s, self.least_share)
            lease.write(cells, bucket_index)
        else:
            cells[at + READY_R] += request_s
            cells[at + READY_U] += unit_s

    def edge(self, bucket_index: int) -> float:
        """The request bucket's edge, for the headers: what Valkey's bucket and this host hold together."""
        cells, at = self._cells, bucket_index * CELLS
        if self.away:
            return float(cells[at + EDGE_R])
        return float(cells[at + FLEET_EDGE] - cells[at + READY_R] - cells[at + RESERVE_R])

    # Calls to upstreams

    def look(self, bucket_index: int, now: float, request_s: float) -> float:
        """Zero if a call can be sent, ASK if Valkey has to be asked, otherwise the seconds to wait. Takes nothing."""
        mutex = self._hold(bucket_index)
        try:
            lease = self.lease(bucket_index)
        finally:
            _unlock(mutex)
        lease.expire(now)
        if lease.requests.has(request_s):
            return 0.0
        if self.away:
            wait = lease.share_edge(lease.requests, now, request_s, self.least_share) - now
            return wait if wait > TOLERANCE_S else 0.0
        return lease.dry_until - now if now < lease.dry_until else ASK

    def charge(self, bucket_index: int, now: float, request_s: float) -> None:
        """Charge one call, also if there is no token left: the debt delays the calls after it."""
        mutex = self._hold(bucket_index)
        try:
            if self._spend(bucket_index, now, request_s, 0.0) == 0.0:
                return
            lease = self.lease(bucket_index)
            lease.owe(now, request_s, self.least_share, away=self.away)
            lease.write(self._cells, bucket_index)
        finally:
            _unlock(mutex)

    # Asking. `guard` is the index whose mutex guards the record.

    def lease(self, bucket_index: int) -> Lease:
        """A copy of the record."""
        return Lease(self._cells, bucket_index)

    def report(
        self, rate: BucketRates, guard: int, now: float, need: tuple[float, float], ahead_s: float
    ) -> LeaseReport:
        """Begin an ask: what waiting calls need, what is wanted in advance for `ahead_s`, and what was spent. If nothing is
        wanted and nothing was spent for a while, return what is left: other hosts may need it."""
        mutex = self._hold(guard)
        try:
            lease = self.lease(rate.bucket_index)
            lease_report = lease.report(rate, now, need, ahead_s)
            lease.write(self._cells, rate.bucket_index)
            return lease_report
        finally:
            _unlock(mutex)

    def grant(self, rate: BucketRates, guard: int, now: float, given: LeaseGrant, low_s: float) -> None:
        """Add what Valkey has granted. `low_s`: tokens for this long are the reserve."""
        mutex = self._hold(guard)
        try:
            lease = self.lease(rate.bucket_index)
            lease.grant(now, given, low_s)
            lease.write(self._cells, rate.bucket_index)
        finally:
            _unlock(mutex)

    def __repr__(self) -> str:
        return f"<LeasedBuckets {self.bucket_count} bucket pairs, Valkey {'away' if self.away else 'up'}>"


def _ignore(_: int) -> None: ...
