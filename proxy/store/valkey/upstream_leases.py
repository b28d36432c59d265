"""The limits of upstreams that all hosts share: their tokens are leased from Valkey, like those of accounts and keys.

Nothing waits while an upstream is chosen: one without tokens is passed over, and tokens are asked for. A call that finds no
other upstream waits for them (`Dispatcher.launch`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from proxy.core.limits import BucketRates
from proxy.store.shared_memory.host_memory import HostMemory
from proxy.store.shared_memory.leased_buckets import ASK, LeasedBuckets
from proxy.store.valkey.lease_client import LeaseClient
from proxy.store.valkey.valkey_address import TAG
from proxy.store.valkey.valkey_link import ValkeyLink

# A leased bucket holds the calls of one second, so a limit below this is not leased.
LEAST_PER_SECOND = 1.0


class UpstreamLeases:
    def __init__(self, link: ValkeyLink, memory: HostMemory) -> None:
        self._table = memory.upstreams
        self._upstream_ids: dict[int, str] = {}
        self.buckets = LeasedBuckets.of_upstreams(memory.fd, memory.mutexes)
        self.client = LeaseClient(link, self.buckets, self._key_of)

    def __repr__(self) -> str:
        return f"<UpstreamLeases of {len(self._upstream_ids)}, {self.client!r}>"

    def rate(self, upstream_id: str, per_second: float) -> LeasedRate:
        bucket_index = self._table.bucket_index(upstream_id)
        self._upstream_ids[bucket_index] = upstream_id
        rates = BucketRates(bucket_index, math.ceil(per_second), 1)
        rates.request_s = 1.0 / per_second
        self.buckets.reserve_rates(rates, None)
        return LeasedRate(self.buckets, self.client, rates)

    def _key_of(self, bucket_index: int) -> str:
        return f"{TAG}:upstream:{self._upstream_ids[bucket_index]}"


class LeasedRate:
    """The `CallRate` of one upstream."""

    def __init__(self, buckets: LeasedBuckets, client: LeaseClient, rate: BucketRates) -> None:
        self._buckets = buckets
        self._client = client
        self._rate = rate
        self._own_s = rate.request_s

    def __repr__(self) -> str:
        return f"<LeasedRate {1.0 / self._rate.request_s:g}/s>"

    def admits(self, now: float) -> bool:
        wait_s = self._look(now)
        if wait_s == ASK:
            self._client.hint(self._rate.bucket_index, (self._rate.request_s, 0.0))
        return wait_s == 0.0

    def take(self, now: float) -> None:
        self._buckets.charge(self._rate.bucket_index, now, self._rate.request_s)

    def slow_to(self, cost_s: float) -> None:
        """Its calls take more of the tokens that the hosts share. A bucket holds those of a second."""
        self._rate.request_s = max(self._own_s, min(cost_s, 1.0))

    def waits(self, began: float) -> bool:
        """Whether a call that began to wait then is decided by Valkey's reply."""
        return self._look(time.monotonic()) == ASK and self._client.may_wait(began)

    def when_leased(self, again: Callable[[], None]) -> None:
        self._client.wait(self._rate.bucket_index, (self._rate.request_s, 0.0), again)

    def _look(self, now: float) -> float:
        return self._buckets.look(self._rate.bucket_index, now, self._rate.request_s)
